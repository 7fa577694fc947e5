// The gradient of one element of the experts' gated hidden layer, for every 16-bit kernel.
#pragma once

#include "backends/cuda/device/exp.cuh"

namespace mlxtape::ops {

// What becomes of b = Σ_h dy·down for one element.
struct Back {
  float dg, du, scaled, dot;

  template <class T>
  __device__ static __forceinline__ Back of(float b, float g, float u, float score) {
    const cuda::Sigmoid s = cuda::sigmoid<T>(g);
    const float made = g * s.value, a = made * u, da = score * b;
    return {da * u * fmaf(made, s.rest, s.value), da * made, score * a, b * a};
  }
};

}  // namespace mlxtape::ops
