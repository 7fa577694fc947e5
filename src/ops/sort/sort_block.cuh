// A block's entries in order: a bitonic network whose exchanges stay in a thread's registers where they are
// near, go from lane to lane within a warp, and through shared memory only from warp to warp.
#pragma once

#include <cstdint>

#include "backends/cuda/device/vectors.cuh"

namespace mlxtape::ops {

using Entry = unsigned long long;
constexpr Entry kLastEntry = ~Entry{0};  // behind every real one: no row has an index of 2³² − 1

constexpr int kMostItems = 16;      // entries of a thread
constexpr int kMostSorted = 16384;  // entries that a block can sort

// For at least count entries, a power of two of them in all.
struct BlockSize {
  int threads, items, shared;
};
inline BlockSize block_for(std::int64_t count) {
  int size = 256;
  while (size < count) size *= 2;
  const int items = size > 8192 ? kMostItems : 8;
  const int threads = size / items;
  return {threads, items, threads == cuda::kWarp ? 0 : size * static_cast<int>(sizeof(Entry))};
}

template <int kItems, int kStride>
__device__ __forceinline__ void exchange_within(Entry (&e)[kItems], int size) {
#pragma unroll
  for (int j = 0; j < kItems; ++j) {
    if ((j & kStride) != 0) continue;
    const bool up = ((static_cast<int>(threadIdx.x) * kItems + j) & size) == 0;
    const Entry a = e[j], b = e[j + kStride];
    const bool keep = (a < b) == up;
    e[j] = keep ? a : b;
    e[j + kStride] = keep ? b : a;
  }
}
template <int kItems, int kStride>
__device__ __forceinline__ void merge_within(Entry (&e)[kItems], int size) {
  exchange_within<kItems, kStride>(e, size);
  if constexpr (kStride > 1) merge_within<kItems, kStride / 2>(e, size);
}
template <int kItems, int kSize>
__device__ __forceinline__ void sort_within(Entry (&e)[kItems]) {
  if constexpr (kSize > 2) sort_within<kItems, kSize / 2>(e);
  merge_within<kItems, kSize / 2>(e, kSize);
}

// The entries of all threads ascending: thread t has those from t·kItems on. room: as many entries in shared
// memory, for more than one warp; nobody else may be using it.
template <int kItems>
__device__ __forceinline__ void block_sort(Entry (&e)[kItems], Entry* room) {
  const int t = static_cast<int>(threadIdx.x), threads = static_cast<int>(blockDim.x);
  sort_within<kItems, kItems>(e);
  for (int size = 2 * kItems; size <= threads * kItems; size *= 2) {
    const bool up = ((t * kItems) & size) == 0;
    for (int far = size / kItems / 2; far > 0; far /= 2) {  // in threads
      const bool keeps_less = ((t & far) == 0) == up;
      if (far < cuda::kWarp) {
#pragma unroll
        for (int j = 0; j < kItems; ++j) {
          const Entry other = __shfl_xor_sync(cuda::kAll, e[j], far);
          e[j] = (other < e[j]) == keeps_less ? other : e[j];
        }
      } else {
        __syncthreads();  // the last exchange has been read
#pragma unroll
        for (int j = 0; j < kItems; ++j) room[j * threads + t] = e[j];
        __syncthreads();
#pragma unroll
        for (int j = 0; j < kItems; ++j) {
          const Entry other = room[j * threads + (t ^ far)];
          e[j] = (other < e[j]) == keeps_less ? other : e[j];
        }
      }
    }
    merge_within<kItems, kItems / 2>(e, size);
  }
}

}  // namespace mlxtape::ops
