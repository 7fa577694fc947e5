// scatter: writes values into a tensor, or adds them to it, at given indices.
//
// Formula    p = the index, or + C if it is negative; values whose p is not in [0, C) are dropped
//            put_along_axis     y = x, then y[o, p(o,j,i), i] = values[o,j,i] for j = 0, 1, …: the last one wins
//            scatter_add_axis   y[o,c,i] = x[o,c,i] + Σ_j values[o,j,i]·[p(o,j,i) = c]
//            scatter_add        y[c,i] = x[c,i] + Σ_j values[j,i]·[p(j) = c]: whole rows of axis 0
// Gradient   put: dx = dy, but 0 at every p; dvalues[o,j,i] = dy[o,p,i], also for those that were overwritten, as in MLX
//            add: dx = dy; dvalues = dy at p. 0 for dropped values. None for indices.
// Layout     put_along_axis, scatter_add_axis: x: [O, C, I], indices: [O, k, I], O and I any number of axes before and after
//            axis. indices and values are broadcast against each other, then they and x on every axis but axis;
//            y has the resulting shape of x. Without an axis x is flattened, indices are [k], and y is in x's shape.
//            scatter_add: x: [C, …], indices: any shape, values: [that shape, …]. Strided inputs are copied.
//            Saved for backward: indices.
// Types      put: x any type; adds: f32, f16, bf16, summed in f32 in a fixed order and rounded once. values: as x.
//            indices: any integer type.
// Cost       put: copies x, reads indices and values; scatter_add: as add_rows of mlxtape/ops/sum_rows.h;
//            scatter_add_axis: as take_along_axis backward, and y is read and written once more.
// Limits     scatter_add: C and the number of indices below 2³¹ − 1. put: k < 2³² − 1.
#pragma once

#include <optional>

#include "mlxtape/base/error.h"
#include "mlxtape/core/encoder.h"
#include "mlxtape/tape/tape.h"

namespace mlxtape::ops {

Check put_along_axis_check(const Tensor& x, const Tensor& indices, const Tensor& values,
                           std::optional<std::int64_t> axis);
Check scatter_add_axis_check(const Tensor& x, const Tensor& indices, const Tensor& values,
                             std::optional<std::int64_t> axis);
Check scatter_add_check(const Tensor& x, const Tensor& indices, const Tensor& values);

Tensor put_along_axis(CommandEncoder& encoder, const Tensor& x, const Tensor& indices,
                      const Tensor& values, std::optional<std::int64_t> axis = std::nullopt);
Tensor put_along_axis(Tape& tape, const Tensor& x, const Tensor& indices, const Tensor& values,
                      std::optional<std::int64_t> axis = std::nullopt);
Tensor scatter_add_axis(CommandEncoder& encoder, const Tensor& x, const Tensor& indices,
                        const Tensor& values, std::optional<std::int64_t> axis = std::nullopt);
Tensor scatter_add_axis(Tape& tape, const Tensor& x, const Tensor& indices, const Tensor& values,
                        std::optional<std::int64_t> axis = std::nullopt);
Tensor scatter_add(CommandEncoder& encoder, const Tensor& x, const Tensor& indices,
                   const Tensor& values);
Tensor scatter_add(Tape& tape, const Tensor& x, const Tensor& indices, const Tensor& values);

}  // namespace mlxtape::ops
