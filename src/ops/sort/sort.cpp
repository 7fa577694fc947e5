#include "mlxtape/ops/sort.h"

#include <algorithm>
#include <limits>
#include <string>
#include <utility>

#include "sort_args.h"

namespace mlxtape::ops {

namespace {

constinit const KernelHandle kSort("sort_fwd");
constinit const KernelHandle kSelect("select_fwd");
constinit const KernelHandle kBackward("sort_bwd");
constinit const KernelHandle kArgmax("argmax_fwd");

Error wrong(const char* op, Errc code, const std::string& what) {
  return {code, std::string(op) + ": " + what};
}

bool has_keys(DType t) { return is_kernel_float(t) || t == DType::kI32 || t == DType::kU32; }

// Elements along the axis, which must have passed the check.
std::int64_t length_of(const Tensor& x, OptionalAxis axis) {
  return axis ? x.dim(*normal_axis(*axis, x.rank())) : x.size();
}

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
  if (axis && !normal_axis(*axis, x.rank())) {
    return wrong(op, Errc::kArgument,
                 "axis must be in [-" + std::to_string(x.rank()) + ", " + std::to_string(x.rank()) +
                     "), got " + std::to_string(*axis));
  }
  const std::int64_t cols = length_of(x, axis);
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

Check partition_check(const char* op, const Tensor& x, std::int64_t kth, OptionalAxis axis) {
  if (Check check = sort_check(op, x, axis)) return check;
  const std::int64_t cols = length_of(x, axis);
  if (kth < -cols || kth >= cols) {
    return wrong(op, Errc::kArgument,
                 "kth must be in [-" + std::to_string(cols) + ", " + std::to_string(cols) +
                     "), got " + std::to_string(kth));
  }
  return std::nullopt;
}

Check topk_check(const Tensor& x, std::int64_t k, OptionalAxis axis) {
  if (Check check = sort_check("topk", x, axis)) return check;
  const std::int64_t cols = length_of(x, axis);
  if (k < 0 || k > cols) {
    return wrong("topk", Errc::kArgument,
                 "k must be in [0, " + std::to_string(cols) + "], got " + std::to_string(k));
  }
  return std::nullopt;
}

namespace {

// What the kernels make: the axis last. values may be missing.
struct Found {
  Rows rows;
  Tensor values, indices;
};

Found outputs_for(CommandEncoder& encoder, const Tensor& x, OptionalAxis axis, std::int64_t count,
                  bool with_values) {
  Found found;
  found.rows = rows_of(encoder, x, axis);
  const Shape shape = result_shape(found.rows, count < 0 ? found.rows.cols : count);
  found.indices = encoder.empty(shape, DType::kU32);
  if (with_values) found.values = encoder.empty(shape, x.dtype());
  return found;
}

// The first count of the order, all with count < 0.
Found sorted(CommandEncoder& encoder, const Tensor& x, OptionalAxis axis, bool with_values,
             std::int64_t count = -1, bool down = false) {
  Found found = outputs_for(encoder, x, axis, count, with_values);
  const Rows& rows = found.rows;
  if (found.indices.size() != 0) {
    encoder.dispatch(
        kSort, x.dtype(),
        SortArgs{rows.count, rows.cols, count < 0 ? rows.cols : count, down ? 1 : 0, 0}, {rows.x},
        {found.values, found.indices});
  }
  return found;
}

Found selected(CommandEncoder& encoder, const Tensor& x, OptionalAxis axis, bool with_values,
               std::int64_t count, Best best, bool whole) {
  Found found = outputs_for(encoder, x, axis, whole ? -1 : count, with_values);
  const Rows& rows = found.rows;
  if (found.indices.size() != 0) {
    encoder.dispatch(kSelect, x.dtype(),
                     SelectArgs{rows.count, rows.cols, count, best, whole ? 1 : 0}, {rows.x},
                     {found.values, found.indices});
  }
  return found;
}

Found partitioned(CommandEncoder& encoder, const char* op, const Tensor& x, std::int64_t kth,
                  OptionalAxis axis, bool with_values) {
  require(partition_check(op, x, kth, axis));
  const std::int64_t cols = length_of(x, axis);
  if (kth < 0) kth += cols;
  const std::int64_t most = std::min(kMostSelected, cols / 4);
  if (kth + 1 <= most) {
    return selected(encoder, x, axis, with_values, kth + 1, Best::kFirst, true);
  }
  if (cols - kth <= most) {
    return selected(encoder, x, axis, with_values, cols - kth, Best::kLast, true);
  }
  return sorted(encoder, x, axis, with_values);
}

Found top(CommandEncoder& encoder, const Tensor& x, std::int64_t k, OptionalAxis axis) {
  require(topk_check(x, k, axis));
  if (k > kMostSelected) return sorted(encoder, x, axis, true, k, true);
  return selected(encoder, x, axis, true, k, Best::kLargest, false);
}

struct Kept {
  Shape shape;  // of x
  Shape flat;   // the same, or of one axis
  std::int64_t axis;
};

void moved_back(Pullback& pullback) {
  const auto& kept = pullback.saved().args<Kept>();
  const Tensor& indices = pullback.saved()[0];
  CommandEncoder& encoder = pullback.encoder();
  const std::int64_t last = kept.flat.rank() - 1;
  Shape shape = kept.flat;
  std::swap(shape[kept.axis], shape[last]);
  const std::int64_t count = indices.dim(last);
  const Tensor dy = encoder.contiguous(exchanged(pullback.grad(), kept.axis, last));
  if (count == 0) return pullback.give_none(0);
  const Tensor dx =
      count < shape[last] ? encoder.zeros(shape, dy.dtype()) : encoder.empty(shape, dy.dtype());
  if (dx.size() != 0) {
    encoder.dispatch(kBackward, dy.dtype(),
                     SortBackwardArgs{indices.size() / count, shape[last], count}, {dy, indices},
                     {dx});
  }
  pullback.give(0, encoder.contiguous(exchanged(dx, kept.axis, last)).reshape(kept.shape));
}

// The values of x, recorded where that is wanted.
Tensor recorded(Tape& tape, const char* op, const Tensor& x, const Found& found) {
  Tensor y = in_order(tape.encoder(), found.values, found.rows);
  if (tape.wants({x})) {
    tape.record(op, moved_back, {x}, {&y},
                Saved({found.indices}, Kept{x.shape(), found.rows.shape, found.rows.axis}));
  }
  return y;
}

}  // namespace

Tensor argsort(CommandEncoder& encoder, const Tensor& x, OptionalAxis axis) {
  require(sort_check("argsort", x, axis));
  const Found found = sorted(encoder, x, axis, false);
  return in_order(encoder, found.indices, found.rows);
}
Tensor sort(CommandEncoder& encoder, const Tensor& x, OptionalAxis axis) {
  require(sort_check("sort", x, axis));
  const Found found = sorted(encoder, x, axis, true);
  return in_order(encoder, found.values, found.rows);
}
Tensor sort(Tape& tape, const Tensor& x, OptionalAxis axis) {
  require(sort_check("sort", x, axis));
  return recorded(tape, "sort", x, sorted(tape.encoder(), x, axis, true));
}

Tensor argpartition(CommandEncoder& encoder, const Tensor& x, std::int64_t kth, OptionalAxis axis) {
  const Found found = partitioned(encoder, "argpartition", x, kth, axis, false);
  return in_order(encoder, found.indices, found.rows);
}
Tensor partition(CommandEncoder& encoder, const Tensor& x, std::int64_t kth, OptionalAxis axis) {
  const Found found = partitioned(encoder, "partition", x, kth, axis, true);
  return in_order(encoder, found.values, found.rows);
}
Tensor partition(Tape& tape, const Tensor& x, std::int64_t kth, OptionalAxis axis) {
  return recorded(tape, "partition", x,
                  partitioned(tape.encoder(), "partition", x, kth, axis, true));
}

TopK topk(CommandEncoder& encoder, const Tensor& x, std::int64_t k, OptionalAxis axis) {
  const Found found = top(encoder, x, k, axis);
  return {in_order(encoder, found.values, found.rows),
          in_order(encoder, found.indices, found.rows)};
}
TopK topk(Tape& tape, const Tensor& x, std::int64_t k, OptionalAxis axis) {
  const Found found = top(tape.encoder(), x, k, axis);
  return {recorded(tape, "topk", x, found), in_order(tape.encoder(), found.indices, found.rows)};
}

Check argmax_check(const char* op, const Tensor& x, OptionalAxis axis) {
  if (Check check = sort_check(op, x, axis)) return check;
  const std::int64_t count = length_of(x, axis);
  bool has_results = true;
  for (std::int64_t i = 0; axis && i < x.rank(); ++i) {
    has_results = has_results && (i == *normal_axis(*axis, x.rank()) || x.dim(i) != 0);
  }
  if (count == 0 && has_results) {
    return wrong(op, Errc::kShape,
                 "there must be something to choose from, got " + to_string(x.shape()));
  }
  return std::nullopt;
}

namespace {

Tensor extreme(CommandEncoder& encoder, const char* op, const Tensor& x, OptionalAxis axis,
               bool keepdims, bool smallest) {
  require(argmax_check(op, x, axis));
  ArgmaxArgs args{1, length_of(x, axis), 1, smallest ? 1 : 0};
  const std::int64_t a = axis ? *normal_axis(*axis, x.rank()) : 0;
  Shape result;
  for (std::int64_t i = 0; i < x.rank(); ++i) {
    const bool is_reduced = !axis || i == a;
    if (!is_reduced) (i < a ? args.outer : args.inner) *= x.dim(i);
    if (!is_reduced || keepdims) result.push_back(is_reduced ? 1 : x.dim(i));
  }
  Tensor indices = encoder.empty(result, DType::kU32);
  if (indices.size() != 0) {
    const Tensor dense = encoder.contiguous(x);
    encoder.dispatch(kArgmax, x.dtype(), args, {dense}, {indices});
  }
  return indices;
}

}  // namespace

Tensor argmax(CommandEncoder& encoder, const Tensor& x, OptionalAxis axis, bool keepdims) {
  return extreme(encoder, "argmax", x, axis, keepdims, false);
}
Tensor argmin(CommandEncoder& encoder, const Tensor& x, OptionalAxis axis, bool keepdims) {
  return extreme(encoder, "argmin", x, axis, keepdims, true);
}

}  // namespace mlxtape::ops
