#include "mlxtape/ops/layout.h"

#include <algorithm>
#include <string>

#include "layout_parts.h"
#include "mlxtape/base/checked.h"

namespace mlxtape::ops {

using namespace layout;

namespace {

Error wrong(const char* op, Errc code, const std::string& what) {
  return {code, std::string(op) + ": " + what};
}

std::string with(const AxisList& axes) { return to_string(Dims(axes.begin(), axes.end())); }

Check check_axis(const char* op, std::int64_t axis, std::int64_t rank) {
  if (normal_axis(axis, rank)) return std::nullopt;
  return wrong(op, Errc::kArgument,
               "axis must be in [-" + std::to_string(rank) + ", " + std::to_string(rank) +
                   "), got " + std::to_string(axis));
}

// axes in [0, rank), each once.
Check check_axes(const char* op, const AxisList& axes, std::int64_t rank) {
  unsigned seen = 0;
  for (const std::int64_t axis : axes) {
    if (const Check check = check_axis(op, axis, rank)) return check;
    const auto bit = 1U << static_cast<unsigned>(*normal_axis(axis, rank));
    if ((seen & bit) != 0) {
      return wrong(op, Errc::kArgument, "each axis once, got " + with(axes));
    }
    seen |= bit;
  }
  return std::nullopt;
}

bool has_axis(const AxisList& axes, std::int64_t axis, std::int64_t rank) {
  return std::any_of(axes.begin(), axes.end(),
                     [&](std::int64_t a) { return *normal_axis(a, rank) == axis; });
}

// shape with its -1 worked out; checked.
Shape whole_shape(const Tensor& x, const Shape& shape) {
  std::int64_t known = 1;
  Shape whole = shape;
  for (const std::int64_t n : shape) known *= n == -1 ? 1 : n;
  for (std::int64_t i = 0; i < shape.rank(); ++i) {
    if (shape[i] == -1) whole[i] = known == 0 ? 0 : x.size() / known;
  }
  return whole;
}

// The memory of x as another tensor, nobody on a tape.
// Everything but the one axis must agree.
Check check_alike(const char* op, const std::vector<Tensor>& xs, std::int64_t but) {
  for (const Tensor& x : xs) {
    bool same = x.rank() == xs[0].rank();
    for (std::int64_t i = 0; same && i < x.rank(); ++i) same = i == but || x.dim(i) == xs[0].dim(i);
    if (!same) {
      return wrong(op, Errc::kShape,
                   "shapes must agree on every other axis, got " + to_string(xs[0].shape()) +
                       " and " + to_string(x.shape()));
    }
    if (x.dtype() != xs[0].dtype()) {
      return wrong(op, Errc::kDType,
                   std::string("one type, got ") + name_of(xs[0].dtype()) + " and " +
                       name_of(x.dtype()) + "; cast first");
    }
    if (x.backend() != xs[0].backend()) {
      return wrong(op, Errc::kDevice,
                   std::string("one device, got ") + name_of(xs[0].backend()) + " and " +
                       name_of(x.backend()));
    }
  }
  return std::nullopt;
}

}  // namespace

// ---- what must hold ----

Check reshape_check(const Tensor& x, const Shape& shape) {
  std::int64_t unknown = 0;
  for (const std::int64_t n : shape) {
    unknown += n == -1;
    if (n < -1) {
      return wrong("reshape", Errc::kShape,
                   "dimensions must be 0 or more, or -1 once, got " + to_string(shape));
    }
  }
  if (unknown > 1) {
    return wrong("reshape", Errc::kShape, "at most one -1, got " + to_string(shape));
  }
  const auto count = element_count(whole_shape(x, shape));
  if (!count || *count != x.size()) {
    return wrong(
        "reshape", Errc::kShape,
        "the element count of " + to_string(x.shape()) + " must stay, got " + to_string(shape));
  }
  return std::nullopt;
}

Check transpose_check(const Tensor& x, const AxisList& axes) {
  if (const Check check = check_axes("transpose", axes, x.rank())) return check;
  if (!axes.empty() && static_cast<std::int64_t>(axes.size()) != x.rank()) {
    return wrong("transpose", Errc::kArgument,
                 "each of the " + std::to_string(x.rank()) + " axes once, got " + with(axes));
  }
  return std::nullopt;
}

Check slice_check(const Tensor& x, const std::vector<SliceAxis>& axes) {
  if (static_cast<std::int64_t>(axes.size()) > x.rank()) {
    return wrong("slice", Errc::kArgument,
                 "at most as many axes as " + to_string(x.shape()) + " has, got " +
                     std::to_string(axes.size()));
  }
  for (const SliceAxis& axis : axes) {
    if (axis.step == 0 || axis.step == INT64_MIN) {
      return wrong("slice", Errc::kArgument,
                   "a step must not be 0, got " + std::to_string(axis.step));
    }
  }
  return std::nullopt;
}

Check squeeze_check(const Tensor& x, const AxisList& axes) {
  if (const Check check = check_axes("squeeze", axes, x.rank())) return check;
  for (const std::int64_t axis : axes) {
    if (x.dim(*normal_axis(axis, x.rank())) != 1) {
      return wrong("squeeze", Errc::kShape,
                   "an axis that goes must have size 1, got axis " + std::to_string(axis) + " of " +
                       to_string(x.shape()));
    }
  }
  return std::nullopt;
}

Check expand_dims_check(const Tensor& x, const AxisList& axes) {
  const std::int64_t rank = x.rank() + static_cast<std::int64_t>(axes.size());
  if (rank > kMaxRank) {
    return wrong("expand_dims", Errc::kShape, "at most 8 axes, got " + std::to_string(rank));
  }
  return check_axes("expand_dims", axes, rank);
}

Check broadcast_to_check(const Tensor& x, const Shape& shape) {
  const auto joined = broadcast_shapes(x.shape(), shape);
  if (joined && *joined == shape && element_count(shape)) return std::nullopt;
  return wrong(
      "broadcast_to", Errc::kShape,
      to_string(x.shape()) + " must stretch to the shape asked for, got " + to_string(shape));
}

Check repeat_check(const Tensor& x, std::int64_t n, std::int64_t axis) {
  if (const Check check = check_axis("repeat", axis, x.rank())) return check;
  if (n < 0) return wrong("repeat", Errc::kArgument, "0 or more times, got " + std::to_string(n));
  Shape shape = x.shape();
  const std::int64_t a = *normal_axis(axis, x.rank());
  const auto length = checked_mul(x.dim(a), n);
  shape[a] = length.value_or(0);
  if (!length || !element_count(shape)) {
    return wrong("repeat", Errc::kShape,
                 "the elements of the result must fit in 63 bits, got " + to_string(x.shape()) +
                     " times " + std::to_string(n));
  }
  return std::nullopt;
}

Check concatenate_check(const std::vector<Tensor>& xs, std::int64_t axis) {
  if (xs.empty()) return wrong("concatenate", Errc::kArgument, "at least one tensor, got none");
  if (const Check check = check_axis("concatenate", axis, xs[0].rank())) return check;
  return check_alike("concatenate", xs, *normal_axis(axis, xs[0].rank()));
}

Check stack_check(const std::vector<Tensor>& xs, std::int64_t axis) {
  if (xs.empty()) return wrong("stack", Errc::kArgument, "at least one tensor, got none");
  if (xs[0].rank() == kMaxRank) return wrong("stack", Errc::kShape, "at most 8 axes, got 9");
  if (const Check check = check_axis("stack", axis, xs[0].rank() + 1)) return check;
  return check_alike("stack", xs, -1);
}

Check split_check(const Tensor& x, const std::vector<std::int64_t>& at, std::int64_t axis) {
  if (const Check check = check_axis("split", axis, x.rank())) return check;
  const std::int64_t n = x.dim(*normal_axis(axis, x.rank()));
  std::int64_t before = 0;
  for (const std::int64_t place : at) {
    if (place < before || place > n) {
      return wrong("split", Errc::kArgument,
                   "places must rise from 0 to " + std::to_string(n) + ", got " + with(at));
    }
    before = place;
  }
  return std::nullopt;
}

Check split_check(const Tensor& x, std::int64_t n, std::int64_t axis) {
  if (const Check check = check_axis("split", axis, x.rank())) return check;
  const std::int64_t size = x.dim(*normal_axis(axis, x.rank()));
  if (n < 1 || size % n != 0) {
    return wrong("split", Errc::kArgument,
                 "an axis of " + std::to_string(size) + " in equal parts, got " +
                     std::to_string(n) + " of them");
  }
  return std::nullopt;
}

Check pad_check(const Tensor& x, const std::vector<PadAxis>& axes) {
  if (static_cast<std::int64_t>(axes.size()) > x.rank()) {
    return wrong("pad", Errc::kArgument,
                 "at most as many axes as " + to_string(x.shape()) + " has, got " +
                     std::to_string(axes.size()));
  }
  for (const PadAxis& axis : axes) {
    if (axis.before < 0 || axis.after < 0) {
      return wrong("pad", Errc::kArgument,
                   "widths must be 0 or more, got " + std::to_string(axis.before) + " and " +
                       std::to_string(axis.after));
    }
  }
  return std::nullopt;
}

// ---- views ----

Tensor reshape(CommandEncoder& encoder, const Tensor& x, const Shape& shape) {
  require(reshape_check(x, shape));
  return encoder.contiguous(x).reshape(whole_shape(x, shape)).detach();
}

Tensor transpose(CommandEncoder&, const Tensor& x, const AxisList& axes) {
  require(transpose_check(x, axes));
  Shape shape = x.shape();
  Strides strides = x.strides();
  for (std::int64_t i = 0; i < x.rank(); ++i) {
    const std::int64_t from =
        axes.empty() ? x.rank() - 1 - i : *normal_axis(axes[static_cast<std::size_t>(i)], x.rank());
    shape[i] = x.dim(from);
    strides[i] = x.strides()[from];
  }
  return view(x, shape, strides, x.offset());
}

Tensor slice(CommandEncoder&, const Tensor& x, const std::vector<SliceAxis>& axes) {
  require(slice_check(x, axes));
  Shape shape = x.shape();
  Strides strides = x.strides();
  std::int64_t offset = x.offset();
  bool empty = false;
  for (std::size_t i = 0; i < axes.size(); ++i) {
    const auto a = static_cast<std::int64_t>(i);
    const Cut c = cut(axes[i], x.dim(a));
    shape[a] = c.count;
    empty |= c.count == 0;
    if (c.count == 0) continue;
    offset += c.start * x.strides()[a];
    // A step that is never taken may be as large as it likes.
    strides[a] = c.count == 1 ? x.strides()[a] : x.strides()[a] * c.step;
  }
  return view(x, shape, strides, empty ? 0 : offset);
}

Tensor squeeze(CommandEncoder&, const Tensor& x, const AxisList& axes) {
  require(squeeze_check(x, axes));
  Shape shape;
  Strides strides;
  for (std::int64_t i = 0; i < x.rank(); ++i) {
    if (axes.empty() ? x.dim(i) == 1 : has_axis(axes, i, x.rank())) continue;
    shape.push_back(x.dim(i));
    strides.push_back(x.strides()[i]);
  }
  return view(x, shape, strides, x.offset());
}

Tensor expand_dims(CommandEncoder&, const Tensor& x, const AxisList& axes) {
  require(expand_dims_check(x, axes));
  const std::int64_t rank = x.rank() + static_cast<std::int64_t>(axes.size());
  Shape shape;
  Strides strides;
  std::int64_t from = 0;
  for (std::int64_t i = 0; i < rank; ++i) {
    const bool is_new = has_axis(axes, i, rank);
    shape.push_back(is_new ? 1 : x.dim(from));
    strides.push_back(is_new ? 1 : x.strides()[from]);
    from += is_new ? 0 : 1;
  }
  return view(x, shape, strides, x.offset());
}

Tensor broadcast_to(CommandEncoder&, const Tensor& x, const Shape& shape) {
  require(broadcast_to_check(x, shape));
  return x.broadcast_to(shape).detach();
}

Tensor repeat(CommandEncoder& encoder, const Tensor& x, std::int64_t n, std::int64_t axis) {
  require(repeat_check(x, n, axis));
  const std::int64_t a = *normal_axis(axis, x.rank());
  Shape shape = x.shape();
  shape[a] *= n;
  if (x.rank() == kMaxRank) {  // no room for an axis of the copies: those around a as one each
    const Tensor flat = encoder.contiguous(x).reshape(around(x.shape(), a));
    return repeat(encoder, flat, n, 1).reshape(shape);
  }
  const Tensor thick = expand_dims(encoder, x, {a + 1});
  Shape stretched = thick.shape();
  stretched[a + 1] = n;
  return reshape(encoder, thick.broadcast_to(stretched), shape);
}

std::vector<Tensor> split_at(CommandEncoder&, const Tensor& x, const std::vector<std::int64_t>& at,
                             std::int64_t axis) {
  require(split_check(x, at, axis));
  const std::int64_t a = *normal_axis(axis, x.rank());
  std::vector<Tensor> parts;
  std::int64_t start = 0;
  for (const std::int64_t place : at) {
    parts.push_back(part(x, a, start, place - start));
    start = place;
  }
  parts.push_back(part(x, a, start, x.dim(a) - start));
  return parts;
}

std::vector<Tensor> split(CommandEncoder& encoder, const Tensor& x, std::int64_t n,
                          std::int64_t axis) {
  return split_at(encoder, x, equal_parts(x, n, axis), axis);
}

// ---- copies ----

Tensor concatenate(CommandEncoder& encoder, const std::vector<Tensor>& xs, std::int64_t axis) {
  require(concatenate_check(xs, axis));
  const std::int64_t a = *normal_axis(axis, xs[0].rank());
  Shape shape = xs[0].shape();
  shape[a] = 0;
  for (const Tensor& x : xs) shape[a] += x.dim(a);
  const Tensor y = encoder.empty(shape, xs[0].dtype());
  std::int64_t start = 0;
  for (const Tensor& x : xs) {
    encoder.copy(x, part(y, a, start, x.dim(a)));
    start += x.dim(a);
  }
  return y;
}

Tensor stack(CommandEncoder& encoder, const std::vector<Tensor>& xs, std::int64_t axis) {
  require(stack_check(xs, axis));
  std::vector<Tensor> thick;
  thick.reserve(xs.size());
  for (const Tensor& x : xs) thick.push_back(expand_dims(encoder, x, {axis}));
  return concatenate(encoder, thick, axis);
}

Tensor pad(CommandEncoder& encoder, const Tensor& x, const std::vector<PadAxis>& axes,
           double value) {
  require(pad_check(x, axes));
  Shape shape = x.shape();
  for (std::size_t i = 0; i < axes.size(); ++i) {
    shape[static_cast<std::int64_t>(i)] += axes[i].before + axes[i].after;
  }
  const Tensor y = encoder.full(shape, x.dtype(), value);
  encoder.copy(x, middle(y, x.shape(), axes));
  return y;
}

}  // namespace mlxtape::ops
