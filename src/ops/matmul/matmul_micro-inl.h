// The innermost loop of the CPU's matmul: a tile of C that stays in registers, from panels of A and B
// that were copied to where every address is a constant away from a moving pointer.
#include "backends/cpu/device/steps-inl.h"

#include <utility>

// Per-target include guard: Highway flips the toggle for each target.
#if defined(MLXTAPE_MATMUL_MICRO_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef MLXTAPE_MATMUL_MICRO_INL_H_
#undef MLXTAPE_MATMUL_MICRO_INL_H_
#else
#define MLXTAPE_MATMUL_MICRO_INL_H_
#endif

HWY_BEFORE_NAMESPACE();
namespace mlxtape::ops::HWY_NAMESPACE {
namespace {

// A tile has kTileRows rows of two vectors. 14·2 sums, two vectors of B and one number of A take 31 of
// the 32 registers of AVX-512; 6·2 take 15 of 16 elsewhere.
#if HWY_TARGET == HWY_AVX3
constexpr std::int64_t kTileRows = 14;
#else
constexpr std::int64_t kTileRows = 6;
#endif
constexpr std::int64_t kLanes = hn::MaxLanes(DF());
constexpr std::int64_t kTileCols = 2 * kLanes;

// A panel holds steps (backends/cpu/device/steps-inl.h), and everything below counts them.
// Of the steps as many as one panel of B [kDepth, kTileCols] in the first-level cache allows, 32 KiB of 48.
constexpr std::int64_t kDepth = 256;

// A panel of A holds kTileRows rows. As rows: [row][kDepth + 16], where the 16 keep the rows out of each
// other's cache sets; as columns: [k][kTileRows].
enum class PanelA { kRows, kColumns };
constexpr std::int64_t kRowPitch = kDepth + 16;
constexpr std::int64_t kPanelA = kTileRows * kRowPitch;  // floats; enough for columns, too
constexpr std::int64_t kPanelB = kDepth * kTileCols;

// c [kRows, kTileCols] (+)= A panel · B panel over depth steps. c: rows pitch apart.
template <int kRows, PanelA kForm, ProductStep kStep>
HWY_NOINLINE void micro(const float* HWY_RESTRICT a, const float* HWY_RESTRICT b,
                        std::int64_t depth, float* HWY_RESTRICT c, std::int64_t pitch, bool add) {
  constexpr std::int64_t kRow = kForm == PanelA::kRows ? kRowPitch : 1;
  constexpr std::int64_t kNext = kForm == PanelA::kRows ? 1 : kTileRows;
  const DF d;
  VF sum[kRows][2];
  if (add) {
#pragma GCC unroll 14
    for (int r = 0; r < kRows; ++r) {
      sum[r][0] = hn::LoadU(d, c + r * pitch);
      sum[r][1] = hn::LoadU(d, c + r * pitch + kLanes);
    }
  } else {
#pragma GCC unroll 14
    for (int r = 0; r < kRows; ++r) sum[r][0] = sum[r][1] = hn::Zero(d);
  }
#pragma GCC unroll 4
  for (std::int64_t k = 0; k < depth; ++k) {
    const VF b0 = hn::Load(d, b);
    const VF b1 = hn::Load(d, b + kLanes);
#pragma GCC unroll 14
    for (int r = 0; r < kRows; ++r) {
      const VF v = hn::Set(d, a[r * kRow]);
      sum[r][0] = add_product<kStep>(v, b0, sum[r][0]);
      sum[r][1] = add_product<kStep>(v, b1, sum[r][1]);
    }
    a += kNext;
    b += kTileCols;
  }
#pragma GCC unroll 14
  for (int r = 0; r < kRows; ++r) {
    hn::StoreU(sum[r][0], d, c + r * pitch);
    hn::StoreU(sum[r][1], d, c + r * pitch + kLanes);
  }
}

}  // namespace
}  // namespace mlxtape::ops::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
