// take_along_axis: along one axis, the elements that the indices name, and its gradient.
//
// Formula    y[o,j,i]  = x[o, p(o,j,i), i]     p = indices[o,j,i], or + C if it is negative
//            y[o,j,i]  = 0                     where p is not in [0, C)
// Gradient   dx[o,c,i] = Σ_j dy[o,j,i]·[p(o,j,i) = c]
//            and summed over every axis along which x was broadcast. None for indices.
// Layout     x: [O, C, I], indices: [O, k, I], O and I standing for any number of axes before and
//            after axis; there x and indices are broadcast against each other, both ways, and y has
//            the shape both come to, with k along axis. Without an axis x is flattened and indices
//            are [k]. x and indices may be strided. Saved for backward: indices.
// Types      x, y: any type. dy, dx: f32, f16 or bf16. indices: any integer type. Sums are f32 in
//            a fixed order, each dx is rounded once.
// Cost       forward: reads indices and one line of 64 bytes per element of y (at most x), writes
//            y; backward: reads indices and dy, writes dx once. Rows of more than 4096 columns and
//            512 indices, other axes than the last, and x broadcast cost backward more than that.
// Limits     rank ≥ 1 with an axis; any extent may be 0. k > C and equal indices are legal.
#pragma once

#include <optional>

#include "mlxtape/base/error.h"
#include "mlxtape/core/encoder.h"
#include "mlxtape/tape/tape.h"

namespace mlxtape::ops {

using OptionalAxis = std::optional<std::int64_t>;

// The contract as code: the first rule broken, or nothing.
Check take_along_axis_check(const Tensor& x, const Tensor& indices, OptionalAxis axis);
Check take_along_axis_backward_check(const Tensor& dy, const Tensor& indices, const Shape& x_shape,
                                     OptionalAxis axis);

Tensor take_along_axis(CommandEncoder& encoder, const Tensor& x, const Tensor& indices,
                       OptionalAxis axis = std::nullopt);

// dx, of shape x_shape and the type of dy. Every element is written.
Tensor take_along_axis_backward(CommandEncoder& encoder, const Tensor& dy, const Tensor& indices,
                                const Shape& x_shape, OptionalAxis axis = std::nullopt);

// The k chosen of C in each row, as a router or a top-k loss asks for them: the same formula for
// x [R, C] in f32, f16 or bf16 and indices [R, k] in u32, refusing what such a caller never means:
// R, C or k = 0, k > C, and broadcasting.
Check take_along_axis_topk_check(const Tensor& x, const Tensor& indices);
Check take_along_axis_topk_backward_check(const Tensor& dy, const Tensor& indices,
                                          std::int64_t cols);

Tensor take_along_axis_topk(CommandEncoder& encoder, const Tensor& x, const Tensor& indices);
Tensor take_along_axis_topk_backward(CommandEncoder& encoder, const Tensor& dy,
                                     const Tensor& indices, std::int64_t cols);

// Differentiable in x; indices never carry gradient.
Tensor take_along_axis(Tape& tape, const Tensor& x, const Tensor& indices,
                       OptionalAxis axis = std::nullopt);

}  // namespace mlxtape::ops
