// The passes of the CPU kernels of sample over a part of a row, x: logits as stored, or z in f32.
#include <bit>

#include "backends/cpu/device/simd-inl.h"
#include "sample_rows.h"

#if defined(MLXTAPE_SAMPLE_PASSES_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef MLXTAPE_SAMPLE_PASSES_INL_H_
#undef MLXTAPE_SAMPLE_PASSES_INL_H_
#else
#define MLXTAPE_SAMPLE_PASSES_INL_H_
#endif

HWY_BEFORE_NAMESPACE();
namespace mlxtape::ops::HWY_NAMESPACE {

using VI = hn::Vec<DI>;
using VU = hn::Vec<DU>;

HWY_INLINE VF without_nan(DF d, VF v) {
  return hn::IfThenElse(hn::IsNaN(v), hn::Set(d, -INFINITY), v);
}
template <class T>
HWY_INLINE VF counted_logits(DF d, const T* x) {
  return without_nan(d, load(d, x));
}
// What is past the n is −inf.
template <class T>
HWY_INLINE VF counted_logits(DF d, const T* x, std::size_t n) {
  return hn::IfThenElse(hn::FirstN(d, n), without_nan(d, load_n(d, x, n)), hn::Set(d, -INFINITY));
}

// Calls each(logits, i, count) for every vector of n elements.
template <class T, class Each>
HWY_INLINE void for_logits(const T* x, std::int64_t n, const Each& each) {
  const DF d;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(d));
  std::int64_t i = 0;
  for (; i + lanes <= n; i += lanes) each(counted_logits(d, x + i), i, lanes);
  if (i < n) each(counted_logits(d, x + i, static_cast<std::size_t>(n - i)), i, n - i);
}

// ---- weights ----

// power() of formulas.h.
HWY_INLINE VF power_of(DF d, VF t) {
  using namespace sampling;
  const DU du;
  const VF least = hn::Set(d, kLeast), magic = hn::Set(d, kMagic);
  t = largest(least, t);
  const VF shifted = hn::Add(t, magic);
  const VF f = hn::Sub(t, hn::Sub(shifted, magic));
  VF p = hn::Add(hn::Mul(hn::Set(d, kC5), f), hn::Set(d, kC4));
  p = hn::Add(hn::Mul(p, f), hn::Set(d, kC3));
  p = hn::Add(hn::Mul(p, f), hn::Set(d, kC2));
  p = hn::Add(hn::Mul(p, f), hn::Set(d, kC1));
  p = hn::Add(hn::Mul(p, f), hn::Set(d, 1.0F));
  return hn::BitCast(d, hn::Add(hn::BitCast(du, p), hn::ShiftLeft<23>(hn::BitCast(du, shifted))));
}

// w = high·2²⁰ + low: both fit 32 bits, and so do their sums over a part.
struct Weights {
  VI high, low;
};
HWY_INLINE Weights weights_of(DF d, VF distance, VF slope) {
  const DI di;
  const VF half = hn::Set(d, 0x1p+20F);
  const VF e = hn::Mul(power_of(d, hn::Mul(distance, slope)), half);
  const VI high = hn::ConvertTo(di, e);
  const VF rest = hn::Mul(hn::Sub(e, hn::ConvertTo(d, high)), half);
  return {high, hn::ConvertTo(di, rest)};
}
HWY_INLINE std::uint64_t whole_of(std::int32_t high, std::int32_t low) {
  return (static_cast<std::uint64_t>(static_cast<std::uint32_t>(high)) << 20U) +
         static_cast<std::uint32_t>(low);
}
HWY_INLINE std::uint64_t sum_of(VI lanes_of) {
  const DI di;
  HWY_ALIGN std::int32_t lane[hn::MaxLanes(DI())];
  hn::Store(lanes_of, di, lane);
  std::uint64_t all = 0;
  for (std::size_t i = 0; i < hn::Lanes(di); ++i) all += static_cast<std::uint32_t>(lane[i]);
  return all;
}

// ---- passes ----

template <class T>
float largest_logit(const T* x, std::int64_t n) {
  const DF d;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(d));
  VF a = hn::Set(d, -INFINITY), b = a;
  std::int64_t i = 0;
  for (; i + 2 * lanes <= n; i += 2 * lanes) {
    a = largest(a, counted_logits(d, x + i));
    b = largest(b, counted_logits(d, x + i + lanes));
  }
  for (; i < n; i += lanes) {
    const std::int64_t count = std::min(lanes, n - i);
    a = largest(a, counted_logits(d, x + i, static_cast<std::size_t>(count)));
  }
  return hn::GetLane(hn::MaxOfLanes(d, largest(a, b)));
}

template <class T>
void copy_logits(const T* x, std::int64_t n, float* z) {
  const DF d;
  for_logits(x, n, [&](VF v, std::int64_t i, std::int64_t count) HWY_ATTR {
    store_n(d, v, z + i, static_cast<std::size_t>(count));
  });
}

