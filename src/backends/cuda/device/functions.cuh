// Roots, logarithms, powers and the normal distribution, as exact as the type of the result asks for.
#pragma once

#include "backends/cuda/device/exp.cuh"

namespace mlxtape::cuda {

template <class T>
__device__ __forceinline__ float sqrt_for(float x) {
  if constexpr (sizeof(T) == 4) return sqrtf(x);
  float y;
  asm("sqrt.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// log(1 + u)/u for |u| < 1/16, to 2^-18: where the hardware's logarithm, exact to 2^-22 whatever its size,
// has lost too much of a small result.
__device__ __forceinline__ float log_near_one(float u) {
  return fmaf(u, fmaf(u, fmaf(u, -0.25F, 1.0F / 3), -0.5F), 1.0F);
}
constexpr float kNearOne = 0.0625F;
constexpr float kLn2 = 0.6931471805599453F;

template <class T>
__device__ __forceinline__ float log_for(float x) {
  if constexpr (sizeof(T) == 4) return logf(x);
  const float u = x - 1;
  return fabsf(u) < kNearOne ? u * log_near_one(u) : __log2f(x) * kLn2;
}

template <class T>
__device__ __forceinline__ float log1p_for(float x) {
  if constexpr (sizeof(T) == 4) return log1pf(x);
  return fabsf(x) < kNearOne ? x * log_near_one(x) : __log2f(1 + x) * kLn2;
}

// 16 bits: 2^(b·log2|a|), and the sign of a where b is odd. The exponent, at most 150 where the result is
// neither 0 nor infinite, is exact to 2^-18 of itself. Special cases as IEEE 754: x^0 = 1^y = 1.
template <class T>
__device__ __forceinline__ float pow_for(float a, float b) {
  if constexpr (sizeof(T) == 4) return powf(a, b);
  const float size = fabsf(a);
  const float u = size - 1;
  const float log2 = fabsf(u) < kNearOne ? u * log_near_one(u) * (1 / kLn2) : __log2f(size);
  float y;
  asm("ex2.approx.f32 %0, %1;" : "=f"(y) : "f"(b * log2));
  const float half = 0.5F * b;
  if (__float_as_int(a) < 0) {
    if (floorf(b) != b && size != 0 && size < INFINITY) y = NAN;
    if (floorf(b) == b && floorf(half) != half) y = -y;
  }
  return b == 0 || a == 1 || (a == -1 && isinf(b)) ? 1.0F : y;
}

// The normal distribution: its share below x, Φ(x), and its density there; of NaN, those of 15.
//
// Φ(−a) = exp(−a²/2)·t·P(1 − t) with t = 1/(1 + c·a), P fitted to the smallest relative error for a in
// [0, 15] with P(0) = ½ exactly: 1.7e-8 with c = 0.4 and degree 9, 1.0e-5, for 16 bits, with c = 0.3
// and degree 5. In f32, what the rounding of a² loses is put back.
struct Normal {
  float share, density;
};
template <class T>
__device__ __forceinline__ Normal normal(float x) {
  constexpr bool kWide = sizeof(T) == 4;
  constexpr float kC = kWide ? 0.4F : 0.3F;
  const float a = fminf(fabsf(x), 15.0F);  // Φ(−15) is 0 in f32
  const float a2 = a * a;
  float e;
  if constexpr (kWide) {
    e = expf(-0.5F * a2);
    e = fmaf(-0.5F * fmaf(a, a, -a2), e, e);
  } else {
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(e) : "f"(-0.5F / kLn2 * a2));
  }
  const float whole = fmaf(kC, a, 1.0F);
  float t;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(t) : "f"(whole));
  if constexpr (kWide) t = fmaf(t, fmaf(-whole, t, 1.0F), t);
  const float u = kC * a * t;
  float p;
  if constexpr (kWide) {
    p = fmaf(u, -0x1.05a16ap-5F, 0x1.ca830ep-4F);
    p = fmaf(u, p, -0x1.00d41ep-3F);
    p = fmaf(u, p, 0x1.c492d8p-5F);
    p = fmaf(u, p, -0x1.eae558p-5F);
    p = fmaf(u, p, 0x1.6f6396p-6F);
    p = fmaf(u, p, 0x1.de2fc2p-4F);
    p = fmaf(u, p, 0x1.15e2a2p-4F);
    p = fmaf(u, p, -0x1.fd4b20p-2F);
  } else {
    p = fmaf(u, 0x1.3a739ep-4F, -0x1.5a2058p-3F);
    p = fmaf(u, p, -0x1.388640p-4F);
    p = fmaf(u, p, 0x1.3caaecp-1F);
    p = fmaf(u, p, -0x1.a8e978p-1F);
  }
  p = fmaf(u, p, 0.5F);
  const float beyond = e * (t * p);
  return {x < 0 ? beyond : 1 - beyond, e * 0.3989422804F};
}

}  // namespace mlxtape::cuda
