// Copies of parts of A and B, as f32 or pairs of bf16, in the order in which the innermost loop of the CPU's matmul reads
// them (matmul_micro-inl.h). depth counts k; the last pair of an odd one is filled up with 0.
#include "backends/cpu/device/turn-inl.h"
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

// A vector of steps from a row of memory that has count numbers left: neighbours are along k.
template <ProductStep kStep, class T>
HWY_INLINE VF steps_along(DF d, const T* from, std::int64_t count) {
  if constexpr (kStep == ProductStep::kPair) {
    const hn::Repartition<std::uint16_t, DF> halves;
    const auto* at = reinterpret_cast<const std::uint16_t*>(from);
    return hn::BitCast(
        d, count >= 2 * kLanes
               ? hn::LoadU(halves, at)
               : hn::MaskedLoad(hn::FirstN(halves, static_cast<std::size_t>(count)), halves, at));
  } else {
    return count >= kLanes ? load(d, from) : load_n(d, from, static_cast<std::size_t>(count));
  }
}
// The same where neighbours are across k, and the next k lies `next` further; 0: there is none.
template <ProductStep kStep, class T>
HWY_INLINE VF steps_across(DF d, const T* from, std::int64_t next, std::int64_t count) {
  const auto get = [&](const T* at) HWY_ATTR {
    return count >= kLanes ? load(d, at) : load_n(d, at, static_cast<std::size_t>(count));
  };
  const VF first = get(from);
  if constexpr (kStep == ProductStep::kNumber) {
    return first;
  } else {  // bf16 as f32 is its upper half
    const auto low = hn::ShiftRight<16>(hn::BitCast(DU(), first));
    return hn::BitCast(d, next == 0 ? low : hn::Or(low, hn::BitCast(DU(), get(from + next))));
  }
}

// rows × depth of A as panels of kTileRows rows.
constexpr std::int64_t kRowsAhead = 4;
template <ProductStep kStep, class T>
void pack_a_rows(const Matrix<T>& a, std::int64_t rows, std::int64_t depth, float* panels) {
  const DF d;
  for (std::int64_t r = 0; r < rows; ++r) {
    if (r + kRowsAhead < rows) fetch_row(a.at + (r + kRowsAhead) * a.row, depth);
    const T* from = a.at + r * a.row;
    float* to = panels + r / kTileRows * kPanelA + r % kTileRows * kRowPitch;
    for (std::int64_t k = 0; k < depth; k += kLanes * width_of(kStep), to += kLanes) {
      hn::StoreU(steps_along<kStep>(d, from + k, depth - k), d, to);
    }
  }
}
template <ProductStep kStep, class T>
void pack_a_columns(const Matrix<T>& a, std::int64_t rows, std::int64_t depth, float* panels) {
  constexpr std::int64_t kWidth = width_of(kStep);
  const DF d;
  for (std::int64_t k = 0; k < depth; k += kWidth) {
    const T* column = a.at + k * a.col;
    for (std::int64_t i = k + kRowsAhead; i < std::min(k + kRowsAhead + kWidth, depth); ++i) {
      fetch_row(a.at + i * a.col, rows);
    }
    for (std::int64_t r = 0; r < rows; r += kTileRows) {
      float* to = panels + r / kTileRows * kPanelA + k / kWidth * kTileRows;
      // What a vector writes past its rows is where the next k comes.
      for (std::int64_t i = 0; i < std::min(kTileRows, rows - r); i += kLanes) {
        hn::StoreU(steps_across<kStep>(d, column + r + i, k + 1 < depth ? a.col : 0, rows - r - i),
                   d, to + i);
      }
    }
  }
}

// depth × cols <= kTileCols of B as one panel, columns beyond cols as zeros.
template <ProductStep kStep, class T>
void pack_b_rows(const Matrix<T>& b, std::int64_t depth, std::int64_t cols, float* panel) {
  const DF d;
  for (std::int64_t k = 0; k < depth; k += width_of(kStep), panel += kTileCols) {
    const T* from = b.at + k * b.row;
    for (std::int64_t i = k; i < std::min(k + width_of(kStep), depth); ++i) {
      // The next panel's part of this row, 128 bytes further in f32, is needed when this one is used up.
      const T* next = b.at + i * b.row + kTileCols;
      __builtin_prefetch(next, 0, 2);
      if constexpr (sizeof(T) == 4) __builtin_prefetch(next + kLanes, 0, 2);
    }
    for (std::int64_t i = 0; i < kTileCols; i += kLanes) {
      const VF v = i >= cols
                       ? hn::Zero(d)
                       : steps_across<kStep>(d, from + i, k + 1 < depth ? b.row : 0, cols - i);
      hn::Store(v, d, panel + i);
    }
  }
}

// Columns lie in rows of memory: four of them and a vector of k at a time.
// left: columns from here on; those of the next panel are fetched, and needed when this one is used up.
template <ProductStep kStep, class T>
void pack_b_columns(const Matrix<T>& b, std::int64_t depth, std::int64_t left, float* panel) {
  const std::int64_t cols = std::min(kTileCols, left);
  const DF d;
  for (std::int64_t j = 0; j < kTileCols; j += 4) {
    const T* from = b.at + j * b.col;
    for (std::int64_t i = j + kTileCols; i < std::min(j + kTileCols + 4, left); ++i) {
      fetch_row(b.at + i * b.col, depth);
    }
    const auto column = [&](std::int64_t i, std::int64_t k) HWY_ATTR {
      if (j + i >= cols) return hn::Zero(d);
      return steps_along<kStep>(d, from + i * b.col + k, depth - k);
    };
    float* to = panel + j;
    // kDepth is a multiple of kLanes
    for (std::int64_t k = 0; k < depth; k += kLanes * width_of(kStep), to += kLanes * kTileCols) {
      turn_four(d, column(0, k), column(1, k), column(2, k), column(3, k), to, kTileCols);
    }
  }
}

template <ProductStep kStep, class T>
void pack_a(const Matrix<T>& a, std::int64_t rows, std::int64_t depth, float* panels) {
  a.col == 1 ? pack_a_rows<kStep>(a, rows, depth, panels)
             : pack_a_columns<kStep>(a, rows, depth, panels);
}
template <ProductStep kStep, class T>
void pack_b(const Matrix<T>& b, std::int64_t depth, std::int64_t left, float* panel) {
  b.col == 1 ? pack_b_rows<kStep>(b, depth, std::min(kTileCols, left), panel)
             : pack_b_columns<kStep>(b, depth, left, panel);
}

}  // namespace
}  // namespace mlxtape::ops::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
