// Products of small matrices of f32 that lie in the cache as they are: nothing is copied, and sizes are
// multiples of kUnit, for which the caller fills up with zeros.
#include "backends/cpu/device/rows-inl.h"

// Per-target include guard: Highway flips the toggle for each target.
#if defined(MLXTAPE_CPU_PRODUCTS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef MLXTAPE_CPU_PRODUCTS_INL_H_
#undef MLXTAPE_CPU_PRODUCTS_INL_H_
#else
#define MLXTAPE_CPU_PRODUCTS_INL_H_
#endif

HWY_BEFORE_NAMESPACE();
namespace mlxtape::ops::HWY_NAMESPACE {
namespace {

// Element (i, l) is at[i·row + l·col]: a matrix or its transpose.
struct Factor {
  const float* at;
  std::int64_t row, col;
};

// kRows rows of kVecs vectors of c. 8·2 sums, 2 vectors of b and a number of a leave AVX-512 room to
// load ahead; 4·2 fill 16 registers.
#if HWY_TARGET == HWY_AVX3
constexpr int kProductRows = 8;
#else
constexpr int kProductRows = 4;
#endif

template <int kVecs>
HWY_INLINE void product_tile(bool add, Factor a, const float* HWY_RESTRICT b, std::int64_t b_pitch,
                             float* HWY_RESTRICT c, std::int64_t c_pitch, std::int64_t depth) {
  const DF d;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(d));
  VF sum[kProductRows][kVecs];
#pragma GCC unroll 8
  for (int r = 0; r < kProductRows; ++r) {
#pragma GCC unroll 2
    for (int v = 0; v < kVecs; ++v) {
      sum[r][v] = add ? hn::LoadU(d, c + r * c_pitch + v * lanes) : hn::Zero(d);
    }
  }
  for (std::int64_t l = 0; l < depth; ++l) {
    VF vb[kVecs];
#pragma GCC unroll 2
    for (int v = 0; v < kVecs; ++v) vb[v] = hn::LoadU(d, b + l * b_pitch + v * lanes);
#pragma GCC unroll 8
    for (int r = 0; r < kProductRows; ++r) {
      const VF va = hn::Set(d, a.at[r * a.row + l * a.col]);
#pragma GCC unroll 2
      for (int v = 0; v < kVecs; ++v) sum[r][v] = hn::MulAdd(va, vb[v], sum[r][v]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < kProductRows; ++r) {
#pragma GCC unroll 2
    for (int v = 0; v < kVecs; ++v) hn::StoreU(sum[r][v], d, c + r * c_pitch + v * lanes);
  }
}

// c [m, n] = (or +=) a [m, depth] · b [depth, n]; m is a multiple of kProductRows, n of kUnit.
HWY_NOINLINE void product(bool add, Factor a, const float* b, std::int64_t b_pitch, float* c,
                          std::int64_t c_pitch, std::int64_t m, std::int64_t n,
                          std::int64_t depth) {
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(DF()));
  for (std::int64_t col = 0; col < n;) {
    const bool two = col + 2 * lanes <= n;
    for (std::int64_t row = 0; row < m; row += kProductRows) {
      const Factor part{a.at + row * a.row, a.row, a.col};
      float* out = c + row * c_pitch + col;
      two ? product_tile<2>(add, part, b + col, b_pitch, out, c_pitch, depth)
          : product_tile<1>(add, part, b + col, b_pitch, out, c_pitch, depth);
    }
    col += two ? 2 * lanes : lanes;
  }
}

}  // namespace
}  // namespace mlxtape::ops::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
