// layout on a tape: each op, recorded, and its gradient.
#include <algorithm>

#include "layout_parts.h"
#include "mlxtape/ops/layout.h"
#include "mlxtape/ops/reduce.h"

namespace mlxtape::ops {

using namespace layout;

// ---- on a tape ----

namespace {

// A view's result, noted with what its gradient needs.
template <class Args>
Tensor noted(Tape& tape, const char* name, BackwardFn backward, const Tensor& x, Tensor y,
             const Args& args) {
  y = y.detach();
  if (tape.wants({x})) tape.record(name, backward, {x}, {&y}, Saved({}, args));
  return y;
}

void reshape_pullback(Pullback& pullback) {
  pullback.give(0, reshape(pullback.encoder(), pullback.grad(), pullback.saved().args<Shape>()));
}

void transpose_pullback(Pullback& pullback) {
  const auto& order = pullback.saved().args<Dims>();  // axis i of y was axis order[i] of x
  AxisList inverse(static_cast<std::size_t>(order.rank()));
  for (std::int64_t i = 0; i < order.rank(); ++i) inverse[static_cast<std::size_t>(order[i])] = i;
  pullback.give(0, inverse.empty() ? pullback.grad()
                                   : transpose(pullback.encoder(), pullback.grad(), inverse));
}

// A slice in plain data: y[i] = x[start + i·step].
struct SliceArgs {
  Shape shape;  // of x
  std::int64_t start[8], step[8];
};

void slice_pullback(Pullback& pullback) {
  const auto& args = pullback.saved().args<SliceArgs>();
  CommandEncoder& encoder = pullback.encoder();
  const Tensor& dy = pullback.grad();
  const Tensor dx = encoder.zeros(args.shape, dy.dtype());
  Strides strides = dx.strides();
  std::int64_t offset = 0;
  for (std::int64_t i = 0; i < dx.rank() && dy.size() != 0; ++i) {
    offset += args.start[i] * dx.strides()[i];
    strides[i] = dy.dim(i) == 1 ? strides[i] : strides[i] * args.step[i];
  }
  encoder.copy(dy, view(dx, dy.shape(), strides, offset));
  pullback.give(0, dx);
}

struct AxisArgs {
  std::int64_t axis;
};

void broadcast_to_pullback(Pullback& pullback) {
  pullback.give(0, sum_to(pullback.encoder(), pullback.grad(), pullback.saved().args<Shape>()));
}

// The copies as an axis of their own, after the one that was repeated.
void repeat_pullback(Pullback& pullback) {
  const std::int64_t axis = pullback.saved().args<AxisArgs>().axis;
  CommandEncoder& encoder = pullback.encoder();
  const Shape& shape = pullback.input_shape(0);
  const Shape x = around(shape, axis);
  const std::int64_t n = pullback.grad().dim(axis) / std::max<std::int64_t>(x[1], 1);
  const Tensor copies = reshape(encoder, pullback.grad(), {x[0], x[1], n, x[2]});
  pullback.give(0, sum(encoder, copies, 2).reshape(shape));
}

// Each input's part of dy is a view of it.
void concatenate_pullback(Pullback& pullback) {
  const Saved& saved = pullback.saved();  // the inputs' sizes, without memory
  const std::int64_t axis = saved.args<AxisArgs>().axis;
  const Tensor dy = pullback.take_grad();
  std::int64_t start = 0;
  for (std::size_t i = 0; i < saved.size(); ++i) {
    const std::int64_t count = saved[i].dim(0);
    pullback.give(i, part(dy, axis, start, count));
    start += count;
  }
}

void split_pullback(Pullback& pullback) {
  const std::int64_t axis = pullback.saved().args<AxisArgs>().axis;
  CommandEncoder& encoder = pullback.encoder();
  bool all = true;
  std::size_t used = 0;
  for (std::size_t i = 0; i < pullback.outputs(); ++i) {
    all &= pullback.has_grad(i) || pullback.output_shape(i)[axis] == 0;
    if (pullback.has_grad(i)) used = i;
  }
  const DType dtype = pullback.grad(used).dtype();
  const Shape& shape = pullback.input_shape(0);
  const Tensor dx = all ? encoder.empty(shape, dtype) : encoder.zeros(shape, dtype);
  std::int64_t start = 0;
  for (std::size_t i = 0; i < pullback.outputs(); ++i) {
    const std::int64_t count = pullback.output_shape(i)[axis];
    if (pullback.has_grad(i)) encoder.copy(pullback.grad(i), part(dx, axis, start, count));
    start += count;
  }
  pullback.give(0, dx);
}

void pad_pullback(Pullback& pullback) {
  const auto& before = pullback.saved().args<Dims>();
  std::vector<PadAxis> axes;
  for (const std::int64_t n : before) axes.push_back({n, 0});
  pullback.give(0, middle(pullback.grad(), pullback.input_shape(0), axes));
}

}  // namespace

Tensor reshape(Tape& tape, const Tensor& x, const Shape& shape) {
  return noted(tape, "reshape", reshape_pullback, x, reshape(tape.encoder(), x, shape), x.shape());
}

Tensor transpose(Tape& tape, const Tensor& x, const AxisList& axes) {
  const Tensor y = transpose(tape.encoder(), x, axes);
  Dims order;
  for (std::int64_t i = 0; i < x.rank(); ++i) {
    order.push_back(axes.empty() ? x.rank() - 1 - i
                                 : *normal_axis(axes[static_cast<std::size_t>(i)], x.rank()));
  }
  return noted(tape, "transpose", transpose_pullback, x, y, order);
}

Tensor slice(Tape& tape, const Tensor& x, const std::vector<SliceAxis>& axes) {
  const Tensor y = slice(tape.encoder(), x, axes);
  SliceArgs args{x.shape(), {}, {}};
  for (std::int64_t i = 0; i < x.rank(); ++i) {
    const auto at = static_cast<std::size_t>(i);
    const Cut c = at < axes.size() ? cut(axes[at], x.dim(i)) : Cut{0, x.dim(i), 1};
    args.start[at] = c.start;
    args.step[at] = c.step;
  }
  return noted(tape, "slice", slice_pullback, x, y, args);
}

Tensor squeeze(Tape& tape, const Tensor& x, const AxisList& axes) {
  return noted(tape, "squeeze", reshape_pullback, x, squeeze(tape.encoder(), x, axes), x.shape());
}

Tensor expand_dims(Tape& tape, const Tensor& x, const AxisList& axes) {
  return noted(tape, "expand_dims", reshape_pullback, x, expand_dims(tape.encoder(), x, axes),
               x.shape());
}

Tensor broadcast_to(Tape& tape, const Tensor& x, const Shape& shape) {
  return noted(tape, "broadcast_to", broadcast_to_pullback, x,
               broadcast_to(tape.encoder(), x, shape), x.shape());
}

Tensor repeat(Tape& tape, const Tensor& x, std::int64_t n, std::int64_t axis) {
  return noted(tape, "repeat", repeat_pullback, x, repeat(tape.encoder(), x, n, axis),
               AxisArgs{*normal_axis(axis, x.rank())});
}

Tensor contiguous(Tape& tape, const Tensor& x) {
  return noted(tape, "contiguous", reshape_pullback, x, tape.encoder().contiguous(x), x.shape());
}

Tensor concatenate(Tape& tape, const std::vector<Tensor>& xs, std::int64_t axis) {
  Tensor y = concatenate(tape.encoder(), xs, axis);
  const std::vector<TensorRef> inputs(xs.begin(), xs.end());
  if (tape.wants(inputs)) {
    const std::int64_t a = *normal_axis(axis, y.rank());
    std::vector<Tensor> sizes;
    for (const Tensor& x : xs) sizes.push_back(Tensor::meta({x.dim(a)}));
    Tensor* const outputs[] = {&y};
    tape.record("concatenate", concatenate_pullback, inputs, outputs, Saved(sizes, AxisArgs{a}));
  }
  return y;
}

Tensor stack(Tape& tape, const std::vector<Tensor>& xs, std::int64_t axis) {
  require(stack_check(xs, axis));
  std::vector<Tensor> thick;
  thick.reserve(xs.size());
  for (const Tensor& x : xs) thick.push_back(expand_dims(tape, x, {axis}));
  return concatenate(tape, thick, axis);
}

std::vector<Tensor> split_at(Tape& tape, const Tensor& x, const std::vector<std::int64_t>& at,
                             std::int64_t axis) {
  std::vector<Tensor> parts = split_at(tape.encoder(), x, at, axis);
  if (tape.wants({x})) {
    std::vector<Tensor*> outputs;
    for (Tensor& t : parts) outputs.push_back(&t);
    const TensorRef inputs[] = {x};
    tape.record("split", split_pullback, inputs, outputs,
                Saved({}, AxisArgs{*normal_axis(axis, x.rank())}));
  }
  return parts;
}

std::vector<Tensor> split(Tape& tape, const Tensor& x, std::int64_t n, std::int64_t axis) {
  return split_at(tape, x, equal_parts(x, n, axis), axis);
}

Tensor pad(Tape& tape, const Tensor& x, const std::vector<PadAxis>& axes, double value) {
  const Tensor y = pad(tape.encoder(), x, axes, value);
  Dims before;
  for (const PadAxis& axis : axes) before.push_back(axis.before);
  return noted(tape, "pad", pad_pullback, x, y, before);
}

}  // namespace mlxtape::ops
