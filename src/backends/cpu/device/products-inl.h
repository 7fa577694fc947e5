// Products of small matrices that lie in the cache as they are, of f32 or by pairs of bf16 (steps-inl.h): nothing is
// copied, and sizes are multiples of kUnit, for which the caller fills up with zeros.
#include "backends/cpu/device/rows-inl.h"
#include "backends/cpu/device/steps-inl.h"

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

  Factor from(std::int64_t r) const { return {at + r * row, row, col}; }
  HWY_INLINE VF step(DF d, std::int64_t r, std::int64_t l) const {
    return hn::Set(d, at[r * row + l * col]);
  }
};
// Rows of bf16, of which step l is the pair at[i·row + 2·l]: as weights lie in memory, on whatever address.
struct PairFactor {
  const BF16* at;
  std::int64_t row;

  PairFactor from(std::int64_t r) const { return {at + r * row, row}; }
  HWY_INLINE VF step(DF d, std::int64_t r, std::int64_t l) const {
    float pair;
    std::memcpy(&pair, at + r * row + 2 * l, sizeof(pair));
    return hn::Set(d, pair);
  }
};
template <ProductStep kStep>
using FactorOf = std::conditional_t<kStep == ProductStep::kPair, PairFactor, Factor>;

// kRows rows of kVecs vectors of c. 8·2 sums, 2 vectors of b and a number of a leave AVX-512 room to
// load ahead; 4·2 fill 16 registers.
#if HWY_TARGET == HWY_AVX3
constexpr int kProductRows = 8;
#else
constexpr int kProductRows = 4;
#endif

template <ProductStep kStep, int kVecs>
HWY_INLINE void product_tile(bool add, FactorOf<kStep> a, const float* HWY_RESTRICT b,
                             std::int64_t b_pitch, float* HWY_RESTRICT c, std::int64_t c_pitch,
                             std::int64_t depth) {
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
      const VF va = a.step(d, r, l);
#pragma GCC unroll 2
      for (int v = 0; v < kVecs; ++v) sum[r][v] = add_product<kStep>(va, vb[v], sum[r][v]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < kProductRows; ++r) {
#pragma GCC unroll 2
    for (int v = 0; v < kVecs; ++v) hn::StoreU(sum[r][v], d, c + r * c_pitch + v * lanes);
  }
}

// c [m, n] = (or +=) a [m, depth] · b [depth, n]; m is a multiple of kProductRows, n of kUnit; depth counts steps.
template <ProductStep kStep = ProductStep::kNumber>
HWY_NOINLINE void product(bool add, FactorOf<kStep> a, const float* b, std::int64_t b_pitch,
                          float* c, std::int64_t c_pitch, std::int64_t m, std::int64_t n,
                          std::int64_t depth) {
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(DF()));
  for (std::int64_t col = 0; col < n;) {
    const bool two = col + 2 * lanes <= n;
    for (std::int64_t row = 0; row < m; row += kProductRows) {
      const FactorOf<kStep> part = a.from(row);
      float* out = c + row * c_pitch + col;
      two ? product_tile<kStep, 2>(add, part, b + col, b_pitch, out, c_pitch, depth)
          : product_tile<kStep, 1>(add, part, b + col, b_pitch, out, c_pitch, depth);
    }
    col += two ? 2 * lanes : lanes;
  }
}

}  // namespace
}  // namespace mlxtape::ops::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
