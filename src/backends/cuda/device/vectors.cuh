// 16-byte accesses and sums across threads, for the CUDA kernels of every op.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "mlxtape/base/half.h"

namespace mlxtape::cuda {

constexpr int kWarp = 32;
constexpr unsigned kAll = 0xffffffffU;  // every lane of a warp

// ---- elements ----

__device__ __forceinline__ float widen(float v) { return v; }
__device__ __forceinline__ float widen(F16 v) { return __half2float(__ushort_as_half(v.bits)); }
__device__ __forceinline__ float widen(BF16 v) {
  return __uint_as_float(static_cast<unsigned>(v.bits) << 16U);
}

template <class T>
__device__ __forceinline__ T narrow(float v);
template <>
__device__ __forceinline__ float narrow<float>(float v) {
  return v;
}
template <>
__device__ __forceinline__ F16 narrow<F16>(float v) {
  F16 out;
  out.bits = __half_as_ushort(__float2half_rn(v));
  return out;
}
template <>
__device__ __forceinline__ BF16 narrow<BF16>(float v) {
  BF16 out;
  out.bits = __bfloat16_as_ushort(__float2bfloat16_rn(v));
  return out;
}

// ---- packs: the 16 bytes that one thread reads or writes at once ----

template <class T>
constexpr int kPack = 16 / sizeof(T);

// As they are stored, so that 16-bit elements wait in half the registers.
template <class T>
struct alignas(16) Pack {
  unsigned word[4];
};

// Read once, by this thread alone: not worth a line in the first-level cache. Memory that no thread of
// the kernel writes.
template <class T>
__device__ __forceinline__ Pack<T> load_pack(const T* p) {
  Pack<T> pack;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(pack.word[0]), "=r"(pack.word[1]), "=r"(pack.word[2]), "=r"(pack.word[3])
               : "l"(p));
  return pack;
}
// Read again by others: weights.
template <class T>
__device__ __forceinline__ Pack<T> load_pack_shared(const T* p) {
  const uint4 bits = __ldg(reinterpret_cast<const uint4*>(p));
  return {{bits.x, bits.y, bits.z, bits.w}};
}
template <class T>
__device__ __forceinline__ void store_pack(const Pack<T>& pack, T* p) {
  __stcs(reinterpret_cast<uint4*>(p),
         make_uint4(pack.word[0], pack.word[1], pack.word[2], pack.word[3]));
}

__device__ __forceinline__ void unpack(const Pack<float>& pack, float (&v)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) v[i] = __uint_as_float(pack.word[i]);
}
__device__ __forceinline__ void unpack(const Pack<BF16>& pack, float (&v)[8]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    v[2 * i] = __uint_as_float(pack.word[i] << 16U);
    v[2 * i + 1] = __uint_as_float(pack.word[i] & 0xffff0000U);
  }
}
__device__ __forceinline__ void unpack(const Pack<F16>& pack, float (&v)[8]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 two = __half22float2(*reinterpret_cast<const __half2*>(&pack.word[i]));
    v[2 * i] = two.x;
    v[2 * i + 1] = two.y;
  }
}

template <class T>
__device__ __forceinline__ Pack<T> pack_of(const float (&v)[kPack<T>]) {
  Pack<T> pack;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if constexpr (sizeof(T) == 4) {
      pack.word[i] = __float_as_uint(v[i]);
    } else if constexpr (std::is_same_v<T, BF16>) {
      const __nv_bfloat162 two = __floats2bfloat162_rn(v[2 * i], v[2 * i + 1]);
      pack.word[i] = *reinterpret_cast<const unsigned*>(&two);
    } else {
      const __half2 two = __floats2half2_rn(v[2 * i], v[2 * i + 1]);
      pack.word[i] = *reinterpret_cast<const unsigned*>(&two);
    }
  }
  return pack;
}

// ---- sums and maxima, the same bits in every thread ----

template <int kLanes = kWarp>
__device__ __forceinline__ float lanes_sum(float v) {
#pragma unroll
  for (int step = kLanes / 2; step > 0; step /= 2) v += __shfl_xor_sync(kAll, v, step);
  return v;
}

// NaN is the maximum of whatever it is among.
__device__ __forceinline__ float max_nan(float a, float b) {
  float out;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(out) : "f"(a), "f"(b));
  return out;
}
template <int kLanes = kWarp>
__device__ __forceinline__ float lanes_max(float v) {
  if constexpr (kLanes ==
                kWarp) {  // one instruction for integers: in the order of the numbers, NaN last
    const int bits = __float_as_int(v);
    const int key = v != v ? 0x7fffffff : bits ^ ((bits >> 31) & 0x7fffffff);
    const int largest = __reduce_max_sync(kAll, key);
    return __int_as_float(largest ^ ((largest >> 31) & 0x7fffffff));
  } else {
#pragma unroll
    for (int step = kLanes / 2; step > 0; step /= 2) v = max_nan(v, __shfl_xor_sync(kAll, v, step));
    return v;
  }
}

}  // namespace mlxtape::cuda
