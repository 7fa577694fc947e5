// Products of a few rows of f32 with many rows of memory of any float type, each read once and as it lies: bound by
// reading those.
#include "backends/cpu/device/simd-inl.h"

#include <algorithm>
#include <array>
#include <utility>

#include "backends/cpu/device/tasks.h"

// Per-target include guard: Highway flips the toggle for each target.
#if defined(MLXTAPE_CPU_DOTS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef MLXTAPE_CPU_DOTS_INL_H_
#undef MLXTAPE_CPU_DOTS_INL_H_
#else
#define MLXTAPE_CPU_DOTS_INL_H_
#endif

HWY_BEFORE_NAMESPACE();
namespace mlxtape::ops::HWY_NAMESPACE {
namespace {

// Rows at once: 14·2 sums and what they are made of take the 32 registers of AVX-512; 6·2 those of others.
#if HWY_TARGET == HWY_AVX3
constexpr std::int64_t kDotRows = 14;
#else
constexpr std::int64_t kDotRows = 6;
#endif

template <std::size_t... kIndex, class Make>
constexpr auto table_of(std::index_sequence<kIndex...>, Make make) {
  return std::array{make(std::integral_constant<int, kIndex + 1>())...};
}

// sums [kRows, kCols], pitch apart, of rows of k elements.
template <class T, int kRows, int kCols>
HWY_NOINLINE void dot_tile(const float* HWY_RESTRICT s, std::int64_t s_row, const T* HWY_RESTRICT l,
                           std::int64_t l_col, std::int64_t depth, float* sums,
                           std::int64_t pitch) {
  const DF d;
  constexpr std::int64_t kLanes = hn::MaxLanes(DF());
  VF sum[kRows][kCols];
#pragma GCC unroll 14
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int c = 0; c < kCols; ++c) sum[r][c] = hn::Zero(d);
  }
  const auto step = [&](const auto& get, std::int64_t k) HWY_ATTR {
    VF v[kCols];
#pragma GCC unroll 4
    for (int c = 0; c < kCols; ++c) {
      v[c] = get(l + c * l_col + k);
      // The next tile, in the order of memory: 34 GB/s on two cores, where four rows side by side have 24.
      hwy::Prefetch(l + kCols * l_col + k * kCols + c * kLanes);
    }
#pragma GCC unroll 14
    for (int r = 0; r < kRows; ++r) {
      const VF u = get(s + r * s_row + k);
#pragma GCC unroll 4
      for (int c = 0; c < kCols; ++c) sum[r][c] = hn::MulAdd(u, v[c], sum[r][c]);
    }
  };
  std::int64_t k = 0;
  for (; k + kLanes <= depth; k += kLanes) {
    step([&](const auto* p) HWY_ATTR { return load(d, p); }, k);
  }
  if (k < depth) {
    const auto count = static_cast<std::size_t>(depth - k);
    step([&](const auto* p) HWY_ATTR { return load_n(d, p, count); }, k);
  }
#pragma GCC unroll 14
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int c = 0; c < kCols; ++c) sums[r * pitch + c] = sum_lanes(d, sum[r][c]);
  }
}

// sums [rows, cols], pitch apart: few [rows, s_row] times cols rows of l, l_row apart, of depth elements.
template <class T>
void dot_rows(const float* few, std::int64_t s_row, std::int64_t rows, const T* l,
              std::int64_t l_row, std::int64_t cols, std::int64_t depth, float* sums,
              std::int64_t pitch) {
  // Four rows of l at once are four streams; where there are many of few, the registers allow three or two.
  static constexpr int kFour = kDotRows / 2, kThree = 2 * kDotRows / 3;
  static constexpr auto kByFour =
      table_of(std::make_index_sequence<kFour>(), [](auto n) { return dot_tile<T, n(), 4>; });
  static constexpr auto kByThree =
      table_of(std::make_index_sequence<kThree>(), [](auto n) { return dot_tile<T, n(), 3>; });
  static constexpr auto kByTwo =
      table_of(std::make_index_sequence<kDotRows>(), [](auto n) { return dot_tile<T, n(), 2>; });
  static constexpr auto kByOne =
      table_of(std::make_index_sequence<kDotRows>(), [](auto n) { return dot_tile<T, n(), 1>; });
  const std::int64_t groups = ceil_div(rows, kDotRows), each = ceil_div(rows, groups);
  for (std::int64_t c = 0; c < cols;) {
    const std::int64_t left = cols - c;
    const std::int64_t most = each <= kFour ? 4 : each <= kThree ? 3 : 2;
    const std::int64_t wide = std::min(most, left);
    for (std::int64_t r = 0; r < rows; r += each) {
      const auto index = static_cast<std::size_t>(std::min(each, rows - r) - 1);
      const auto dots = wide == 4   ? kByFour[index]
                        : wide == 3 ? kByThree[index]
                        : wide == 2 ? kByTwo[index]
                                    : kByOne[index];
      dots(few + r * s_row, s_row, l + c * l_row, l_row, depth, sums + r * pitch + c, pitch);
    }
    c += wide;
  }
}

}  // namespace
}  // namespace mlxtape::ops::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
