#include "mlxtape/ops/take.h"

#include <algorithm>
#include <string>

#include "mlxtape/ops/sum_rows.h"
#include "mlxtape/ops/take_along_axis.h"
#include "take_args.h"

namespace mlxtape::ops {

namespace {

using Axis = std::optional<std::int64_t>;

constinit const KernelHandle kForward("take_fwd");
constinit const KernelHandle kPlaces("take_places");

// Sums of so many single elements stay in a cache: to look at every index for each piece of them takes a tenth of the
// time that sorting the indices takes.
constexpr std::int64_t kFewScalars = 1 << 17;

Error wrong(Errc code, const std::string& what) { return {code, "take: " + what}; }
Error wrong_gather(Errc code, const std::string& what) { return {code, "gather: " + what}; }

// Elements are moved, not read: one kernel per size.
DType unsigned_of_size(std::size_t bytes) {
  switch (bytes) {
    case 1: return DType::kU8;
    case 2: return DType::kU16;
    case 4: return DType::kU32;
    default: return DType::kU64;
  }
}

// x as [outer, length, width] around the axis; flat without one.
struct Split {
  std::int64_t outer = 1, length = 1, width = 1;
};
Split split_at(const Shape& x, Axis axis) {
  Split s;
  if (!axis) {
    s.length = *element_count(x);
    return s;
  }
  const std::int64_t a = *normal_axis(*axis, x.rank());
  for (std::int64_t i = 0; i < x.rank(); ++i) {
    (i < a ? s.outer : i == a ? s.length : s.width) *= x[i];
  }
  return s;
}

Shape result_shape(const Shape& x, const Shape& indices, Axis axis) {
  if (!axis) return indices;
  const std::int64_t a = *normal_axis(*axis, x.rank());
  Shape y(x.begin(), x.begin() + a);
  for (const std::int64_t n : indices) y.push_back(n);
  for (std::int64_t i = a + 1; i < x.rank(); ++i) y.push_back(x[i]);
  return y;
}

// The step with which axes [first, end) of x are walked as one axis; nothing where they are not.
std::optional<std::int64_t> stride_of(const Tensor& x, std::int64_t first, std::int64_t end) {
  std::int64_t stride = 0, next = 0;
  bool any = false;
  for (std::int64_t i = end - 1; i >= first; --i) {
    if (x.dim(i) == 1) continue;
    if (!any) {
      stride = x.strides()[i];
    } else if (x.strides()[i] != next) {
      return std::nullopt;
    }
    any = true;
    next = x.strides()[i] * x.dim(i);
  }
  return any ? stride : 1;
}

Check check_shapes(const Shape& x, const Tensor& indices, Axis axis) {
  if (axis && !normal_axis(*axis, x.rank())) {
    return wrong(Errc::kArgument, "axis must be in [-" + std::to_string(x.rank()) + ", " +
                                      std::to_string(x.rank()) + "), got " + std::to_string(*axis));
  }
  if (!is_integer(indices.dtype())) {
    return wrong(Errc::kDType,
                 std::string("indices must be integers, got ") + name_of(indices.dtype()));
  }
  if (axis && x.rank() - 1 + indices.rank() > kMaxRank) {
    return wrong(Errc::kShape, "the result has at most 8 axes, got x " + to_string(x) +
                                   " and indices " + to_string(indices.shape()));
  }
  if (!element_count(result_shape(x, indices.shape(), axis))) {
    return wrong(Errc::kShape, "the elements of the result must fit in 63 bits, got x " +
                                   to_string(x) + " and indices " + to_string(indices.shape()));
  }
  return std::nullopt;
}

}  // namespace

Check take_check(const Tensor& x, const Tensor& indices, Axis axis) {
  if (Check check = check_shapes(x.shape(), indices, axis)) return check;
  if (indices.backend() != x.backend()) {
    return wrong(Errc::kDevice, std::string("indices must be where x is (") + name_of(x.backend()) +
                                    "), got " + name_of(indices.backend()));
  }
  return std::nullopt;
}

Check take_backward_check(const Tensor& dy, const Tensor& indices, const Shape& x_shape,
                          Axis axis) {
  if (!element_count(x_shape)) {
    return wrong(Errc::kShape, "x_shape must be a shape, got " + to_string(x_shape));
  }
  if (Check check = check_shapes(x_shape, indices, axis)) return check;
  const Shape y = result_shape(x_shape, indices.shape(), axis);
  if (!(dy.shape() == y)) {
    return wrong(Errc::kShape,
                 "dy must have the shape of y " + to_string(y) + ", got " + to_string(dy.shape()));
  }
  const Split s = split_at(x_shape, axis);
  return sum_rows_check(Tensor::meta({s.outer, indices.size(), s.width}, dy.dtype(), dy.backend()),
                        Tensor::meta({indices.size()}, indices.dtype(), indices.backend()),
                        s.length);
}

Tensor take(CommandEncoder& encoder, const Tensor& x, const Tensor& indices, Axis axis) {
  require(take_check(x, indices, axis));
  Tensor y = encoder.empty(result_shape(x.shape(), indices.shape(), axis), x.dtype());
  if (y.size() == 0) return y;
  const Split s = split_at(x.shape(), axis);
  TakeArgs args{s.outer, indices.size(), s.width, s.length, s.length * s.width, s.width, 0};
  args.index_type = static_cast<std::int64_t>(indices.dtype());
  Tensor from = x;
  const std::int64_t a = axis ? *normal_axis(*axis, x.rank()) : 0;
  const auto before = stride_of(x, 0, a);
  const auto behind = axis ? stride_of(x, a + 1, x.rank()) : stride_of(x, 0, x.rank());
  if (axis && before && behind && *behind == 1) {
    args.outer_stride = *before;
    args.axis_stride = x.strides()[a];
  } else if (axis || !behind || *behind != 1) {
    from = encoder.contiguous(x);
  }
  const Tensor named = encoder.contiguous(indices);
  encoder.dispatch(kForward, unsigned_of_size(size_of(x.dtype())), args, {from, named}, {y});
  return y;
}

Tensor take_backward(CommandEncoder& encoder, const Tensor& dy, const Tensor& indices,
                     const Shape& x_shape, Axis axis) {
  require(take_backward_check(dy, indices, x_shape, axis));
  const Split s = split_at(x_shape, axis);
  const std::int64_t n = indices.size();
  if (s.width == 1 && s.length <= kFewScalars) {
    return take_along_axis_backward(encoder, encoder.contiguous(dy).reshape({s.outer, n}),
                                    encoder.contiguous(indices).reshape({1, n}),
                                    {s.outer, s.length}, 1)
        .reshape(x_shape);
  }
  const Tensor terms = encoder.contiguous(dy).reshape({s.outer, n, s.width});
  const Tensor rows = encoder.contiguous(indices).reshape({n});
  return sum_rows(encoder, terms, rows, s.length).reshape(x_shape);
}

// ---- several axes ----

namespace {

// The indexed axes of x first, in the order given, then the rest.
struct GatherPlan {
  std::vector<std::int64_t> order;  // axes of x
  Shape indices;                    // what they broadcast to
  std::int64_t places = 1;          // rows of x: the product of the indexed axes
  std::int64_t width = 1;
  bool cut = false;  // is there an axis that is not taken whole?
};

GatherPlan plan_of(const Shape& x, const std::vector<Shape>& indices,
                   const std::vector<std::int64_t>& axes, const Shape& slice_sizes) {
  GatherPlan p;
  for (const Shape& s : indices) p.indices = *broadcast_shapes(p.indices, s);
  for (const std::int64_t axis : axes) {
    p.order.push_back(*normal_axis(axis, x.rank()));
    p.places *= x[p.order.back()];
  }
  for (std::int64_t i = 0; i < x.rank(); ++i) {
    if (std::find(p.order.begin(), p.order.end(), i) != p.order.end()) continue;
    p.cut |= slice_sizes[i] != x[i];
    p.width *= slice_sizes[i];
    p.order.push_back(i);
  }
  return p;
}

std::vector<Shape> shapes_of(const std::vector<Tensor>& tensors) {
  std::vector<Shape> shapes;
  for (const Tensor& t : tensors) shapes.push_back(t.shape());
  return shapes;
}

Tensor permuted(const Tensor& x, const std::vector<std::int64_t>& order) {
  Shape shape;
  Strides strides;
  for (const std::int64_t i : order) {
    shape.push_back(x.dim(i));
    strides.push_back(x.strides()[i]);
  }
  return {x.buffer(), x.dtype(), shape, strides, x.offset()};
}

// x cut to the slices: whole along the indexed axes.
Tensor sliced(const Tensor& x, std::size_t indexed, const GatherPlan& p, const Shape& slice_sizes) {
  Tensor part = x;
  for (std::size_t k = indexed; k < p.order.size(); ++k) {
    part = part.slice(p.order[k], 0, slice_sizes[p.order[k]]);
  }
  return part;
}

// One i64 for every j.
Tensor places_of(CommandEncoder& encoder, const Shape& x, const std::vector<Tensor>& indices,
                 const GatherPlan& p) {
  TakePlacesArgs args{};
  args.count = *element_count(p.indices);
  args.axes = static_cast<std::int64_t>(indices.size());
  std::vector<Tensor> dense;
  for (std::size_t k = 0; k < indices.size(); ++k) {
    args.lengths[k] = x[p.order[k]];
    args.index_types[k] = static_cast<std::int64_t>(indices[k].dtype());
    dense.push_back(encoder.contiguous(indices[k].broadcast_to(p.indices)));
  }
  const Tensor places = encoder.empty({args.count}, DType::kI64);
  if (args.count == 0) return places;
  const std::vector<TensorRef> in(dense.begin(), dense.end());
  const TensorRef out[] = {places};
  encoder.dispatch(kPlaces, DType::kI64, args, in, out);
  return places;
}

// y [indices, slice sizes]; whole: indices of the first axes and all behind them, so y [indices, rest of x].
enum class Form : std::uint8_t { kSliced, kWhole };

Shape gathered_shape(const Shape& indices, const Shape& slice_sizes, std::size_t indexed,
                     Form form) {
  Shape y = indices;
  const auto first = form == Form::kWhole ? static_cast<std::int64_t>(indexed) : 0;
  for (std::int64_t i = first; i < slice_sizes.rank(); ++i) y.push_back(slice_sizes[i]);
  return y;
}

struct Gathered {
  Tensor y, places;
};
Gathered gather_with_places(CommandEncoder& encoder, const Tensor& x,
                            const std::vector<Tensor>& indices,
                            const std::vector<std::int64_t>& axes, const Shape& slice_sizes,
                            Form form) {
  const GatherPlan p = plan_of(x.shape(), shapes_of(indices), axes, slice_sizes);
  const Tensor places = places_of(encoder, x.shape(), indices, p);
  const Tensor rows =
      encoder.contiguous(permuted(sliced(x, indices.size(), p, slice_sizes), p.order))
          .reshape({p.places, p.width});
  const Shape shape = gathered_shape(p.indices, slice_sizes, indices.size(), form);
  return {take(encoder, rows, places, 0).reshape(shape), places};
}

Tensor gather_backward(CommandEncoder& encoder, const Tensor& dy, const Tensor& places,
                       const Shape& x_shape, const GatherPlan& p, const Shape& slice_sizes,
                       std::size_t indexed) {
  const Tensor terms = encoder.contiguous(dy).reshape({places.size(), p.width});
  Shape moved;  // of x cut and in the order of the plan
  for (std::size_t k = 0; k < p.order.size(); ++k) {
    moved.push_back(k < indexed ? x_shape[p.order[k]] : slice_sizes[p.order[k]]);
  }
  const Tensor rows = take_backward(encoder, terms, places, {p.places, p.width}, 0).reshape(moved);
  std::vector<std::int64_t> back(p.order.size());
  for (std::size_t k = 0; k < p.order.size(); ++k) {
    back[static_cast<std::size_t>(p.order[k])] = static_cast<std::int64_t>(k);
  }
  const Tensor part = permuted(rows, back);
  if (!p.cut) return encoder.contiguous(part);
  Tensor dx = encoder.zeros(x_shape, dy.dtype());
  encoder.copy(part, sliced(dx, indexed, p, slice_sizes));
  return dx;
}

std::vector<std::int64_t> first_axes(std::size_t n) {
  std::vector<std::int64_t> axes;
  for (std::size_t i = 0; i < n; ++i) axes.push_back(static_cast<std::int64_t>(i));
  return axes;
}

Shape whole_slices(const Shape& x, std::size_t indexed) {
  Shape sizes = x;
  for (std::int64_t i = 0; i < std::min(static_cast<std::int64_t>(indexed), x.rank()); ++i) {
    sizes[i] = 1;
  }
  return sizes;
}

Check check_gather(const Tensor& x, const std::vector<Tensor>& indices,
                   const std::vector<std::int64_t>& axes, const Shape& slice_sizes, Form form) {
  if (indices.empty() || indices.size() != axes.size()) {
    return wrong_gather(Errc::kArgument, "one axis for each of 1 or more indices, got " +
                                             std::to_string(indices.size()) + " and " +
                                             std::to_string(axes.size()) + " axes");
  }
  if (slice_sizes.rank() != x.rank()) {
    return wrong_gather(Errc::kShape, "a slice has a size along each axis of x " +
                                          to_string(x.shape()) + ", got " + to_string(slice_sizes));
  }
  unsigned seen = 0;
  Shape shape;
  for (std::size_t k = 0; k < axes.size(); ++k) {
    const auto axis = normal_axis(axes[k], x.rank());
    if (!axis || (seen >> static_cast<unsigned>(*axis) & 1U) != 0) {
      return wrong_gather(Errc::kArgument, "axes must be those of x " + to_string(x.shape()) +
                                               ", each once, got " + std::to_string(axes[k]));
    }
    seen |= 1U << static_cast<unsigned>(*axis);
    if (slice_sizes[*axis] != 1) {
      return wrong_gather(Errc::kShape, "a slice is 1 along an indexed axis, got " +
                                            to_string(slice_sizes) + " and axis " +
                                            std::to_string(*axis));
    }
    if (!is_integer(indices[k].dtype())) {
      return wrong_gather(Errc::kDType, std::string("indices must be integers, got ") +
                                            name_of(indices[k].dtype()));
    }
    if (indices[k].backend() != x.backend()) {
      return wrong_gather(Errc::kDevice, "indices must be where x is");
    }
    const auto both = broadcast_shapes(shape, indices[k].shape());
    if (!both) {
      return wrong_gather(Errc::kShape, "indices must broadcast against each other, got " +
                                            to_string(indices[k].shape()) + " after " +
                                            to_string(shape));
    }
    shape = *both;
  }
  for (std::int64_t i = 0; i < x.rank(); ++i) {
    if (slice_sizes[i] < 0 ||
        ((seen >> static_cast<unsigned>(i) & 1U) == 0 && slice_sizes[i] > x.dim(i))) {
      return wrong_gather(Errc::kShape, "a slice must lie in x " + to_string(x.shape()) + ", got " +
                                            to_string(slice_sizes));
    }
  }
  const std::int64_t dropped = form == Form::kWhole ? static_cast<std::int64_t>(indices.size()) : 0;
  if (shape.rank() + x.rank() - dropped > kMaxRank) {
    return wrong_gather(Errc::kShape, "the result has at most 8 axes, got indices " +
                                          to_string(shape) + " and x " + to_string(x.shape()));
  }
  const Shape y = gathered_shape(shape, slice_sizes, indices.size(), form);
  if (!element_count(y)) {
    return wrong_gather(Errc::kShape,
                        "the elements of the result must fit in 63 bits, got " + to_string(y));
  }
  return std::nullopt;
}

}  // namespace

Check gather_check(const Tensor& x, const std::vector<Tensor>& indices,
                   const std::vector<std::int64_t>& axes, const Shape& slice_sizes) {
  return check_gather(x, indices, axes, slice_sizes, Form::kSliced);
}

Check gather_check(const Tensor& x, const std::vector<Tensor>& indices) {
  return check_gather(x, indices, first_axes(indices.size()),
                      whole_slices(x.shape(), indices.size()), Form::kWhole);
}

Tensor gather(CommandEncoder& encoder, const Tensor& x, const std::vector<Tensor>& indices,
              const std::vector<std::int64_t>& axes, const Shape& slice_sizes) {
  require(gather_check(x, indices, axes, slice_sizes));
  return gather_with_places(encoder, x, indices, axes, slice_sizes, Form::kSliced).y;
}

Tensor gather(CommandEncoder& encoder, const Tensor& x, const std::vector<Tensor>& indices) {
  require(gather_check(x, indices));
  return gather_with_places(encoder, x, indices, first_axes(indices.size()),
                            whole_slices(x.shape(), indices.size()), Form::kWhole)
      .y;
}

// ---- on a tape ----

namespace {

struct TakeKept {
  Shape x_shape;
  bool has_axis;
  std::int64_t axis;
};

void take_pullback(Pullback& pullback) {
  const auto& kept = pullback.saved().args<TakeKept>();
  pullback.give(0, take_backward(pullback.encoder(), pullback.grad(), pullback.saved()[0],
                                 kept.x_shape, kept.has_axis ? Axis(kept.axis) : std::nullopt));
}

struct GatherKept {
  Shape x_shape, slice_sizes;
  std::int64_t indexed;
  std::int64_t axes[kMaxRank];
};

void gather_pullback(Pullback& pullback) {
  const auto& kept = pullback.saved().args<GatherKept>();
  const Tensor& places = pullback.saved()[0];
  const std::vector<std::int64_t> axes(kept.axes, kept.axes + kept.indexed);
  const GatherPlan p = plan_of(kept.x_shape, {places.shape()}, axes, kept.slice_sizes);
  pullback.give(0, gather_backward(pullback.encoder(), pullback.grad(), places, kept.x_shape, p,
                                   kept.slice_sizes, axes.size()));
}

Tensor gather_on(Tape& tape, const Tensor& x, const std::vector<Tensor>& indices,
                 const std::vector<std::int64_t>& axes, const Shape& slice_sizes, Form form) {
  auto [y, places] = gather_with_places(tape.encoder(), x, indices, axes, slice_sizes, form);
  if (tape.wants({x})) {
    GatherKept kept{x.shape(), slice_sizes, static_cast<std::int64_t>(axes.size()), {}};
    std::copy(axes.begin(), axes.end(), kept.axes);
    tape.record("gather", gather_pullback, {x}, {&y}, Saved({places}, kept));
  }
  return y;
}

}  // namespace

Tensor take(Tape& tape, const Tensor& x, const Tensor& indices, Axis axis) {
  Tensor y = take(tape.encoder(), x, indices, axis);
  if (tape.wants({x})) {
    tape.record("take", take_pullback, {x}, {&y},
                Saved({indices}, TakeKept{x.shape(), axis.has_value(), axis.value_or(0)}));
  }
  return y;
}

Tensor gather(Tape& tape, const Tensor& x, const std::vector<Tensor>& indices,
              const std::vector<std::int64_t>& axes, const Shape& slice_sizes) {
  require(gather_check(x, indices, axes, slice_sizes));
  return gather_on(tape, x, indices, axes, slice_sizes, Form::kSliced);
}

Tensor gather(Tape& tape, const Tensor& x, const std::vector<Tensor>& indices) {
  require(gather_check(x, indices));
  return gather_on(tape, x, indices, first_axes(indices.size()),
                   whole_slices(x.shape(), indices.size()), Form::kWhole);
}

}  // namespace mlxtape::ops
