// take_along_axis: selects elements along an axis by indices, and its gradient.
//
// Formula    y[o,j,i]  = x[o, p(o,j,i), i]     p = indices[o,j,i], or + C if it is negative
//            y[o,j,i]  = 0                     where p is not in [0, C)
// Gradient   dx[o,c,i] = Σ_j dy[o,j,i]·[p(o,j,i) = c]
//            also summed over every axis along which x was broadcast. None for indices.
// Layout     x: [O, C, I], indices: [O, k, I], O and I standing for any number of axes before and
//            after axis; there x and indices are broadcast against each other, both ways, and y has
//            the resulting shape, with k along axis. Without an axis x is flattened and indices
//            are [k]. x and indices may be strided. Saved for backward: indices.
// Types      x, y: any type. dy, dx: f32, f16 or bf16. indices: any integer type. Sums are f32 in
//            a fixed order, each dx is rounded once.
// Cost       forward: reads indices and one line of 64 bytes per element of y (at most x), writes
//            y; backward: reads indices and dy, writes dx once. For rows of more than 4096 columns and
//            512 indices, axes other than the last, or a broadcast x, backward costs more.
// Limits     rank ≥ 1 with an axis; any extent may be 0. k > C and equal indices are legal.
#pragma once

#include <optional>

#include "mlxtape/base/error.h"
#include "mlxtape/core/encoder.h"
#include "mlxtape/tape/tape.h"

namespace mlxtape::ops {

using OptionalAxis = std::optional<std::int64_t>;

// The contract as code: the first rule violated, or nothing.
Check take_along_axis_check(const Tensor& x, const Tensor& indices, OptionalAxis axis);
Check take_along_axis_backward_check(const Tensor& dy, const Tensor& indices, const Shape& x_shape,
                                     OptionalAxis axis);

Tensor take_along_axis(CommandEncoder& encoder, const Tensor& x, const Tensor& indices,
                       OptionalAxis axis = std::nullopt);

// dx, of shape x_shape and the type of dy. Every element is written.
Tensor take_along_axis_backward(CommandEncoder& encoder, const Tensor& dy, const Tensor& indices,
                                const Shape& x_shape, OptionalAxis axis = std::nullopt);

// k of the C elements in each row, as for a router or a top-k loss: the same formula for x [R, C] in
// f32, f16 or bf16 and indices [R, k] in u32, without what such a caller never needs: R, C or k = 0,
// k > C, and broadcasting are errors.
Check take_along_axis_topk_check(const Tensor& x, const Tensor& indices);
Check take_along_axis_topk_backward_check(const Tensor& dy, const Tensor& indices,
                                          std::int64_t cols);

Tensor take_along_axis_topk(CommandEncoder& encoder, const Tensor& x, const Tensor& indices);
Tensor take_along_axis_topk_backward(CommandEncoder& encoder, const Tensor& dy,
                                     const Tensor& indices, std::int64_t cols);

// Differentiable in x; indices have no gradient.
Tensor take_along_axis(Tape& tape, const Tensor& x, const Tensor& indices,
                       OptionalAxis axis = std::nullopt);

}  // namespace mlxtape::ops
