// softmax: the exponentials of each row, divided by their sum, and the gradient.
//
// Formula    m[r]    = max_c x[r,c]
//            y[r,c]  = exp(x[r,c] − m[r]) / Σ_j exp(x[r,j] − m[r])
// Gradient   dx[r,c] = y[r,c]·(dy[r,c] − Σ_j y[r,j]·dy[r,j])
// Layout     any shape; a row runs along axis, all other axes count rows. x, y, dy, dx have one
//            shape. Strided inputs are copied first. Saved for backward: y.
// Types      f32, f16, bf16; y and dx have the type of x and y. Sums are f32, the result is
//            rounded once.
// Cost       forward: reads 1·RC, writes 1·RC elements; backward: reads 2·RC, writes 1·RC.
//            A row that does not fit the second-level cache is read twice.
// Limits     rank ≥ 1; an axis of length 0 or 0 rows give an empty result. A row of only −inf, or
//            with +inf or NaN in it, gives NaN; one finite number among −inf gives exactly 1.
#pragma once

#include "mlxtape/base/error.h"
#include "mlxtape/core/encoder.h"
#include "mlxtape/tape/tape.h"

namespace mlxtape::ops {

// The contract as code: the first rule violated, or nothing.
Check softmax_check(const Tensor& x, std::int64_t axis);
Check softmax_backward_check(const Tensor& y, const Tensor& dy, std::int64_t axis);

Tensor softmax(CommandEncoder& encoder, const Tensor& x, std::int64_t axis = -1);

// dx from y, the result of softmax, and dy, the gradient of y.
Tensor softmax_backward(CommandEncoder& encoder, const Tensor& y, const Tensor& dy,
                        std::int64_t axis = -1);

Tensor softmax(Tape& tape, const Tensor& x, std::int64_t axis = -1);

}  // namespace mlxtape::ops
