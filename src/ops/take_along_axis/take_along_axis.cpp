#include "mlxtape/ops/take_along_axis.h"

#include "take_along_axis_args.h"

namespace mlxtape::ops {

namespace {

constinit const KernelHandle kForward("take_along_axis_fwd");
constinit const KernelHandle kBackward("take_along_axis_bwd");

Error wrong(Errc code, const std::string& what) { return {code, "take_along_axis: " + what}; }
Error wrong_topk(Errc code, const std::string& what) {
  return {code, "take_along_axis_topk: " + what};
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

// With the axis set apart: that of the indices. Only for shapes that passed check_shapes.
Shape result_shape(const Shape& x, const Shape& indices, std::int64_t axis) {
  Shape y = indices;
  for (std::int64_t i = 0; i < y.rank(); ++i) {
    if (i != axis && y[i] == 1) y[i] = x[i];
  }
  return y;
}

Check check_shapes(const Shape& x, const Tensor& indices, OptionalAxis axis) {
  const Shape& index_shape = indices.shape();
  if (!axis) {
    if (index_shape.rank() != 1) {
      return wrong(Errc::kShape,
                   "indices must be [k] when there is no axis, got " + to_string(index_shape));
    }
  } else {
    const auto a = normal_axis(*axis, x.rank());
    if (!a) {
      return wrong(Errc::kArgument, "axis must be in [-" + std::to_string(x.rank()) + ", " +
                                        std::to_string(x.rank()) + "), got " +
                                        std::to_string(*axis));
    }
    if (index_shape.rank() != x.rank()) {
      return wrong(Errc::kShape, "indices must have as many axes as x " + to_string(x) + ", got " +
                                     to_string(index_shape));
    }
    for (std::int64_t i = 0; i < x.rank(); ++i) {
      if (i != *a && x[i] != index_shape[i] && x[i] != 1 && index_shape[i] != 1) {
        return wrong(Errc::kShape, "indices must broadcast against x " + to_string(x) +
                                       " on every axis but " + std::to_string(*a) + ", got " +
                                       to_string(index_shape));
      }
    }
    const Shape y = result_shape(x, index_shape, *a);
    if (!element_count(y)) {
      return wrong(Errc::kShape,
                   "the elements of the result must fit in 63 bits, got " + to_string(y));
    }
  }
  if (!is_integer(indices.dtype())) {
    return wrong(Errc::kDType,
                 std::string("indices must be integers, got ") + name_of(indices.dtype()));
  }
  return std::nullopt;
}

// x and its axis as the kernels know them: flat when there is no axis.
struct Axis {
  Shape shape;
  std::int64_t axis;
};
Axis resolve(const Shape& x, OptionalAxis axis) {
  if (!axis) return {{*element_count(x)}, 0};
  return {x, *normal_axis(*axis, x.rank())};
}

std::int64_t stride_of(const Shape& shape, const Strides& strides, std::int64_t i) {
  return shape[i] == 1 ? 0 : strides[i];
}

TakeAlongAxisArgs forward_args(const Tensor& x, const Tensor& indices, const Shape& y,
                               std::int64_t axis) {
  TakeAlongAxisArgs args{};
  std::int64_t& r = args.rank;
  for (std::int64_t i = 0; i < y.rank(); ++i) {
    const std::int64_t n = y[i];
    const std::int64_t xs = i == axis ? 0 : stride_of(x.shape(), x.strides(), i);
    const std::int64_t is = stride_of(indices.shape(), indices.strides(), i);
    if (n == 1) continue;
    if (r > 0 && args.x[r - 1] == xs * n && args.index[r - 1] == is * n) {
      args.n[r - 1] *= n;
    } else {
      args.n[r++] = n;
    }
    args.x[r - 1] = xs;
    args.index[r - 1] = is;
  }
  if (r == 0) args.n[r++] = 1;
  args.length = x.dim(axis);
  args.axis_stride = x.strides()[axis];
  args.index_type = static_cast<std::int64_t>(indices.dtype());
  return args;
}

TakeAlongAxisBackwardArgs backward_args(const Shape& x, const Tensor& indices, const Shape& y,
                                        std::int64_t axis) {
  TakeAlongAxisBackwardArgs args{};
  const Strides x_strides = contiguous_strides(x);
  const Strides y_strides = contiguous_strides(y);
  std::int64_t& r = args.rank;
  std::int64_t& s = args.sum_rank;
  for (std::int64_t i = 0; i < y.rank(); ++i) {
    const std::int64_t n = y[i];
    const std::int64_t ys = y_strides[i];
    const std::int64_t is = stride_of(indices.shape(), indices.strides(), i);
    if (n == 1) continue;
    if (i == axis || x[i] == 1) {
      if (s > 0 && args.sum_dy[s - 1] == ys * n && args.sum_index[s - 1] == is * n) {
        args.sum_n[s - 1] *= n;
      } else {
        args.sum_n[s++] = n;
      }
      args.sum_dy[s - 1] = ys;
      args.sum_index[s - 1] = is;
    } else {
      if (r > 0 && args.dx[r - 1] == x_strides[i] * n && args.dy[r - 1] == ys * n &&
          args.index[r - 1] == is * n) {
        args.n[r - 1] *= n;
      } else {
        args.n[r++] = n;
      }
      args.dx[r - 1] = x_strides[i];
      args.dy[r - 1] = ys;
      args.index[r - 1] = is;
    }
  }
  if (s == 0) args.sum_n[s++] = 1;
  args.length = x[axis];
  args.axis_stride = x_strides[axis];
  args.index_type = static_cast<std::int64_t>(indices.dtype());
  args.width = 1;
  if (r > 0 && args.dx[r - 1] == 1) {
    --r;
    args.width = args.n[r];
    args.width_dy = args.dy[r];
    args.width_index = args.index[r];
  }
  return args;
}

}  // namespace

Check take_along_axis_check(const Tensor& x, const Tensor& indices, OptionalAxis axis) {
  if (Check check = check_shapes(x.shape(), indices, axis)) return check;
  if (indices.backend() != x.backend()) {
    return wrong(Errc::kDevice, std::string("indices must be where x is (") + name_of(x.backend()) +
                                    "), got " + name_of(indices.backend()));
  }
  return std::nullopt;
}

Check take_along_axis_backward_check(const Tensor& dy, const Tensor& indices, const Shape& x_shape,
                                     OptionalAxis axis) {
  if (!element_count(x_shape)) {
    return wrong(Errc::kShape, "x_shape must be a shape, got " + to_string(x_shape));
  }
  if (Check check = check_shapes(x_shape, indices, axis)) return check;
  const auto [x, a] = resolve(x_shape, axis);
  const Shape y = result_shape(x, indices.shape(), a);
  if (!(dy.shape() == y)) {
    return wrong(Errc::kShape,
                 "dy must have the shape of y " + to_string(y) + ", got " + to_string(dy.shape()));
  }
  if (!is_kernel_float(dy.dtype())) {
    return wrong(Errc::kDType,
                 std::string("dy must be f32, f16 or bf16, got ") + name_of(dy.dtype()));
  }
  if (indices.backend() != dy.backend()) {
    return wrong(Errc::kDevice, std::string("indices must be where dy is (") +
                                    name_of(dy.backend()) + "), got " + name_of(indices.backend()));
  }
  return std::nullopt;
}

Tensor take_along_axis(CommandEncoder& encoder, const Tensor& x, const Tensor& indices,
                       OptionalAxis axis) {
  require(take_along_axis_check(x, indices, axis));
  const auto [shape, a] = resolve(x.shape(), axis);
  const Tensor from = axis ? x : encoder.contiguous(x).reshape(shape);
  Tensor y = encoder.empty(result_shape(shape, indices.shape(), a), x.dtype());
  if (y.size() != 0) {
    encoder.dispatch(kForward, unsigned_of_size(size_of(x.dtype())),
                     forward_args(from, indices, y.shape(), a), {from, indices}, {y});
  }
  return y;
}

Tensor take_along_axis_backward(CommandEncoder& encoder, const Tensor& dy, const Tensor& indices,
                                const Shape& x_shape, OptionalAxis axis) {
  require(take_along_axis_backward_check(dy, indices, x_shape, axis));
  const auto [shape, a] = resolve(x_shape, axis);
  const Tensor dy_rows = encoder.contiguous(dy);
  Tensor dx = encoder.empty(x_shape, dy.dtype());
  if (dx.size() != 0) {
    encoder.dispatch(kBackward, dy.dtype(), backward_args(shape, indices, dy.shape(), a),
                     {dy_rows, indices}, {dx});
  }
  return dx;
}

namespace {

Check check_topk(const char* name, const Tensor& values, std::int64_t rows, std::int64_t cols,
                 const Tensor& indices) {
  if (indices.rank() != 2 || indices.dim(0) != rows) {
    return wrong_topk(Errc::kShape, "indices must be [R, k] with R = " + std::to_string(rows) +
                                        ", got " + to_string(indices.shape()));
  }
  const std::int64_t k = indices.dim(1);
  if (rows == 0 || cols == 0 || k == 0) {
    return wrong_topk(Errc::kShape, "R, C and k must be at least 1, got " + std::to_string(rows) +
                                        ", " + std::to_string(cols) + " and " + std::to_string(k));
  }
  if (k > cols) {
    return wrong_topk(Errc::kShape, "k must be at most C = " + std::to_string(cols) + ", got " +
                                        std::to_string(k));
  }
  if (!is_kernel_float(values.dtype())) {
    return wrong_topk(Errc::kDType, std::string(name) + " must be f32, f16 or bf16, got " +
                                        name_of(values.dtype()));
  }
  if (indices.dtype() != DType::kU32) {
    return wrong_topk(Errc::kDType,
                      std::string("indices must be u32, got ") + name_of(indices.dtype()));
  }
  if (indices.backend() != values.backend()) {
    return wrong_topk(Errc::kDevice, std::string("indices must be where ") + name + " is (" +
                                         name_of(values.backend()) + "), got " +
                                         name_of(indices.backend()));
  }
  return std::nullopt;
}

}  // namespace

Check take_along_axis_topk_check(const Tensor& x, const Tensor& indices) {
  if (x.rank() != 2) {
    return wrong_topk(Errc::kShape, "x must be [R, C], got " + to_string(x.shape()));
  }
  return check_topk("x", x, x.dim(0), x.dim(1), indices);
}

Check take_along_axis_topk_backward_check(const Tensor& dy, const Tensor& indices,
                                          std::int64_t cols) {
  if (dy.rank() != 2) {
    return wrong_topk(Errc::kShape, "dy must be [R, k], got " + to_string(dy.shape()));
  }
  if (Check check = check_topk("dy", dy, dy.dim(0), cols, indices)) return check;
  if (indices.dim(1) != dy.dim(1)) {
    return wrong_topk(Errc::kShape, "indices must have the shape of dy " + to_string(dy.shape()) +
                                        ", got " + to_string(indices.shape()));
  }
  if (!element_count({dy.dim(0), cols})) {
    return wrong_topk(Errc::kShape, "R·C must fit in 63 bits, got C = " + std::to_string(cols));
  }
  return std::nullopt;
}

Tensor take_along_axis_topk(CommandEncoder& encoder, const Tensor& x, const Tensor& indices) {
  require(take_along_axis_topk_check(x, indices));
  return take_along_axis(encoder, x, indices, 1);
}

Tensor take_along_axis_topk_backward(CommandEncoder& encoder, const Tensor& dy,
                                     const Tensor& indices, std::int64_t cols) {
  require(take_along_axis_topk_backward_check(dy, indices, cols));
  return take_along_axis_backward(encoder, dy, indices, {dy.dim(0), cols}, 1);
}

namespace {

struct TakeSaved {
  Shape x_shape;
  bool has_axis;
  std::int64_t axis;
};

void take_along_axis_pullback(Pullback& pullback) {
  const auto& kept = pullback.saved().args<TakeSaved>();
  pullback.give(0, take_along_axis_backward(
                       pullback.encoder(), pullback.grad(), pullback.saved()[0], kept.x_shape,
                       kept.has_axis ? OptionalAxis(kept.axis) : std::nullopt));
}

}  // namespace

Tensor take_along_axis(Tape& tape, const Tensor& x, const Tensor& indices, OptionalAxis axis) {
  Tensor y = take_along_axis(tape.encoder(), x, indices, axis);
  if (tape.wants({x})) {
    tape.record("take_along_axis", take_along_axis_pullback, {x}, {&y},
                Saved({indices}, TakeSaved{x.shape(), axis.has_value(), axis.value_or(0)}));
  }
  return y;
}

}  // namespace mlxtape::ops
