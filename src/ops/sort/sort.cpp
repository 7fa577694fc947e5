#include "mlxtape/ops/sort.h"

#include <limits>
#include <string>
#include <utility>

#include "sort_args.h"

namespace mlxtape::ops {

namespace {

constinit const KernelHandle kSort("sort_fwd");

Error wrong(const char* op, Errc code, const std::string& what) {
  return {code, std::string(op) + ": " + what};
}

bool has_keys(DType t) { return is_kernel_float(t) || t == DType::kI32 || t == DType::kU32; }

// t with two axes exchanged: the same memory.
Tensor exchanged(const Tensor& t, std::int64_t a, std::int64_t b) {
  if (a == b || !t.has_memory()) return t;
  Shape shape = t.shape();
  Strides strides = t.strides();
  std::swap(shape[a], shape[b]);
  std::swap(strides[a], strides[b]);
  return {t.buffer(), t.dtype(), shape, strides, t.offset()};
}

// What is sorted as the kernels see it.
struct Rows {
  Tensor x;     // contiguous, the axis last
  Shape shape;  // of x before: flat where there is no axis
  std::int64_t axis;
  std::int64_t count, cols;
};

Rows rows_of(CommandEncoder& encoder, const Tensor& x, OptionalAxis axis) {
  Rows rows;
  const Tensor from = axis ? x : encoder.contiguous(x).reshape({x.size()});
  rows.shape = from.shape();
  rows.axis = axis ? *normal_axis(*axis, x.rank()) : 0;
  rows.cols = rows.shape[rows.axis];
  rows.count = rows.cols == 0 ? 0 : x.size() / rows.cols;
  rows.x = encoder.contiguous(exchanged(from, rows.axis, rows.shape.rank() - 1));
  return rows;
}

// A result of the kernels with `cols` along the axis, in the order of the axes of x.
Tensor in_order(CommandEncoder& encoder, const Tensor& y, const Rows& rows) {
  return encoder.contiguous(exchanged(y, rows.axis, rows.shape.rank() - 1));
}

Shape result_shape(const Rows& rows, std::int64_t cols) {
  Shape shape = rows.shape;
  shape[rows.axis] = cols;
  std::swap(shape[rows.axis], shape[shape.rank() - 1]);
  return shape;
}

}  // namespace

Check sort_check(const char* op, const Tensor& x, OptionalAxis axis) {
  std::int64_t cols = x.size();
  if (axis) {
    const auto a = normal_axis(*axis, x.rank());
    if (!a) {
      return wrong(op, Errc::kArgument,
                   "axis must be in [-" + std::to_string(x.rank()) + ", " +
                       std::to_string(x.rank()) + "), got " + std::to_string(*axis));
    }
    cols = x.dim(*a);
  }
  if (cols > std::numeric_limits<std::uint32_t>::max()) {
    return wrong(op, Errc::kShape,
                 "the axis must have less than 2^32 elements, got " + std::to_string(cols));
  }
  if (!has_keys(x.dtype())) {
    return wrong(op, Errc::kDType,
                 std::string("x must be f32, f16, bf16, i32 or u32, got ") + name_of(x.dtype()));
  }
  return std::nullopt;
}

Tensor argsort(CommandEncoder& encoder, const Tensor& x, OptionalAxis axis) {
  require(sort_check("argsort", x, axis));
  const Rows rows = rows_of(encoder, x, axis);
  const Tensor indices = encoder.empty(result_shape(rows, rows.cols), DType::kU32);
  const Tensor no_values;
  if (indices.size() != 0) {
    encoder.dispatch(kSort, x.dtype(), SortArgs{rows.count, rows.cols}, {rows.x},
                     {no_values, indices});
  }
  return in_order(encoder, indices, rows);
}

}  // namespace mlxtape::ops
