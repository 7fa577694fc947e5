// Sums that blocks made for themselves and left in scratch memory, added up by a second kernel in one
// fixed order.
#pragma once

#include <cuda_runtime.h>

#include "backends/cuda/device/launch.cuh"
#include "backends/cuda/device/vectors.cuh"

namespace mlxtape::cuda {

// A kernel that leaves partial sums begins with hold_next_wait_turn in the place of wait_turn, and calls
// next_may_start when its rows are done. Started with it, the blocks of the second kernel would crowd on
// the first multiprocessors that have room, and those of the kernel after it be dealt out unevenly: 2 to
// 7 % more time.
__device__ __forceinline__ void hold_next_wait_turn() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}
__device__ __forceinline__ void next_may_start() {
  asm volatile("griddepcontrol.launch_dependents;");
}

constexpr int kPartialThreads = 512;
constexpr int kPartialBatch = 8;  // loads of a thread that are under way at once

// lanes: columns of a block, a power of two; its other threads share the rows of these.
template <class Out>
__global__ void __launch_bounds__(kPartialThreads)
    sum_partials_kernel(const float* parts, int count, std::int64_t n, int lanes, Out* out) {
  wait_turn();
  __shared__ float room[kPartialThreads];
  const int lane = threadIdx.x & (lanes - 1);
  const int share = threadIdx.x / lanes;
  const int shares = kPartialThreads / lanes;
  const std::int64_t c = std::int64_t{blockIdx.x} * lanes + lane;
  float sum = 0;
  for (int p = share; c < n && p < count; p += kPartialBatch * shares) {
    float v[kPartialBatch];
#pragma unroll
    for (int k = 0; k < kPartialBatch; ++k) {
      const int q = p + k * shares;
      v[k] = q < count ? __ldcs(parts + q * n + c) : 0;
    }
#pragma unroll
    for (const float each : v) sum += each;
  }
  room[threadIdx.x] = sum;
  for (int half = shares / 2; half > 0; half /= 2) {
    __syncthreads();
    if (share < half) room[threadIdx.x] += room[threadIdx.x + half * lanes];
  }
  if (share == 0 && c < n) out[c] = narrow<Out>(room[lane]);
}

// out [n] = the sum of the rows of parts [count, n]; zeros where count is 0.
template <class Out>
void sum_partials(const float* parts, std::int64_t count, std::int64_t n, Out* out,
                  cudaStream_t stream) {
  // As many threads to a column as have one batch each; but 8 columns are a sector of memory.
  int lanes = kPartialThreads / 4;
  while (lanes > 8 && kPartialThreads / lanes * kPartialBatch < count) lanes /= 2;
  launch(sum_partials_kernel<Out>, (n + lanes - 1) / lanes, kPartialThreads, 0, 1, stream, parts,
         static_cast<int>(count), n, lanes, out);
}

}  // namespace mlxtape::cuda
