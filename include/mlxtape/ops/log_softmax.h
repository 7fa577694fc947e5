// log_softmax: the logarithm of the softmax of each row, and its gradient.
//
// Formula    m[r]    = max_c x[r,c]
//            y[r,c]  = (x[r,c] − m[r]) − log Σ_j exp(x[r,j] − m[r])
// Gradient   dx[r,c] = dy[r,c] − exp(y[r,c])·Σ_j dy[r,j]
// Layout     any shape; a row runs along axis, all other axes count rows. x, y, dy, dx have one
//            shape. Strided inputs are copied first. Saved for backward: y.
// Types      f32, f16, bf16; y and dx have the type of x and y. Sums are f32, the result is
//            rounded once. The gradient is computed from y as stored: in 16 bits exp(y) is off by up to half
//            a step of y, 3 % where y = -12 in bf16; losses over logits (cross_entropy,
//            kl_divergence) do not go through y and are exact.
// Cost       forward: reads 1·RC, writes 1·RC elements; backward: reads 2·RC, writes 1·RC.
//            A row that does not fit the second-level cache is read twice.
// Limits     rank ≥ 1; an axis of length 0 or 0 rows give an empty result. A row of only −inf, or
//            with +inf or NaN in it, gives NaN; one finite number among −inf gives 0, the rest −inf.
#pragma once

#include "mlxtape/base/error.h"
#include "mlxtape/core/encoder.h"
#include "mlxtape/tape/tape.h"

namespace mlxtape::ops {

// The contract as code: the first rule violated, or nothing.
Check log_softmax_check(const Tensor& x, std::int64_t axis);
Check log_softmax_backward_check(const Tensor& y, const Tensor& dy, std::int64_t axis);

Tensor log_softmax(CommandEncoder& encoder, const Tensor& x, std::int64_t axis = -1);
Tensor log_softmax(Tape& tape, const Tensor& x, std::int64_t axis = -1);

// dx from y, the result of log_softmax, and dy, the gradient of y.
Tensor log_softmax_backward(CommandEncoder& encoder, const Tensor& y, const Tensor& dy,
                            std::int64_t axis = -1);

}  // namespace mlxtape::ops
