// rope: rotary position embedding: pairs of channels are rotated by an angle proportional to the position.
//
// Formula    θ[b,t,j] = (t + offset[b])·scale·f[j] for j < h = dims/2; f[j] = base^(−j/h), or 1/periods[j]
//            pairs (p, q) = (j, j+h), traditional: (2j, 2j+1):
//            y[p] = x[p]·cos θ − x[q]·sin θ;  y[q] = x[p]·sin θ + x[q]·cos θ;  channels from dims on: y = x
// Gradient   dx is dy rotated back: the same with −θ. offset and periods have none.
// Layout     x, y: [B, …, T, D]; T is the axis before the last. offset: a number, or on the device [1] or [B] i32;
//            periods: [h] f32. Strided inputs are copied first, except x with four axes that is a [B, T, H, D] tensor
//            with its middle axes transposed: y then has the same strides.
// Types      x: f32, f16, bf16. Angles are computed in f64 and reduced modulo 2π before they are rounded to f32, so that
//            large positions stay accurate; products are f32, rounded once.
// Cost       reads 1, writes 1 element each; one sine and cosine for each t and j, whatever the number of heads
// Limits     2 ≤ dims ≤ D, dims even; at least 3 axes. base > 0. A period of inf means no rotation.
#pragma once

#include "mlxtape/base/error.h"
#include "mlxtape/core/encoder.h"
#include "mlxtape/tape/tape.h"

namespace mlxtape::ops {

struct RopeOptions {
  std::int64_t dims = 0;  // 0: all channels
  bool traditional = false;
  double base = 10000, scale = 1;
  std::int64_t offset = 0;
  Tensor offsets = {};  // on the device, added to offset
  Tensor periods = {};  // instead of base
};

Check rope_check(const Tensor& x, const RopeOptions& options);
Tensor rope(CommandEncoder& encoder, const Tensor& x, const RopeOptions& options = {});
Tensor rope_backward(CommandEncoder& encoder, const Tensor& dy, const RopeOptions& options = {});
Tensor rope(Tape& tape, const Tensor& x, const RopeOptions& options = {});

}  // namespace mlxtape::ops
