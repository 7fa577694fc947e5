// Rows that are zero but for a few sums: a warp makes them in shared memory, in a fixed order of
// additions, and writes the whole row once.
//
// What belongs to a row that starts in the middle of 16 bytes starts as far into its shared memory, so
// that packs of the one are packs of the other whatever the alignment.
#pragma once

#include "backends/cuda/device/vectors.cuh"

namespace mlxtape::cuda {

// Elements of shared memory, of type S, for n of a row of any alignment of type T.
template <class S, class T>
constexpr int room_for(int n) {
  return (n + kPack<T> + kPack<S> - 2) / kPack<S> * kPack<S>;
}

// The number of a lane divided by n ≤ 32, without a division, for which the reads of a warp would wait.
struct LaneDivisor {
  unsigned inverse;

  explicit LaneDivisor(std::int64_t n) : inverse((1U << 16U) / static_cast<unsigned>(n) + 1) {}
  __device__ int divide(int lane) const { return static_cast<int>(lane * inverse >> 16U); }
};

// Elements from the 16-byte boundary before p to p.
template <class T>
__device__ __forceinline__ int skew_of(const T* p) {
  return static_cast<int>(reinterpret_cast<std::uintptr_t>(p) / sizeof(T) % kPack<T>);
}

// room[0, n) and the rest of its last 16 bytes = 0. room: 16-byte aligned. No barrier.
template <class S>
__device__ __forceinline__ void zero(S* room, int n) {
  for (int i = kPack<S> * (threadIdx.x % kWarp); i < n; i += kPack<S> * kWarp) {
    *reinterpret_cast<uint4*>(room + i) = make_uint4(0, 0, 0, 0);
  }
}

// The sum of the v of all lanes at one place, in the order of the lanes, goes to the first of them;
// returns whether this lane is one that has it.
__device__ __forceinline__ bool gather_equal(bool has, unsigned at, float& v) {
  const unsigned lane = threadIdx.x % kWarp;
  const unsigned same = __match_any_sync(kAll, has ? at : ~0U);
  const bool first = has && (same & ((1U << lane) - 1)) == 0;
  unsigned rest = first ? same & (same - 1) : 0;
  while (__any_sync(kAll, rest != 0)) {
    const float other = __shfl_sync(kAll, v, rest != 0 ? __ffs(static_cast<int>(rest)) - 1 : 0);
    if (rest != 0) v += other;
    rest &= rest - 1;
  }
  return first;
}

// The lanes that have come to a place of 2 or 4 bytes, counted in its own bits; to begin with they are 0.
template <class S>
struct Counter {
  unsigned* word;
  unsigned shift;

  __device__ explicit Counter(S* place) {
    const auto address = reinterpret_cast<std::uintptr_t>(place);
    word = reinterpret_cast<unsigned*>(address & ~std::uintptr_t{3});
    shift = sizeof(S) == 2 && (address & 2U) != 0 ? 16 : 0;
  }
  __device__ void add() const { atomicAdd(word, 1U << shift); }
  __device__ unsigned count() const { return (*word >> shift) & 0xffffU; }
};

// room[at] = v, rounded, of every lane that has one, where room is zero; v of equal places are added
// in the order of the lanes. The whole warp calls it; it begins and ends with a barrier of the warp.
template <class S>
__device__ __forceinline__ void place(S* room, bool has, unsigned at, float v) {
  // Whoever is not alone is found by counting: to compare all places with each other takes a warp
  // longer than to write a row of 512.
  const Counter<S> counter(room + (has ? at : 0));
  __syncwarp();
  if (has) counter.add();
  __syncwarp();
  const bool met = has && counter.count() != 1;
  __syncwarp();
  if (__any_sync(kAll, met)) has = gather_equal(has, at, v);
  if (has) room[at] = narrow<S>(v);
  __syncwarp();
}

// sums[at] += v of every lane that has one; equal places in the order of the lanes. The whole warp
// calls it; it ends with a barrier of the warp.
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

// The pack of a row whose elements are in room.
template <class T>
__device__ __forceinline__ Pack<T> pack_from(const T* room) {
  return *reinterpret_cast<const Pack<T>*>(room);
}
template <class T>
  requires(sizeof(T) == 2)
__device__ __forceinline__ Pack<T> pack_from(const float* room) {
  const float4 low = *reinterpret_cast<const float4*>(room);
  const float4 high = *reinterpret_cast<const float4*>(room + 4);
  return pack_of<T>({low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w});
}

// out[i] = room[skew_of(out) + i] for i in [0, n), rounded. No barrier.
template <class S, class T>
__device__ __forceinline__ void store_row(const S* room, T* out, int n) {
  const int lane = threadIdx.x % kWarp;
  const int skew = skew_of(out);
  const int end = skew + n;
  const int whole = min(end, (skew + kPack<T> - 1) / kPack<T> * kPack<T>);  // the first whole pack
  const int rest = max(whole, end / kPack<T> * kPack<T>);  // what is behind the last
  T* line = out - skew;
#pragma unroll 4
  for (int i = whole + kPack<T> * lane; i < rest; i += kPack<T> * kWarp) {
    store_pack(pack_from<T>(room + i), line + i);
  }
  if (skew + lane < whole) line[skew + lane] = narrow<T>(widen(room[skew + lane]));
  if (rest + lane < end) line[rest + lane] = narrow<T>(widen(room[rest + lane]));
}

}  // namespace mlxtape::cuda
