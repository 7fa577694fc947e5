// Rows of f32 in scratch memory, filled up with zeros to whole units, so that loops over them have no rest.
#include "backends/cpu/device/simd-inl.h"

#include <cstdint>

// Per-target include guard: Highway flips the toggle for each target.
#if defined(MLXTAPE_CPU_ROWS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef MLXTAPE_CPU_ROWS_INL_H_
#undef MLXTAPE_CPU_ROWS_INL_H_
#else
#define MLXTAPE_CPU_ROWS_INL_H_
#endif

HWY_BEFORE_NAMESPACE();
namespace mlxtape::ops::HWY_NAMESPACE {
namespace {

constexpr std::int64_t kUnit = 16;  // lanes of the widest vectors

// Rows of n floats, that far apart: an odd number of lines, so that rows are not in each other's sets.
constexpr std::int64_t row_pitch(std::int64_t n) { return ((n + kUnit - 1) / kUnit | 1) * kUnit; }
constexpr std::int64_t in_units(std::int64_t n) { return (n + kUnit - 1) / kUnit * kUnit; }

// Hands out pieces of one allocation.
struct Pieces {
  float* next;
  float* take(std::int64_t floats) {
    float* piece = next;
    next += in_units(floats);
    return piece;
  }
};

template <class Fn>
HWY_INLINE void each_vector(std::int64_t n, const Fn& fn) {
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(DF()));
  for (std::int64_t i = 0; i < n; i += lanes) fn(i);
}

// n elements of x as f32, then zeros up to a whole unit.
template <class T>
HWY_INLINE void load_row(const T* x, std::int64_t n, float* out) {
  const DF d;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(d));
  std::int64_t i = 0;
  for (; i + lanes <= n; i += lanes) hn::StoreU(load(d, x + i), d, out + i);
  for (; i < in_units(n); i += lanes) {
    hn::StoreU(i < n ? load_n(d, x + i, static_cast<std::size_t>(n - i)) : hn::Zero(d), d, out + i);
  }
}
template <class T>
HWY_INLINE void store_row(const float* x, std::int64_t n, T* out) {
  const DF d;
  for_row(
      d, static_cast<std::size_t>(n),
      [&](std::size_t i) HWY_ATTR { store(d, hn::LoadU(d, x + i), out + i); },
      [&](std::size_t i, std::size_t count)
          HWY_ATTR { store_n(d, hn::LoadU(d, x + i), out + i, count); });
}
HWY_INLINE void fill_row(float value, std::int64_t n, float* out) {
  const DF d;
  each_vector(n, [&](std::int64_t i) HWY_ATTR { hn::StoreU(hn::Set(d, value), d, out + i); });
}
HWY_INLINE float dot(const float* a, const float* b, std::int64_t n) {
  const DF d;
  VF sum = hn::Zero(d);
  each_vector(n, [&](std::int64_t i)
                     HWY_ATTR { sum = hn::MulAdd(hn::LoadU(d, a + i), hn::LoadU(d, b + i), sum); });
  return sum_lanes(d, sum);
}
// out = a∘b
HWY_INLINE void times(const float* a, const float* b, std::int64_t n, float* out) {
  const DF d;
  each_vector(n, [&](std::int64_t i) HWY_ATTR {
    hn::StoreU(hn::Mul(hn::LoadU(d, a + i), hn::LoadU(d, b + i)), d, out + i);
  });
}
HWY_INLINE void scale_row(float factor, std::int64_t n, float* row) {
  const DF d;
  each_vector(n, [&](std::int64_t i) HWY_ATTR {
    hn::StoreU(hn::Mul(hn::Set(d, factor), hn::LoadU(d, row + i)), d, row + i);
  });
}
// out += factor·a
HWY_INLINE void add_row(float factor, const float* a, std::int64_t n, float* out) {
  const DF d;
  each_vector(n, [&](std::int64_t i) HWY_ATTR {
    hn::StoreU(hn::MulAdd(hn::Set(d, factor), hn::LoadU(d, a + i), hn::LoadU(d, out + i)), d,
               out + i);
  });
}
// out += a∘b
HWY_INLINE void add_times(const float* a, const float* b, std::int64_t n, float* out) {
  const DF d;
  each_vector(n, [&](std::int64_t i) HWY_ATTR {
    hn::StoreU(hn::MulAdd(hn::LoadU(d, a + i), hn::LoadU(d, b + i), hn::LoadU(d, out + i)), d,
               out + i);
  });
}

}  // namespace
}  // namespace mlxtape::ops::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
