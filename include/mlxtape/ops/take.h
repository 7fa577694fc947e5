// take: selects slices of a tensor by indices along one or several axes.
//
// Formula    take      y[o, j…, i] = x[o, p(j…), i]   p = indices[j…], or + C if it is negative
//                      y[o, j…, i] = 0                where p is not in [0, C)
//            gather    y[j…, s…] = x[q], q_a = p_k(j…) where a = axes[k], else s_a; 0 if any p_k is outside
// Gradient   dx is zero plus each dy added at its source (mlxtape/ops/sum_rows.h). None for indices.
// Layout     x: [O, C, I], O and I standing for any number of axes before and after axis; indices: any shape,
//            also []; y has that shape in place of axis. Without an axis x is flattened: y has the shape of indices.
//            gather: the indices broadcast against each other, y: [their shape, slice sizes]; a slice is 1 along an
//            indexed axis and starts at 0 along the others. Strided x is read in place if the axes before
//            and those after axis can each be merged into one, otherwise copied. Saved for backward: indices.
// Types      x, y: any type. Gradients: f32, f16, bf16. indices: any integer type.
// Cost       reads indices and the selected elements, writes y. gather: indices become offsets first, 8 bytes for each j.
// Limits     at most 8 axes in y. Gradient: C < 2³¹ rows (gather: their product), fewer than 2³¹ indices.
#pragma once

#include <optional>
#include <vector>

#include "mlxtape/base/error.h"
#include "mlxtape/core/encoder.h"
#include "mlxtape/tape/tape.h"

namespace mlxtape::ops {

Check take_check(const Tensor& x, const Tensor& indices, std::optional<std::int64_t> axis);
Check take_backward_check(const Tensor& dy, const Tensor& indices, const Shape& x_shape,
                          std::optional<std::int64_t> axis);
Check gather_check(const Tensor& x, const std::vector<Tensor>& indices,
                   const std::vector<std::int64_t>& axes, const Shape& slice_sizes);

Tensor take(CommandEncoder& encoder, const Tensor& x, const Tensor& indices,
            std::optional<std::int64_t> axis = std::nullopt);
Tensor take(Tape& tape, const Tensor& x, const Tensor& indices,
            std::optional<std::int64_t> axis = std::nullopt);
Tensor take_backward(CommandEncoder& encoder, const Tensor& dy, const Tensor& indices,
                     const Shape& x_shape, std::optional<std::int64_t> axis = std::nullopt);

Tensor gather(CommandEncoder& encoder, const Tensor& x, const std::vector<Tensor>& indices,
              const std::vector<std::int64_t>& axes, const Shape& slice_sizes);
Tensor gather(Tape& tape, const Tensor& x, const std::vector<Tensor>& indices,
              const std::vector<std::int64_t>& axes, const Shape& slice_sizes);

// The common case: indices for the first axes, and everything behind them: y [their shape, rest of x].
Check gather_check(const Tensor& x, const std::vector<Tensor>& indices);
Tensor gather(CommandEncoder& encoder, const Tensor& x, const std::vector<Tensor>& indices);
Tensor gather(Tape& tape, const Tensor& x, const std::vector<Tensor>& indices);

}  // namespace mlxtape::ops
