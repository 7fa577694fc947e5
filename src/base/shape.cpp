#include "mlxtape/base/shape.h"

#include "mlxtape/base/checked.h"

namespace mlxtape {

std::string to_string(const Dims& dims) {
  std::string text = "[";
  for (std::int64_t i = 0; i < dims.rank(); ++i) {
    if (i != 0) text += ", ";
    text += std::to_string(dims[i]);
  }
  return text + "]";
}

std::optional<std::int64_t> element_count(const Shape& shape) {
  // A zero anywhere makes the product 0, even where the other factors alone would overflow.
  if (std::any_of(shape.begin(), shape.end(), [](std::int64_t d) { return d < 0; })) {
    return std::nullopt;
  }
  if (std::any_of(shape.begin(), shape.end(), [](std::int64_t d) { return d == 0; })) return 0;
  std::int64_t count = 1;
  for (const std::int64_t d : shape) {
    const auto product = checked_mul(count, d);
    if (!product) return std::nullopt;
    count = *product;
  }
  return count;
}

Strides contiguous_strides(const Shape& shape) {
  Strides strides = shape;
  std::uint64_t step = 1;  // unsigned: beside a dimension of 0 the others may be any size
  for (std::int64_t i = shape.rank() - 1; i >= 0; --i) {
    strides[i] = static_cast<std::int64_t>(step);
    step *= static_cast<std::uint64_t>(std::max<std::int64_t>(shape[i], 1));
  }
  return strides;
}

std::optional<std::int64_t> normal_axis(std::int64_t axis, std::int64_t rank) {
  if (axis < -rank || axis >= rank) return std::nullopt;
  return axis < 0 ? axis + rank : axis;
}

std::optional<Shape> broadcast_shapes(const Shape& a, const Shape& b) {
  const std::int64_t rank = std::max(a.rank(), b.rank());
  Shape result;
  for (std::int64_t i = 0; i < rank; ++i) {
    const std::int64_t in_a = i - (rank - a.rank());
    const std::int64_t in_b = i - (rank - b.rank());
    const std::int64_t da = in_a < 0 ? 1 : a[in_a];
    const std::int64_t db = in_b < 0 ? 1 : b[in_b];
    if (da != db && da != 1 && db != 1) return std::nullopt;
    result.push_back(da == 1 ? db : da);
  }
  return result;
}

}  // namespace mlxtape
