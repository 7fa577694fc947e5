// Rows that are zero but for a few sums: a warp adds them up in shared memory, in a fixed order, and
// writes the whole row once.
//
// The sums of a row that starts in the middle of 16 bytes start as far into their memory, so that
// packs of the one are packs of the other whatever the alignment.
#pragma once

#include "backends/cuda/device/vectors.cuh"

namespace mlxtape::cuda {

// Floats of shared memory for the sums of n elements of any type and alignment.
constexpr int sums_room(int n) { return (n + 2 * kPack<F16> + 3) / 4 * 4; }

// Elements from the 16-byte boundary before p to p.
template <class T>
__device__ __forceinline__ int skew_of(const T* p) {
  return static_cast<int>(reinterpret_cast<std::uintptr_t>(p) / sizeof(T) % kPack<T>);
}

// sums[0, n) and up to 3 more = 0. sums: 16-byte aligned. No barrier.
__device__ __forceinline__ void zero_sums(float* sums, int n) {
  for (int i = 4 * (threadIdx.x % kWarp); i < n; i += 4 * kWarp) {
    *reinterpret_cast<float4*>(sums + i) = make_float4(0, 0, 0, 0);
  }
}

// sums[at] += v of every lane that has one; equal places in the order of the lanes. The whole warp
// calls it; it begins and ends with a barrier of the warp.
__device__ __forceinline__ void add_in_order(float* sums, bool has, unsigned at, float v) {
  const unsigned lane = threadIdx.x % kWarp;
  const unsigned same = __match_any_sync(kAll, has ? at : ~0U);
  const unsigned turn = has ? __popc(same & ((1U << lane) - 1)) : 0;
  const unsigned last = __reduce_max_sync(kAll, turn);
  for (unsigned t = 0; t <= last; ++t) {
    if (has && turn == t) sums[at] += v;
    __syncwarp();
  }
}

// out[i] = sums[skew_of(out) + i] for i in [0, n), rounded. No barrier.
template <class T>
__device__ __forceinline__ void store_sums(const float* sums, T* out, int n) {
  const int skew = skew_of(out);
  const int end = skew + n;
  T* line = out - skew;
  for (int i = kPack<T> * (threadIdx.x % kWarp); i < end; i += kPack<T> * kWarp) {
    if (i >= skew && i + kPack<T> <= end) {
      float v[kPack<T>];
#pragma unroll
      for (int j = 0; j < kPack<T>; j += 4) {
        const float4 four = *reinterpret_cast<const float4*>(sums + i + j);
        v[j] = four.x;
        v[j + 1] = four.y;
        v[j + 2] = four.z;
        v[j + 3] = four.w;
      }
      store_pack(pack_of<T>(v), line + i);
    } else {
#pragma unroll
      for (int j = 0; j < kPack<T>; ++j) {
        if (i + j >= skew && i + j < end) line[i + j] = narrow<T>(sums[i + j]);
      }
    }
  }
}

}  // namespace mlxtape::cuda
