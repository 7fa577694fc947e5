// Weights as products with a block of columns read them: rows of k numbers, of which a part at a time is made ready to be
// the first factor of a product. Where they come from is said by a source:
//   lines   a part as f32, zeros up to whole units
//   pairs   the same as pairs of bf16, where kStep of the product is ProductStep::kPair
//   lies    whether a part can be used where it is: then factor says how
//   prepare, few   for most_few rows of x or fewer, as prepare puts them: nothing is turned, weights are read once and as
//                  they lie
#include "backends/cpu/device/dots-inl.h"
#include "backends/cpu/device/products-inl.h"

#include <algorithm>
#include <type_traits>

// Per-target include guard: Highway flips the toggle for each target.
#if defined(MLXTAPE_CPU_WEIGHTS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef MLXTAPE_CPU_WEIGHTS_INL_H_
#undef MLXTAPE_CPU_WEIGHTS_INL_H_
#else
#define MLXTAPE_CPU_WEIGHTS_INL_H_
#endif

HWY_BEFORE_NAMESPACE();
namespace mlxtape::ops::HWY_NAMESPACE {
namespace {

constexpr std::int64_t kStrip = 64;   // rows of weights at a time
constexpr std::int64_t kDepth = 256;  // steps of a product at a time: of 32 columns 32 KiB
constexpr std::int64_t kPartRoom = std::max(kStrip * row_pitch(kDepth), kDepth* row_pitch(kStrip));

// Weights in memory.
template <class T>
struct PlainWeights {
  const T* at;
  std::int64_t k;

  void lines(std::int64_t row, std::int64_t col, std::int64_t count, std::int64_t length,
             float* out, std::int64_t pitch) const {
    for (std::int64_t i = 0; i < count; ++i) {
      load_row(at + (row + i) * k + col, length, out + i * pitch);
    }
  }
  void pairs(std::int64_t row, std::int64_t col, std::int64_t count, std::int64_t length,
             float* out, std::int64_t pitch) const {
    for (std::int64_t i = 0; i < count; ++i) {
      std::memcpy(out + i * pitch, at + (row + i) * k + col,
                  static_cast<std::size_t>(length) * sizeof(T));
    }
  }

  template <ProductStep kStep>
  static constexpr bool lies() {
    return std::is_same_v<T, float> || kStep == ProductStep::kPair;
  }
  template <ProductStep kStep>
  FactorOf<kStep> factor(std::int64_t row, std::int64_t col) const {
    if constexpr (kStep == ProductStep::kPair) {
      return {at + row * k + col, k};
    } else {
      return {at + row * k + col, k, 1};
    }
  }

  static std::int64_t most_few() { return 8; }
  std::int64_t few_pitch() const { return row_pitch(k); }
  std::int64_t few_room() const { return 0; }
  template <class X>
  void prepare(const X* x, float* out) const {
    if constexpr (std::is_same_v<X, float>) {
      std::copy_n(x, k, out);
    } else {
      load_row(x, k, out);
    }
  }
  // out [count, pitch]: rows of x, apart, times rows of weights.
  template <class X>
  void few(std::int64_t row, std::int64_t rows, const float* x, std::int64_t apart,
           std::int64_t count, float* /*room*/, float* out, std::int64_t pitch) const {
    dot_rows(x, apart, count, at + row * k, k, rows, k, out, pitch);
  }
};

// Their gradient: rows × length from (row, col) on.
template <class T>
struct PlainGradient {
  T* at;
  std::int64_t k;

  void put(std::int64_t row, std::int64_t col, std::int64_t rows, std::int64_t length,
           const float* dw, std::int64_t pitch) const {
    for (std::int64_t i = 0; i < rows; ++i) {
      store_row(dw + i * pitch, length, at + (row + i) * k + col);
    }
  }
};

// Rows × depth numbers from (row, col) on; zeros fill up the rows.
template <ProductStep kStep, class W>
HWY_INLINE FactorOf<kStep> rows_part(const W& w, std::int64_t row, std::int64_t col,
                                     std::int64_t rows, std::int64_t depth, float* room) {
  if constexpr (W::template lies<kStep>()) {
    if (rows % kUnit == 0) return w.template factor<kStep>(row, col);
  }
  const std::int64_t steps = depth / width_of(kStep), pitch = row_pitch(steps);
  for (std::int64_t i = rows; i < in_units(rows); ++i) {
    fill_row(0, in_units(steps), room + i * pitch);
  }
  if constexpr (kStep == ProductStep::kPair) {
    w.pairs(row, col, rows, depth, room, pitch);
    return {reinterpret_cast<const BF16*>(room), 2 * pitch};
  } else {
    w.lines(row, col, rows, depth, room, pitch);
    return {room, pitch, 1};
  }
}

// out [rows, out_pitch] = w [rows, K]·columns [K in steps, pitch], rows ≤ kStrip, from a row on; n columns, whole units.
template <ProductStep kStep, class W>
HWY_INLINE void rows_product(const W& w, std::int64_t row, std::int64_t rows, const float* columns,
                             std::int64_t pitch, std::int64_t n, float* room, float* out,
                             std::int64_t out_pitch) {
  constexpr std::int64_t kWidth = width_of(kStep);
  for (std::int64_t l = 0; l < w.k; l += kWidth * kDepth) {
    const std::int64_t some = std::min(kWidth * kDepth, w.k - l);
    const FactorOf<kStep> part = rows_part<kStep>(w, row, l, rows, some, room);
    product<kStep>(l > 0, part, columns + l / kWidth * pitch, pitch, out, out_pitch, in_units(rows),
                   n, some / kWidth);
  }
}

// The same with columns [col, col + cols) of w in the place of rows, summed over `depth` rows from `row` on: out (+)= ….
template <class W>
HWY_INLINE void columns_product(bool add, const W& w, std::int64_t row, std::int64_t depth,
                                std::int64_t col, std::int64_t cols, const float* columns,
                                std::int64_t pitch, std::int64_t n, float* room, float* out,
                                std::int64_t out_pitch) {
  const std::int64_t apart = row_pitch(cols);
  for (std::int64_t l = 0; l < depth; l += kDepth) {
    const std::int64_t some = std::min(kDepth, depth - l);
    w.lines(row + l, col, some, cols, room, apart);
    product(add || l > 0, {room, 1, apart}, columns + l * pitch, pitch, out, out_pitch,
            in_units(cols), n, some);
  }
}

}  // namespace
}  // namespace mlxtape::ops::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
