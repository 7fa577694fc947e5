// reduce: sums, means, extremes, logsumexp and variance over any axes, and their gradients.
//
// Formula    over the n elements x_j of each result:
//            sum Σ x_j; mean Σ x_j / n; max, min; logsumexp m + log Σ exp(x_j − m), m = max x_j, and m
//            itself if that is infinite; var Σ (x_j − mean)² / max(n − ddof, 0)
// Gradient   sum dy; mean dy/n; max, min dy/(how many equal y) to those, 0 to the others, and NaN to all
//            where y is NaN; logsumexp dy·exp(x_j − m)/Σ exp(x − m); var dy·2·(x_j − mean)/(n − ddof)
// Layout     axes: those to reduce, negative ones from the end; none given means all. The result drops them,
//            or keeps them with length 1 (keepdims). Strided inputs, and axes with others in between, are
//            copied first. Saved for backward: max, min x and y; logsumexp x, m, Σ; var x and the mean;
//            sum, mean nothing.
// Types      f32, f16, bf16: all, sums in f32, rounded once. mean, var and logsumexp of integers and bools are
//            f32. Sums of integers wrap around: bool, i8, i16, i32 give i32, u8, u16, u32 give u32, i64 and
//            u64 stay.
// Cost       forward: reads 1·n elements; var and logsumexp read a second time what does not fit a core's
//            cache. backward: writes 1·n, reads 1·n except for sum and mean.
// Limits     sums over nothing are 0, means and variances of nothing NaN; max, min over nothing and
//            logsumexp of an empty tensor are errors. NaN among the numbers makes every result NaN. A variance
//            with n − ddof ≤ 0 is infinite, or NaN. The max and min of zeros are either of +0 and −0.
#pragma once

#include <initializer_list>

#include "mlxtape/base/error.h"
#include "mlxtape/core/encoder.h"
#include "mlxtape/tape/tape.h"

namespace mlxtape::ops {

// The axes to reduce: {0, -1}, one number, or, by default, all.
struct Axes {
  bool all = true;
  Dims list;

  Axes() = default;
  Axes(std::int64_t axis) : all(false), list{axis} {}  // NOLINT: sum(encoder, x, 1)
  Axes(std::initializer_list<std::int64_t> axes) : all(axes.size() == 0), list(axes) {}
};

// The contract as code: the first rule violated, or nothing. op: the function's name.
Check reduce_check(const char* op, const Tensor& x, const Axes& axes);
Check sum_to_check(const Tensor& x, const Shape& shape);

Tensor sum(CommandEncoder& encoder, const Tensor& x, const Axes& axes = {}, bool keepdims = false);
Tensor mean(CommandEncoder& encoder, const Tensor& x, const Axes& axes = {}, bool keepdims = false);
Tensor max(CommandEncoder& encoder, const Tensor& x, const Axes& axes = {}, bool keepdims = false);
Tensor min(CommandEncoder& encoder, const Tensor& x, const Axes& axes = {}, bool keepdims = false);
Tensor logsumexp(CommandEncoder& encoder, const Tensor& x, const Axes& axes = {},
                 bool keepdims = false);
Tensor var(CommandEncoder& encoder, const Tensor& x, const Axes& axes = {}, bool keepdims = false,
           std::int64_t ddof = 0);

Tensor sum(Tape& tape, const Tensor& x, const Axes& axes = {}, bool keepdims = false);
Tensor mean(Tape& tape, const Tensor& x, const Axes& axes = {}, bool keepdims = false);
Tensor max(Tape& tape, const Tensor& x, const Axes& axes = {}, bool keepdims = false);
Tensor min(Tape& tape, const Tensor& x, const Axes& axes = {}, bool keepdims = false);
Tensor logsumexp(Tape& tape, const Tensor& x, const Axes& axes = {}, bool keepdims = false);
Tensor var(Tape& tape, const Tensor& x, const Axes& axes = {}, bool keepdims = false,
           std::int64_t ddof = 0);

// The gradient of broadcast_to: from x, the gradient of the broadcast tensor, that of a tensor of this shape, by summing over
// the copies. x itself if the shapes are equal.
Tensor sum_to(CommandEncoder& encoder, Tensor x, const Shape& shape);

}  // namespace mlxtape::ops
