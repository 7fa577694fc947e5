// layout: the same elements in another shape, order or selection.
//
// Formula    reshape        y[flat i] = x[flat i]; one dimension may be -1: inferred
//            transpose      y[i_0, …] = x[…] with axis k of y axis axes[k] of x; no axes: reversed
//            slice          y[…, i, …] = x[…, start + i·step, …] for each axis; numbers below 0 count from the
//                           end, and bounds are clamped, as in Python; step ≠ 0 may be negative
//            squeeze, expand_dims   axes of size 1 removed, inserted (numbered as in y)
//            broadcast_to   axes of size 1, or missing ones, stretched
//            repeat         y[…, i·n + j, …] = x[…, i, …] for j in [0, n)
//            contiguous     y = x, contiguous in memory
//            concatenate    the inputs joined along an axis
//            stack          the inputs joined along a new axis
//            split          slices along an axis: n equal ones, or cut before each of at
//            pad            y = x, with value repeated before and after on each axis
// Gradient   the inverse rearrangement; for slice, and the parts that split drops, zeros; for pad the part that is x;
//            for broadcast_to and repeat the sum over the copies, in f32
// Layout     any strides. reshape, transpose, slice, squeeze, expand_dims, broadcast_to and split give views wherever
//            possible, without copying; concatenate, stack, repeat and pad write each element once.
// Types      all; gradients for floats. concatenate and stack: one type.
// Cost       views: none. Copies: each element read and written once.
// Kernels    none of its own
// Limits     at most 8 axes. Negative steps need no copy. A view shares memory with its source: writing to one
//            changes the other.
#pragma once

#include <vector>

#include "mlxtape/base/error.h"
#include "mlxtape/core/encoder.h"
#include "mlxtape/tape/tape.h"

namespace mlxtape::ops {

// For each axis, in order; missing axes are taken whole.
struct SliceAxis {
  static constexpr std::int64_t kEnd = INT64_MIN;  // to the end, in the direction of the step
  std::int64_t start = kEnd, stop = kEnd, step = 1;
};
struct PadAxis {
  std::int64_t before = 0, after = 0;
};
using AxisList = std::vector<std::int64_t>;

Check reshape_check(const Tensor& x, const Shape& shape);
Check transpose_check(const Tensor& x, const AxisList& axes);
Check slice_check(const Tensor& x, const std::vector<SliceAxis>& axes);
Check squeeze_check(const Tensor& x, const AxisList& axes);
Check expand_dims_check(const Tensor& x, const AxisList& axes);
Check broadcast_to_check(const Tensor& x, const Shape& shape);
Check repeat_check(const Tensor& x, std::int64_t n, std::int64_t axis);
Check concatenate_check(const std::vector<Tensor>& xs, std::int64_t axis);
Check stack_check(const std::vector<Tensor>& xs, std::int64_t axis);
Check split_check(const Tensor& x, const std::vector<std::int64_t>& at, std::int64_t axis);
Check split_check(const Tensor& x, std::int64_t n, std::int64_t axis);
Check pad_check(const Tensor& x, const std::vector<PadAxis>& axes);

Tensor reshape(CommandEncoder& encoder, const Tensor& x, const Shape& shape);
Tensor reshape(Tape& tape, const Tensor& x, const Shape& shape);

Tensor transpose(CommandEncoder& encoder, const Tensor& x, const AxisList& axes = {});
Tensor transpose(Tape& tape, const Tensor& x, const AxisList& axes = {});

Tensor slice(CommandEncoder& encoder, const Tensor& x, const std::vector<SliceAxis>& axes);
Tensor slice(Tape& tape, const Tensor& x, const std::vector<SliceAxis>& axes);

// No axes: every axis of size 1.
Tensor squeeze(CommandEncoder& encoder, const Tensor& x, const AxisList& axes = {});
Tensor squeeze(Tape& tape, const Tensor& x, const AxisList& axes = {});
Tensor expand_dims(CommandEncoder& encoder, const Tensor& x, const AxisList& axes);
Tensor expand_dims(Tape& tape, const Tensor& x, const AxisList& axes);

Tensor broadcast_to(CommandEncoder& encoder, const Tensor& x, const Shape& shape);
Tensor broadcast_to(Tape& tape, const Tensor& x, const Shape& shape);
Tensor repeat(CommandEncoder& encoder, const Tensor& x, std::int64_t n, std::int64_t axis);
Tensor repeat(Tape& tape, const Tensor& x, std::int64_t n, std::int64_t axis);
Tensor contiguous(Tape& tape, const Tensor& x);

Tensor concatenate(CommandEncoder& encoder, const std::vector<Tensor>& xs, std::int64_t axis = 0);
Tensor concatenate(Tape& tape, const std::vector<Tensor>& xs, std::int64_t axis = 0);
Tensor stack(CommandEncoder& encoder, const std::vector<Tensor>& xs, std::int64_t axis = 0);
Tensor stack(Tape& tape, const std::vector<Tensor>& xs, std::int64_t axis = 0);

std::vector<Tensor> split(CommandEncoder& encoder, const Tensor& x, std::int64_t n,
                          std::int64_t axis = 0);
std::vector<Tensor> split(Tape& tape, const Tensor& x, std::int64_t n, std::int64_t axis = 0);
std::vector<Tensor> split_at(CommandEncoder& encoder, const Tensor& x,
                             const std::vector<std::int64_t>& at, std::int64_t axis = 0);
std::vector<Tensor> split_at(Tape& tape, const Tensor& x, const std::vector<std::int64_t>& at,
                             std::int64_t axis = 0);

// Axes that are left out are not padded.
Tensor pad(CommandEncoder& encoder, const Tensor& x, const std::vector<PadAxis>& axes,
           double value = 0);
Tensor pad(Tape& tape, const Tensor& x, const std::vector<PadAxis>& axes, double value = 0);

}  // namespace mlxtape::ops