// Where the first of those equal to `most` is; n where there is none.
template <class T>
std::int64_t first_equal(const T* x, std::int64_t n, float most) {
  const DF d;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(d));
  const VF wanted = hn::Set(d, most);
  std::int64_t i = 0;
  for (; i < n; i += lanes) {
    const auto count = static_cast<std::size_t>(std::min(lanes, n - i));
    const VF v = count == static_cast<std::size_t>(lanes) ? counted_logits(d, x + i)
                                                          : counted_logits(d, x + i, count);
    const auto at = hn::FindFirstTrue(d, hn::Eq(v, wanted));
    if (at >= 0) return i + at;
  }
  return n;
}

// Σ w over the places up to `last`; token: of x[0].
template <class T>
std::uint64_t mass_up_to(const T* x, std::int64_t n, std::int64_t token, float most, float slope,
                         std::uint64_t last) {
  const DF d;
  const DI di;
  const VF vmost = hn::Set(d, most), vslope = hn::Set(d, slope);
  // Bits of d are signed here, and tokens below 2²⁴: what is past them all is cut.
  const auto cut = [](std::uint64_t half) {
    return static_cast<std::int32_t>(std::min<std::uint64_t>(half, 0x7fffffffU));
  };
  const VI vkey = hn::Set(di, cut(last >> 32U)), vtoken = hn::Set(di, cut(last & 0xffffffffU));
  VI high = hn::Zero(di), low = high;
  for_logits(x, n, [&](VF v, std::int64_t i, std::int64_t) HWY_ATTR {
    const VF distance = hn::Sub(vmost, v);
    const VI bits = hn::BitCast(di, distance);
    const VI tokens = hn::Iota(di, static_cast<std::int32_t>(token + i));
    const auto beyond =
        hn::Or(hn::Gt(bits, vkey), hn::And(hn::Eq(bits, vkey), hn::Gt(tokens, vtoken)));
    const Weights w = weights_of(d, distance, vslope);
    high = hn::Add(high, hn::IfThenZeroElse(beyond, w.high));
    low = hn::Add(low, hn::IfThenZeroElse(beyond, w.low));
  });
  return (sum_of(high) << 20U) + sum_of(low);
}

template <class T>
void fill_bins(const T* x, std::int64_t n, float most,
               std::array<sampling::Bin, sampling::kBins>& bins) {
  const DF d;
  const DI di;
  const VF vmost = hn::Set(d, most), slope = hn::Set(d, -sampling::kLog2E);
  const VF of_unit = hn::Set(d, sampling::kBinsOfUnit);
  const VF end = hn::Set(d, static_cast<float>(sampling::kBins - 1));
  bins.fill({});
  constexpr std::size_t kMost = hn::MaxLanes(DI());
  HWY_ALIGN std::int32_t digit[kMost], high[kMost], low[kMost];
  for_logits(x, n, [&](VF v, std::int64_t, std::int64_t count) HWY_ATTR {
    const VF distance = hn::Sub(vmost, v);
    const Weights w = weights_of(d, distance, slope);
    hn::Store(hn::ConvertTo(di, hn::Min(hn::Mul(distance, of_unit), end)), di, digit);
    hn::Store(w.high, di, high);
    hn::Store(w.low, di, low);
    for (std::int64_t k = 0; k < count; ++k) {
      sampling::Bin& b = bins[static_cast<std::size_t>(digit[k])];
      b.mass += whole_of(high[k], low[k]);
      ++b.tokens;
    }
  });
}

// Calls found(place) for the tokens with from ≤ d ≤ upto, which found may lower.
template <class T, class Found>
void for_places(const T* x, std::int64_t n, std::int64_t token, float most, float from,
                const float& upto, const Found& found) {
  const DF d;
  const DU du;
  const VF vmost = hn::Set(d, most), vfrom = hn::Set(d, from);
  HWY_ALIGN std::uint32_t bits[hn::MaxLanes(DU())], tokens[hn::MaxLanes(DU())];
  for_logits(x, n, [&](VF v, std::int64_t i, std::int64_t count) HWY_ATTR {
    const VF away = hn::Sub(vmost, v);
    auto is = hn::And(hn::Ge(away, vfrom), hn::Le(away, hn::Set(d, upto)));
    is = hn::And(is, hn::FirstN(d, static_cast<std::size_t>(count)));
    if (hn::AllFalse(d, is)) return;
    const auto those = hn::RebindMask(du, is);
    const VU here = hn::Iota(du, static_cast<std::uint32_t>(token + i));
    const std::size_t some = hn::CompressStore(hn::BitCast(du, away), those, du, bits);
    hn::CompressStore(here, those, du, tokens);
    for (std::size_t k = 0; k < some; ++k) found(sampling::place_of(bits[k], tokens[k]));
  });
}

}  // namespace mlxtape::ops::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
