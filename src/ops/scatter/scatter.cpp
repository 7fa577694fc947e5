#include "mlxtape/ops/scatter.h"

#include <cstdint>
#include <string>

#include "mlxtape/ops/elementwise.h"
#include "mlxtape/ops/layout.h"
#include "mlxtape/ops/sum_rows.h"
#include "mlxtape/ops/take.h"
#include "mlxtape/ops/take_along_axis.h"
#include "scatter_args.h"

namespace mlxtape::ops {

namespace {

using Axis = std::optional<std::int64_t>;

constinit const KernelHandle kPut("scatter_put");

Error wrong(const char* op, Errc code, const std::string& what) {
  return {code, std::string(op) + ": " + what};
}

// Elements are moved, not read: one kernel per size.
DType unsigned_of_size(std::size_t bytes) {
  switch (bytes) {
    case 1: return DType::kU8;
    case 2: return DType::kU16;
    case 4: return DType::kU32;
    default: return DType::kU64;
  }
}

// The shapes that x and the others are broadcast to.
struct Shapes {
  Shape x, values;
  std::int64_t axis;
};

// For what passed check.
Shapes shapes_of(const Shape& x, const Shape& indices, const Shape& values, Axis axis) {
  if (!axis) return {{*element_count(x)}, *broadcast_shapes(indices, values), 0};
  Shapes s{x, *broadcast_shapes(indices, values), *normal_axis(*axis, x.rank())};
  for (std::int64_t i = 0; i < x.rank(); ++i) {
    if (i == s.axis) continue;
    (s.x[i] == 1 ? s.x[i] : s.values[i]) = s.x[i] == 1 ? s.values[i] : s.x[i];
  }
  return s;
}

Check check(const char* op, const Tensor& x, const Tensor& indices, const Tensor& values,
            Axis axis) {
  const std::int64_t rank = axis ? x.rank() : 1;
  if (axis && !normal_axis(*axis, rank)) {
    return wrong(op, Errc::kArgument,
                 "axis must be in [-" + std::to_string(rank) + ", " + std::to_string(rank) +
                     "), got " + std::to_string(*axis));
  }
  if (!is_integer(indices.dtype())) {
    return wrong(op, Errc::kDType,
                 std::string("indices must be integers, got ") + name_of(indices.dtype()));
  }
  if (values.dtype() != x.dtype()) {
    return wrong(op, Errc::kDType,
                 std::string("values must have the type of x, ") + name_of(x.dtype()) + ", got " +
                     name_of(values.dtype()));
  }
  if (indices.backend() != x.backend() || values.backend() != x.backend()) {
    return wrong(op, Errc::kDevice, "indices and values must be where x is");
  }
  if (indices.rank() != rank) {
    return wrong(op, Errc::kShape,
                 std::string(axis ? "indices must have as many axes as x "
                                  : "indices must be [k] when there is no axis of x ") +
                     to_string(x.shape()) + ", got " + to_string(indices.shape()));
  }
  const auto both = broadcast_shapes(indices.shape(), values.shape());
  if (!both || both->rank() != rank) {
    return wrong(op, Errc::kShape,
                 "values must broadcast against indices " + to_string(indices.shape()) + ", got " +
                     to_string(values.shape()));
  }
  for (std::int64_t i = 0; axis && i < rank; ++i) {
    if (i != *normal_axis(*axis, rank) && x.dim(i) != (*both)[i] && x.dim(i) != 1 &&
        (*both)[i] != 1) {
      return wrong(op, Errc::kShape,
                   "indices and values must broadcast against x " + to_string(x.shape()) +
                       " on every axis but " + std::to_string(*axis) + ", got " + to_string(*both));
    }
  }
  const Shapes s = shapes_of(x.shape(), indices.shape(), values.shape(), axis);
  if (!element_count(s.x) || !element_count(s.values)) {
    return wrong(
        op, Errc::kShape,
        "elements must fit in 63 bits, got " + to_string(s.x) + " and " + to_string(s.values));
  }
  return std::nullopt;
}

// x as its shape asks for, without an axis in a row.
Tensor spread(CommandEncoder& encoder, const Tensor& x, const Shape& shape, Axis axis) {
  if (!axis && x.rank() != 1) return encoder.contiguous(x).reshape(shape);
  return x.shape() == shape ? x : x.broadcast_to(shape);
}

// With shapes that agree but on the axis.
Tensor put(CommandEncoder& encoder, const Tensor& x, const Tensor& indices, const Tensor& values,
           std::int64_t axis) {
  Tensor y = encoder.empty(x.shape(), x.dtype());
  encoder.copy(x, y);
  if (y.size() == 0 || values.size() == 0) return y;
  ScatterArgs args{1, values.dim(axis), 1, x.dim(axis), static_cast<std::int64_t>(indices.dtype())};
  for (std::int64_t i = 0; i < x.rank(); ++i) {
    if (i != axis) (i < axis ? args.outer : args.width) *= x.dim(i);
  }
  const Tensor at = encoder.contiguous(indices), with = encoder.contiguous(values);
  encoder.dispatch(kPut, unsigned_of_size(size_of(x.dtype())), args, {at, with}, {y});
  return y;
}

Tensor add(CommandEncoder& encoder, const Tensor& x, const Tensor& indices, const Tensor& values,
           std::int64_t axis) {
  Tensor sums = take_along_axis_backward(encoder, cast(encoder, values, DType::kF32), indices,
                                         x.shape(), axis);
  encoder.add_into(sums, x);
  return cast(encoder, std::move(sums), x.dtype());
}

}  // namespace

Check put_along_axis_check(const Tensor& x, const Tensor& indices, const Tensor& values,
                           Axis axis) {
  if (Check bad = check("put_along_axis", x, indices, values, axis)) return bad;
  const Shapes s = shapes_of(x.shape(), indices.shape(), values.shape(), axis);
  if (s.values[s.axis] >= UINT32_MAX) {  // kernels count them from 1 in 32 bits
    return wrong("put_along_axis", Errc::kShape,
                 "fewer than 2^32 - 1 indices along the axis, got " + to_string(s.values));
  }
  return std::nullopt;
}

Check scatter_add_axis_check(const Tensor& x, const Tensor& indices, const Tensor& values,
                             Axis axis) {
  if (!is_kernel_float(x.dtype())) {
    return wrong("scatter_add_axis", Errc::kDType,
                 std::string("x must be f32, f16 or bf16, got ") + name_of(x.dtype()));
  }
  return check("scatter_add_axis", x, indices, values, axis);
}

Check scatter_add_check(const Tensor& x, const Tensor& indices, const Tensor& values) {
  if (x.rank() < 1) {
    return wrong("scatter_add", Errc::kShape, "x must be [C, …], got " + to_string(x.shape()));
  }
  if (values.dtype() != x.dtype()) {
    return wrong("scatter_add", Errc::kDType,
                 std::string("values must have the type of x, ") + name_of(x.dtype()) + ", got " +
                     name_of(values.dtype()));
  }
  const bool fits = indices.rank() + x.rank() - 1 <= kMaxRank;
  Shape shape = indices.shape();
  for (std::int64_t i = 1; fits && i < x.rank(); ++i) shape.push_back(x.dim(i));
  if (!fits || !(values.shape() == shape)) {
    return wrong("scatter_add", Errc::kShape,
                 "values must be [indices " + to_string(indices.shape()) + ", rest of x " +
                     to_string(x.shape()) + "], got " + to_string(values.shape()));
  }
  if (values.backend() != x.backend()) {
    return wrong("scatter_add", Errc::kDevice, "values must be where x is");
  }
  const std::int64_t width = x.dim(0) == 0 ? 1 : x.size() / x.dim(0);
  return sum_rows_check(Tensor::meta({1, indices.size(), width}, x.dtype(), x.backend()),
                        Tensor::meta({indices.size()}, indices.dtype(), indices.backend()),
                        x.dim(0));
}

Tensor put_along_axis(CommandEncoder& encoder, const Tensor& x, const Tensor& indices,
                      const Tensor& values, Axis axis) {
  require(put_along_axis_check(x, indices, values, axis));
  const Shapes s = shapes_of(x.shape(), indices.shape(), values.shape(), axis);
  const Tensor y = put(encoder, spread(encoder, x, s.x, axis), indices.broadcast_to(s.values),
                       values.broadcast_to(s.values), s.axis);
  return axis ? y : y.reshape(x.shape());
}

Tensor scatter_add_axis(CommandEncoder& encoder, const Tensor& x, const Tensor& indices,
                        const Tensor& values, Axis axis) {
  require(scatter_add_axis_check(x, indices, values, axis));
  const Shapes s = shapes_of(x.shape(), indices.shape(), values.shape(), axis);
  const Tensor y = add(encoder, spread(encoder, x, s.x, axis), indices.broadcast_to(s.values),
                       values.broadcast_to(s.values), s.axis);
  return axis ? y : y.reshape(x.shape());
}

Tensor scatter_add(CommandEncoder& encoder, const Tensor& x, const Tensor& indices,
                   const Tensor& values) {
  require(scatter_add_check(x, indices, values));
  const std::int64_t n = indices.size();
  const std::int64_t width = x.dim(0) == 0 ? 1 : x.size() / x.dim(0);
  if (x.size() == 0) return encoder.empty(x.shape(), x.dtype());
  return add_rows(encoder, encoder.contiguous(x).reshape({1, x.dim(0), width}),
                  encoder.contiguous(indices).reshape({n}),
                  encoder.contiguous(values).reshape({1, n, width}))
      .reshape(x.shape());
}

// ---- on a tape ----

namespace {

void put_pullback(Pullback& pullback) {
  const Tensor& indices = pullback.saved()[0];
  const auto axis = pullback.saved().args<std::int64_t>();
  CommandEncoder& encoder = pullback.encoder();
  const Tensor& dy = pullback.grad();
  if (pullback.needs(1)) pullback.give(1, take_along_axis(encoder, dy, indices, axis));
  if (pullback.needs(0)) {
    const Tensor zero = encoder.zeros({1}, dy.dtype()).broadcast_to(indices.shape());
    pullback.give(0, put(encoder, dy, indices, zero, axis));
  }
}

void add_pullback(Pullback& pullback) {
  const auto axis = pullback.saved().args<std::int64_t>();
  if (pullback.needs(1)) {
    pullback.give(1,
                  take_along_axis(pullback.encoder(), pullback.grad(), pullback.saved()[0], axis));
  }
  if (pullback.needs(0)) pullback.give(0, pullback.take_grad());
}

void rows_pullback(Pullback& pullback) {
  if (pullback.needs(1)) {
    pullback.give(1, take(pullback.encoder(), pullback.grad(), pullback.saved()[0], 0));
  }
  if (pullback.needs(0)) pullback.give(0, pullback.take_grad());
}

using Direct = Tensor (*)(CommandEncoder&, const Tensor&, const Tensor&, const Tensor&,
                          std::int64_t);

// Broadcasting and flattening are ops of their own on the tape: the sums over copies are their gradient.
Tensor on_tape(Tape& tape, const char* name, Direct direct, BackwardFn backward, const Tensor& x,
               const Tensor& indices, const Tensor& values, Axis axis) {
  const Shapes s = shapes_of(x.shape(), indices.shape(), values.shape(), axis);
  const Tensor from = x.shape() == s.x ? x
                      : axis           ? broadcast_to(tape, x, s.x)
                                       : reshape(tape, x, s.x);
  const Tensor with = values.shape() == s.values ? values : broadcast_to(tape, values, s.values);
  const Tensor at = indices.broadcast_to(s.values);
  Tensor y = direct(tape.encoder(), from, at, with, s.axis);
  if (tape.wants({from, with})) {
    tape.record(name, backward, {from, with}, {&y}, Saved({at}, s.axis));
  }
  return axis || x.rank() == 1 ? y : reshape(tape, y, x.shape());
}

}  // namespace

Tensor put_along_axis(Tape& tape, const Tensor& x, const Tensor& indices, const Tensor& values,
                      Axis axis) {
  require(put_along_axis_check(x, indices, values, axis));
  return on_tape(tape, "put_along_axis", put, put_pullback, x, indices, values, axis);
}

Tensor scatter_add_axis(Tape& tape, const Tensor& x, const Tensor& indices, const Tensor& values,
                        Axis axis) {
  require(scatter_add_axis_check(x, indices, values, axis));
  return on_tape(tape, "scatter_add_axis", add, add_pullback, x, indices, values, axis);
}

Tensor scatter_add(Tape& tape, const Tensor& x, const Tensor& indices, const Tensor& values) {
  Tensor y = scatter_add(tape.encoder(), x, indices, values);
  if (tape.wants({x, values})) {
    tape.record("scatter_add", rows_pullback, {x, values}, {&y}, Saved({indices}));
  }
  return y;
}

}  // namespace mlxtape::ops
