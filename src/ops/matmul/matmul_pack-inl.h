// Copies of parts of A and B, as f32, in the order in which the innermost loop of the CPU's matmul reads
// them (matmul_micro-inl.h).
#include "matmul_micro-inl.h"

// Per-target include guard: Highway flips the toggle for each target.
#if defined(MLXTAPE_MATMUL_PACK_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef MLXTAPE_MATMUL_PACK_INL_H_
#undef MLXTAPE_MATMUL_PACK_INL_H_
#else
#define MLXTAPE_MATMUL_PACK_INL_H_
#endif

HWY_BEFORE_NAMESPACE();
namespace mlxtape::ops::HWY_NAMESPACE {
namespace {

// A matrix where it lies; one of the strides is 1.
template <class T>
struct Matrix {
  const T* at;
  std::int64_t row, col;

  Matrix from(std::int64_t r, std::int64_t c) const { return {at + r * row + c * col, row, col}; }
  Matrix transposed() const { return {at, col, row}; }
};

// n elements in a row, and what is left of the last vector zeros: to has room for whole vectors.
template <class T>
HWY_INLINE void widen_row(const T* from, std::int64_t n, float* to) {
  const DF d;
  for_row(
      d, static_cast<std::size_t>(n),
      [&](std::size_t i) HWY_ATTR { hn::StoreU(load(d, from + i), d, to + i); },
      [&](std::size_t i, std::size_t count)
          HWY_ATTR { hn::StoreU(load_n(d, from + i, count), d, to + i); });
}

// Rows of memory that are far apart begin anew each time for the processor that looks ahead.
template <class T>
HWY_INLINE void fetch_row(const T* row, std::int64_t n) {
  constexpr auto kLine = static_cast<std::int64_t>(64 / sizeof(T));
  for (std::int64_t i = 0; i < n; i += kLine) __builtin_prefetch(row + i, 0, 2);
}

// rows × depth of A as panels of kTileRows rows.
constexpr std::int64_t kRowsAhead = 4;
template <class T>
void pack_a_rows(const Matrix<T>& a, std::int64_t rows, std::int64_t depth, float* panels) {
  for (std::int64_t r = 0; r < rows; ++r) {
    if (r + kRowsAhead < rows) fetch_row(a.at + (r + kRowsAhead) * a.row, depth);
    widen_row(a.at + r * a.row, depth,
              panels + r / kTileRows * kPanelA + r % kTileRows * kRowPitch);
  }
}
template <class T>
void pack_a_columns(const Matrix<T>& a, std::int64_t rows, std::int64_t depth, float* panels) {
  const DF d;
  for (std::int64_t k = 0; k < depth; ++k) {
    const T* column = a.at + k * a.col;
    if (k + kRowsAhead < depth) fetch_row(column + kRowsAhead * a.col, rows);
    for (std::int64_t r = 0; r < rows; r += kTileRows) {
      float* to = panels + r / kTileRows * kPanelA + k * kTileRows;
      const T* from = column + r;
      // What a vector writes past its rows is where the next k comes.
      for (std::int64_t i = 0; i < kTileRows; i += kLanes) {
        if (r + i + kLanes <= rows) {
          hn::StoreU(load(d, from + i), d, to + i);
        } else if (r + i < rows) {
          hn::StoreU(load_n(d, from + i, static_cast<std::size_t>(rows - r - i)), d, to + i);
        }
      }
    }
  }
}

// depth × cols <= kTileCols of B as one panel, columns beyond cols as zeros.
template <class T>
void pack_b_rows(const Matrix<T>& b, std::int64_t depth, std::int64_t cols, float* panel) {
  const DF d;
  if (cols == kTileCols) {
    for (std::int64_t k = 0; k < depth; ++k) {
      const T* from = b.at + k * b.row;
      // The next panel's part of this row, 128 bytes further in f32, is needed when this one is used up.
      __builtin_prefetch(from + kTileCols, 0, 2);
      if constexpr (sizeof(T) == 4) __builtin_prefetch(from + kTileCols + kLanes, 0, 2);
      hn::Store(load(d, from), d, panel + k * kTileCols);
      hn::Store(load(d, from + kLanes), d, panel + k * kTileCols + kLanes);
    }
    return;
  }
  for (std::int64_t k = 0; k < depth; ++k) {
    const T* from = b.at + k * b.row;
    const auto part = [&](std::int64_t i) HWY_ATTR {
      const std::int64_t count = std::clamp<std::int64_t>(cols - i, 0, kLanes);
      return count == 0 ? hn::Zero(d) : load_n(d, from + i, static_cast<std::size_t>(count));
    };
    hn::Store(part(0), d, panel + k * kTileCols);
    hn::Store(part(kLanes), d, panel + k * kTileCols + kLanes);
  }
}

// Each block of four lanes to a place of its own, step apart.
template <class D, class V>
HWY_INLINE void store_blocks(D d, V v, float* to, std::int64_t step) {
  if constexpr (hn::MaxLanes(D()) <= 4) {
    hn::StoreU(v, d, to);
  } else {
    const hn::Half<D> half;
    store_blocks(half, hn::LowerHalf(half, v), to, step);
    store_blocks(half, hn::UpperHalf(half, v),
                 to + static_cast<std::int64_t>(hn::MaxLanes(half)) / 4 * step, step);
  }
}

// Columns lie in rows of memory: four of them and a vector of k at a time, turned within blocks of 4 × 4.
template <class T>
void pack_b_columns(const Matrix<T>& b, std::int64_t depth, std::int64_t cols, float* panel) {
  const DF d;
  const hn::Repartition<double, DF> pairs;
  const auto pair = [&](VF v) HWY_ATTR {
    return hn::BitCast(pairs, v);
  };
  for (std::int64_t j = 0; j < kTileCols; j += 4) {
    const T* from = b.at + j * b.col;
    for (std::int64_t i = j + 4; i < std::min(j + 8, cols); ++i) fetch_row(b.at + i * b.col, depth);
    const auto column = [&](std::int64_t i, std::int64_t k) HWY_ATTR {
      if (j + i >= cols) return hn::Zero(d);
      const T* at = from + i * b.col + k;
      return k + kLanes <= depth ? load(d, at) : load_n(d, at, static_cast<std::size_t>(depth - k));
    };
    for (std::int64_t k = 0; k < depth; k += kLanes) {  // kDepth is a multiple of kLanes
      const VF v0 = column(0, k), v1 = column(1, k), v2 = column(2, k), v3 = column(3, k);
      const auto low01 = pair(hn::InterleaveLower(d, v0, v1));
      const auto low23 = pair(hn::InterleaveLower(d, v2, v3));
      const auto high01 = pair(hn::InterleaveUpper(d, v0, v1));
      const auto high23 = pair(hn::InterleaveUpper(d, v2, v3));
      float* to = panel + k * kTileCols + j;
      const auto put = [&](auto v, std::int64_t i) HWY_ATTR {
        store_blocks(d, hn::BitCast(d, v), to + i * kTileCols, 4 * kTileCols);
      };
      put(hn::InterleaveLower(pairs, low01, low23), 0);
      put(hn::InterleaveUpper(pairs, low01, low23), 1);
      put(hn::InterleaveLower(pairs, high01, high23), 2);
      put(hn::InterleaveUpper(pairs, high01, high23), 3);
    }
  }
}

template <class T>
void pack_b(const Matrix<T>& b, std::int64_t depth, std::int64_t cols, float* panel) {
  b.col == 1 ? pack_b_rows(b, depth, cols, panel) : pack_b_columns(b, depth, cols, panel);
}

}  // namespace
}  // namespace mlxtape::ops::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
