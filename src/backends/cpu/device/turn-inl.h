// Matrices of 4-byte elements turned around: four rows and a vector of each at a time, within blocks of 4 × 4.
#include "backends/cpu/device/simd-inl.h"

#include <cstdint>

// Per-target include guard: Highway flips the toggle for each target.
#if defined(MLXTAPE_CPU_TURN_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef MLXTAPE_CPU_TURN_INL_H_
#undef MLXTAPE_CPU_TURN_INL_H_
#else
#define MLXTAPE_CPU_TURN_INL_H_
#endif

HWY_BEFORE_NAMESPACE();
namespace mlxtape::ops::HWY_NAMESPACE {
namespace {

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

// Four vectors become columns: lane i of them the four elements from to + i·pitch on.
HWY_INLINE void turn_four(DF d, VF v0, VF v1, VF v2, VF v3, float* to, std::int64_t pitch) {
  const hn::Repartition<double, DF> pairs;
  const auto pair = [&](VF v) HWY_ATTR {
    return hn::BitCast(pairs, v);
  };
  const auto low01 = pair(hn::InterleaveLower(d, v0, v1));
  const auto low23 = pair(hn::InterleaveLower(d, v2, v3));
  const auto high01 = pair(hn::InterleaveUpper(d, v0, v1));
  const auto high23 = pair(hn::InterleaveUpper(d, v2, v3));
  const auto put = [&](auto v, std::int64_t i) HWY_ATTR {
    store_blocks(d, hn::BitCast(d, v), to + i * pitch, 4 * pitch);
  };
  put(hn::InterleaveLower(pairs, low01, low23), 0);
  put(hn::InterleaveUpper(pairs, low01, low23), 1);
  put(hn::InterleaveLower(pairs, high01, high23), 2);
  put(hn::InterleaveUpper(pairs, high01, high23), 3);
}

// to [cols, to_pitch] = from [rows, from_pitch], turned. rows: whole fours.
HWY_INLINE void turn(const float* from, std::int64_t from_pitch, std::int64_t rows,
                     std::int64_t cols, float* to, std::int64_t to_pitch) {
  const DF d;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(d));
  std::int64_t c = 0;
  for (; c + lanes <= cols; c += lanes) {
    for (std::int64_t r = 0; r < rows; r += 4) {
      const auto row = [&](std::int64_t i) HWY_ATTR {
        return hn::LoadU(d, from + (r + i) * from_pitch + c);
      };
      turn_four(d, row(0), row(1), row(2), row(3), to + c * to_pitch + r, to_pitch);
    }
  }
  for (; c < cols; ++c) {
    for (std::int64_t r = 0; r < rows; ++r) to[c * to_pitch + r] = from[r * from_pitch + c];
  }
}

}  // namespace
}  // namespace mlxtape::ops::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
