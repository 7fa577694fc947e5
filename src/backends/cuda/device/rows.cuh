// The threads that share a row, and what they agree on. kThreads is a part of a warp, a warp, or a
// whole block of several warps; results are the same bits in every thread, in one fixed order of
// additions. Threads of a row that does not exist must take part: they bring nothing.
#pragma once

#include "backends/cuda/device/vectors.cuh"

namespace mlxtape::cuda {

template <int kThreads>
struct RowThreads {
  static constexpr int kWarps = kThreads <= kWarp ? 1 : kThreads / kWarp;
  static constexpr bool kOneWarp = kThreads <= kWarp;
  static constexpr int kBlock = kOneWarp ? 128 : kThreads;  // threads of a block
  static constexpr int kRows = kBlock / kThreads;           // rows of a block

  static __device__ std::int64_t row() {
    return std::int64_t{blockIdx.x} * kRows + threadIdx.x / kThreads;
  }
  static __device__ int rank() { return threadIdx.x % kThreads; }

  // room: kWarps floats of shared memory, a different piece for each call of a kernel.
  static __device__ float sum(float v, float* room) {
    v = lanes_sum<kOneWarp ? kThreads : kWarp>(v);
    if constexpr (kOneWarp) return v;
    if (threadIdx.x % kWarp == 0) room[threadIdx.x / kWarp] = v;
    __syncthreads();
    float all = 0;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) all += room[w];
    return all;
  }
};

inline std::int64_t blocks_for(std::int64_t work, std::int64_t each) {
  return (work + each - 1) / each;
}

inline bool is_aligned(const void* p) { return reinterpret_cast<std::uintptr_t>(p) % 16 == 0; }

}  // namespace mlxtape::cuda
