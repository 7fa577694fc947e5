// Read by rms_norm.cpp and the rms_norm kernels: one layout, every compiler.
#pragma once

#ifndef __METAL_VERSION__
#include <cstdint>
#endif

// What stands at the weight's place: nothing (ones), the type of x, or f32.
enum RmsNormWeight : uint32_t { kRmsNormNoWeight, kRmsNormWeightLikeX, kRmsNormWeightF32 };

struct RmsNormArgs {
  int64_t rows;
  int64_t cols;
  float eps;  // forward only
  RmsNormWeight weight;
  float divisor;  // of Σ x²: D, or 1 for l2_norm
  uint32_t unused;
};
static_assert(sizeof(RmsNormArgs) == 32, "host and device must agree");
