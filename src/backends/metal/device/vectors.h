// Elements and packs of 16 bytes, for the kernels of every op.
//
// bfloat16 is read as the integer it is stored as and widened by a shift: the type's own conversions are slow on the first
// two generations of chips. Rounding is to nearest, ties to even; NaN stays NaN.
#pragma once

#include <metal_stdlib>
using namespace metal;

struct bf16 {
  ushort bits;
};

inline float widen(float v) { return v; }
inline float widen(half v) { return float(v); }
inline float widen(bf16 v) { return as_type<float>(uint(v.bits) << 16); }

// The bits of a bfloat16, in the lower half.
inline uint round_to_bf16(float v) {
  const uint bits = as_type<uint>(v);
  const uint rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  return (bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : rounded;
}

template <typename T>
inline T narrow(float v);
template <>
inline float narrow<float>(float v) {
  return v;
}
template <>
inline half narrow<half>(float v) {
  return half(v);
}
template <>
inline bf16 narrow<bf16>(float v) {
  bf16 out;
  out.bits = ushort(round_to_bf16(v));
  return out;
}

// What 16 bytes hold of a type: kPack elements, as floats in an array of the thread.
template <typename T>
struct Pack;
template <>
struct Pack<float> {
  enum { kCount = 4 };
  static inline void unpack(uint4 bits, thread float* v) {
    const float4 four = as_type<float4>(bits);
    for (int i = 0; i < 4; ++i) v[i] = four[i];
  }
  static inline uint4 pack(thread const float* v) {
    return as_type<uint4>(float4(v[0], v[1], v[2], v[3]));
  }
};
template <>
struct Pack<half> {
  enum { kCount = 8 };
  static inline void unpack(uint4 bits, thread float* v) {
    for (int i = 0; i < 4; ++i) {
      const half2 two = as_type<half2>(bits[i]);
      v[2 * i] = float(two[0]);
      v[2 * i + 1] = float(two[1]);
    }
  }
  static inline uint4 pack(thread const float* v) {
    uint4 bits;
    for (int i = 0; i < 4; ++i) bits[i] = as_type<uint>(half2(half(v[2 * i]), half(v[2 * i + 1])));
    return bits;
  }
};
template <>
struct Pack<bf16> {
  enum { kCount = 8 };
  static inline void unpack(uint4 bits, thread float* v) {
    for (int i = 0; i < 4; ++i) {
      v[2 * i] = as_type<float>(bits[i] << 16);
      v[2 * i + 1] = as_type<float>(bits[i] & 0xffff0000u);
    }
  }
  static inline uint4 pack(thread const float* v) {
    uint4 bits;
    for (int i = 0; i < 4; ++i) {
      bits[i] = round_to_bf16(v[2 * i]) | (round_to_bf16(v[2 * i + 1]) << 16);
    }
    return bits;
  }
};

// Where a launcher has found that addresses and rows are multiples of 16 bytes.
template <typename T>
inline uint4 load_pack(device const T* p) {
  return *(device const uint4*)p;
}
template <typename T>
inline void store_pack(uint4 bits, device T* p) {
  *(device uint4*)p = bits;
}

// Four neighbours, which lie at a multiple of four times their size.
inline float4 load_four(device const float* p) { return *(device const float4*)p; }
inline float4 load_four(device const half* p) { return float4(*(device const half4*)p); }
inline float4 load_four(device const bf16* p) {
  const ushort4 bits = *(device const ushort4*)p;
  float4 v;
  for (int i = 0; i < 4; ++i) v[i] = as_type<float>(uint(bits[i]) << 16);
  return v;
}
inline void store_four(float4 v, device float* p) { *(device float4*)p = v; }
inline void store_four(float4 v, device half* p) { *(device half4*)p = half4(v); }
inline void store_four(float4 v, device bf16* p) {
  ushort4 bits;
  for (int i = 0; i < 4; ++i) bits[i] = ushort(round_to_bf16(v[i]));
  *(device ushort4*)p = bits;
}
