// Dims: up to 8 signed 64-bit numbers held in place, used for shapes and for strides.
// In place, because a tensor is made for every call and must not cost a heap allocation.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <initializer_list>
#include <optional>
#include <string>

#include "mlxtape/base/error.h"

namespace mlxtape {

inline constexpr std::int64_t kMaxRank = 8;

class Dims {
 public:
  Dims() = default;
  Dims(std::initializer_list<std::int64_t> values) : Dims(values.begin(), values.end()) {}
  template <class Iterator>
  Dims(Iterator first, Iterator last) {
    for (; first != last; ++first) push_back(*first);
  }

  std::int64_t rank() const { return rank_; }
  bool empty() const { return rank_ == 0; }
  std::int64_t operator[](std::int64_t i) const { return values_[static_cast<std::size_t>(i)]; }
  std::int64_t& operator[](std::int64_t i) { return values_[static_cast<std::size_t>(i)]; }
  const std::int64_t* begin() const { return values_.data(); }
  const std::int64_t* end() const { return values_.data() + rank_; }
  std::int64_t back() const { return values_[static_cast<std::size_t>(rank_ - 1)]; }

  void push_back(std::int64_t value) {
    if (rank_ == kMaxRank) throw Error(Errc::kShape, "shape: at most 8 dimensions, got 9 or more");
    values_[static_cast<std::size_t>(rank_++)] = value;
  }

  friend bool operator==(const Dims& a, const Dims& b) {
    return std::equal(a.begin(), a.end(), b.begin(), b.end());
  }

 private:
  std::array<std::int64_t, kMaxRank> values_{};
  std::int64_t rank_ = 0;
};

using Shape = Dims;
using Strides = Dims;  // in elements; may be 0 (broadcast) or negative

std::string to_string(const Dims& dims);  // "[4, 2]"

// Product of the dimensions (1 for rank 0), or nothing if one is negative or it overflows.
std::optional<std::int64_t> element_count(const Shape& shape);

// Row-major strides of a shape whose element count fits.
Strides contiguous_strides(const Shape& shape);

// axis in [-rank, rank) as [0, rank); nothing when it is outside.
std::optional<std::int64_t> normal_axis(std::int64_t axis, std::int64_t rank);

// The shape both broadcast to (right-aligned, 1 stretches), or nothing if they clash.
std::optional<Shape> broadcast_shapes(const Shape& a, const Shape& b);

}  // namespace mlxtape
