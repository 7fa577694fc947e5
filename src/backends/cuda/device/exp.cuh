// exp, the logistic function and silu, as exact as the type of the result asks for.
#pragma once

#include "backends/cuda/device/vectors.cuh"

namespace mlxtape::cuda {

// exp for a result of type T: for 16 bits the hardware's, 2 ulp of f32 plus the rounding of x·log2e.
template <class T>
__device__ __forceinline__ float exp_for(float x) {
  constexpr float kLog2e = 1.4426950408889634F;
  if constexpr (sizeof(T) == 4) return expf(x);
  float y;
  asm("ex2.approx.f32 %0, %1;" : "=f"(y) : "f"(x * kLog2e));
  return y;
}

// exp(x) times a constant of the type, for quotients. 16 bits: the hardware's function without its care
// for tiny results, which costs three instructions more, moved up by 2^64 so that none is tiny; the
// constant added to the exponent costs 2^-18 of the result.
template <class T>
__device__ __forceinline__ float exp_times_constant(float x) {
  constexpr float kLog2e = 1.4426950408889634F;
  if constexpr (sizeof(T) == 4) return expf(x);
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(fmaf(x, kLog2e, 64.0F)));
  return y;
}

// σ(z) and 1 − σ(z), neither by a subtraction, from exp(−|z|), which cannot overflow.
struct Sigmoid {
  float value, rest;
};

template <class T>
__device__ __forceinline__ Sigmoid sigmoid(float z) {
  const float t = exp_for<T>(-fabsf(z));
  const float whole = 1 + t;  // in [1, 2]
  float large;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(large) : "f"(whole));
  if constexpr (sizeof(T) == 4) large = fmaf(large, fmaf(-whole, large, 1.0F), large);
  const float small = t * large;
  return z < 0 ? Sigmoid{small, large} : Sigmoid{large, small};
}

template <class T>
__device__ __forceinline__ float silu(float z) {
  return z * sigmoid<T>(z).value;
}

// z·σ(z) and its derivative, σ(z) + z·σ(z)·(1 − σ(z)).
struct Silu {
  float value, slope;
};
template <class T>
__device__ __forceinline__ Silu silu_and_slope(float z) {
  const auto [value, rest] = sigmoid<T>(z);
  const float silu = z * value;
  return {silu, fmaf(silu, rest, value)};
}

}  // namespace mlxtape::cuda
