// Read by quantize.cpp and the quantize kernels. A row is a whole number of groups and a group a whole number of
// words, so that kernels see groups alone: group g has w[g·group_size …], codes[g·group_size·bits/32 …], scales[g].
//
//   quantize_fwd    in: w. out: codes, scales, biases, of w's type.
//   dequantize_fwd  in: codes, scales, biases. out: w.
//   dequantize_bwd  in: codes, dw. out: d_scales, d_biases.
#pragma once

#ifndef __METAL_VERSION__
#include <cstdint>
#endif

namespace mlxtape::ops {

struct QuantizeArgs {
  int64_t groups;
  int32_t group_shift;  // group_size = 2^group_shift
  int32_t bits;
  int32_t gpu_rule;
  int32_t scales;  // their DType
};
static_assert(sizeof(QuantizeArgs) == 24, "host and device must agree");

// From 2^23 on every f32 is whole; below, adding it leaves no room for a fraction.
constexpr float round_quotient(float x, bool half_away) {
  const float size = x < 0 ? -x : x;
  if (!(size < 0x1p23F)) return x;
  float whole = (size + 0x1p23F) - 0x1p23F;
  if (half_away && size - whole == 0.5F) whole += 1;
  return x < 0 ? -whole : whole;
}

struct GroupFit {
  float s, b;
};
// poison: NaN if the group has anything that is not finite, else 0.
constexpr GroupFit fit_group(float hi, float lo, float poison, float n, bool gpu_rule) {
  if (gpu_rule && hi < 0) hi = 0;
  const bool low = (lo < 0 ? -lo : lo) > (hi < 0 ? -hi : hi);
  const float step = (hi - lo) / n;
  float s = step > 1e-7F ? step : 1e-7F;
  if (!low) s = -s;
  const float e = low ? lo : hi;
  const float q = round_quotient(e / s, gpu_rule);
  if (q == 0) return {s + poison, poison};
  return {e / q + poison, e + poison};
}

}  // namespace mlxtape::ops
