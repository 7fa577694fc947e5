// What the ops of layout and their gradients share: views, and how axes are cut.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "mlxtape/ops/layout.h"

namespace mlxtape::ops::layout {

inline Tensor view(const Tensor& x, const Shape& shape, const Strides& strides,
                   std::int64_t offset) {
  if (!x.has_memory()) return Tensor::meta(shape, x.dtype(), x.backend());
  return {x.buffer(), x.dtype(), shape, strides, offset};
}

// A slice as counted from the front: where it starts, how many there are.
struct Cut {
  std::int64_t start, count, step;
};
inline Cut cut(const SliceAxis& axis, std::int64_t n) {
  const bool up = axis.step > 0;
  const std::int64_t low = up ? 0 : -1;  // the least and greatest that a start or stop can mean
  const std::int64_t high = up ? n : n - 1;
  const auto place = [&](std::int64_t at, std::int64_t none) {
    if (at == SliceAxis::kEnd) return none;
    return std::clamp(at < 0 ? at + n : at, low, high);
  };
  const std::int64_t start = place(axis.start, up ? 0 : n - 1);
  const std::int64_t stop = place(axis.stop, up ? n : -1);
  const std::int64_t span = up ? stop - start : start - stop;
  const std::int64_t step = up ? axis.step : -axis.step;
  return {start, span <= 0 ? 0 : (span - 1) / step + 1, axis.step};
}

// shape as [before axis, axis, behind it].
inline Shape around(const Shape& shape, std::int64_t axis) {
  Shape three{1, shape[axis], 1};
  for (std::int64_t i = 0; i < shape.rank(); ++i) {
    if (i != axis) three[i < axis ? 0 : 2] *= shape[i];
  }
  return three;
}

inline Tensor part(const Tensor& x, std::int64_t axis, std::int64_t start, std::int64_t count) {
  return x.slice(axis, start, start + count).detach();
}

inline std::vector<std::int64_t> equal_parts(const Tensor& x, std::int64_t n, std::int64_t axis) {
  require(split_check(x, n, axis));
  const std::int64_t each = x.dim(*normal_axis(axis, x.rank())) / n;
  std::vector<std::int64_t> at;
  for (std::int64_t i = 1; i < n; ++i) at.push_back(i * each);
  return at;
}

// Where x lies in what it was padded to.
inline Tensor middle(const Tensor& y, const Shape& x_shape, const std::vector<PadAxis>& axes) {
  Tensor t = y;
  for (std::size_t i = 0; i < axes.size(); ++i) {
    const auto a = static_cast<std::int64_t>(i);
    t = part(t, a, axes[i].before, x_shape[a]);
  }
  return t;
}

}  // namespace mlxtape::ops::layout
