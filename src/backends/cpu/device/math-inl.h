// Functions of f32 vectors beyond exp, within a few ulp over the whole range, special values as IEEE
// says. tests/backends/cpu_math_test.cpp measures each against double on every instruction set.
#include "backends/cpu/device/simd-inl.h"

// Per-target include guard: Highway flips the toggle for each target.
#if defined(MLXTAPE_CPU_MATH_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef MLXTAPE_CPU_MATH_INL_H_
#undef MLXTAPE_CPU_MATH_INL_H_
#else
#define MLXTAPE_CPU_MATH_INL_H_
#endif

HWY_BEFORE_NAMESPACE();
namespace mlxtape::ops::HWY_NAMESPACE {

inline constexpr float kInf = std::numeric_limits<float>::infinity();
inline constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

// The polynomial Σ c[i]·x^i, highest power first in the argument list.
HWY_INLINE VF polynomial(DF, VF, VF p) { return p; }
template <class... Rest>
HWY_INLINE VF polynomial(DF d, VF x, VF p, float next, Rest... rest) {
  return polynomial(d, x, hn::MulAdd(p, x, hn::Set(d, next)), rest...);
}
template <class... Rest>
HWY_INLINE VF polynomial(DF d, VF x, float first, float next, Rest... rest) {
  return polynomial(d, x, hn::Set(d, first), next, rest...);
}

// A positive finite x = m·2^e with m in [√½, √2).
struct Parts {
  VF m, e;
};
HWY_INLINE Parts parts_of(DF d, VF x) {
  const DI di;
  const auto small = hn::Lt(x, hn::Set(d, std::numeric_limits<float>::min()));
  x = hn::IfThenElse(small, hn::Mul(x, hn::Set(d, 0x1p24F)), x);
  const auto bits = hn::BitCast(di, x);
  const auto e = hn::ShiftRight<23>(hn::Sub(bits, hn::Set(di, 0x3f3504f3)));  // less √½
  const VF m = hn::BitCast(d, hn::Sub(bits, hn::ShiftLeft<23>(e)));
  return {m, hn::Sub(hn::ConvertTo(d, e), hn::IfThenElseZero(small, hn::Set(d, 24.0F)))};
}

HWY_INLINE hn::Mask<DF> is_positive_finite(DF d, VF x) {
  return hn::And(hn::Gt(x, hn::Zero(d)), hn::Lt(x, hn::Set(d, kInf)));
}

// log x = e·ln2 + log m: ln2 in two parts, of which the first times e is exact, and
// log(1 + r) = r − r²/2 + r³·P(r), P fitted on [√½ − 1, √2 − 1].
HWY_INLINE VF log_f32(DF d, VF x) {
  const Parts parts = parts_of(d, x);
  const VF r = hn::Sub(parts.m, hn::Set(d, 1.0F));
  const VF r2 = hn::Mul(r, r);
  const VF p = polynomial(d, r, 7.0376836292e-2F, -1.1514610310e-1F, 1.1676998740e-1F,
                          -1.2420140846e-1F, 1.4249322787e-1F, -1.6668057665e-1F, 2.0000714765e-1F,
                          -2.4999993993e-1F, 3.3333331174e-1F);
  VF y = hn::Mul(hn::Mul(p, r), r2);
  y = hn::MulAdd(parts.e, hn::Set(d, -2.12194440e-4F), y);
  y = hn::NegMulAdd(hn::Set(d, 0.5F), r2, y);
  y = hn::MulAdd(parts.e, hn::Set(d, 0.693359375F), hn::Add(r, y));
  const VF below = hn::IfThenElse(hn::Eq(x, hn::Zero(d)), hn::Set(d, -kInf), hn::Set(d, kNaN));
  const VF special = hn::IfThenElse(hn::Le(x, hn::Zero(d)), below, x);  // x: infinity or NaN
  return hn::IfThenElse(is_positive_finite(d, x), y, special);
}

// log(1 + x) = log u + (what the rounding of u = 1 + x lost)/u.
HWY_INLINE VF log1p_f32(DF d, VF x) {
  const VF one = hn::Set(d, 1.0F);
  const VF u = hn::Add(one, x);
  const VF lost =
      hn::IfThenElse(hn::Gt(x, one), hn::Sub(one, hn::Sub(u, x)), hn::Sub(x, hn::Sub(u, one)));
  const VF log_u = log_f32(d, u);
  const VF y = hn::IfThenElse(is_positive_finite(d, u), hn::Add(log_u, hn::Div(lost, u)), log_u);
  return hn::IfThenElse(hn::Eq(u, one), x, y);
}

// Near 0 an odd polynomial, for 1 − 2/(exp(2|x|) + 1) would cancel there.
HWY_INLINE VF tanh_f32(DF d, VF x) {
  const VF one = hn::Set(d, 1.0F);
  const VF size = hn::Abs(x);
  const VF x2 = hn::Mul(x, x);
  const VF p = polynomial(d, x2, -5.70498872745e-3F, 2.06390887954e-2F, -5.37397155531e-2F,
                          1.33314422036e-1F, -3.33332819422e-1F);
  const VF near = hn::MulAdd(hn::Mul(p, x2), x, x);
  const VF e = exp_f32(d, hn::Add(size, size));
  const VF far = hn::Sub(one, hn::Div(hn::Set(d, 2.0F), hn::Add(e, one)));
  return hn::IfThenElse(hn::Lt(size, hn::Set(d, 0.625F)), near, hn::CopySign(far, x));
}

// 1/√x. AVX-512's own, exact to 2^-14 and right at the edges, and one step of Newton, which makes NaN of 0 and
// infinity; the older instruction takes small numbers for 0, so there the root is divided by.
HWY_INLINE VF rsqrt_f32(DF d, VF x) {
#if HWY_TARGET <= HWY_AVX3
  const VF y = hn::ApproximateReciprocalSqrt(x);
  const VF half = hn::Set(d, 0.5F);
  const VF left = hn::NegMulAdd(hn::Mul(half, hn::Mul(x, y)), y, half);
  const VF better = hn::MulAdd(y, left, y);
  return hn::IfThenElse(hn::IsNaN(better), y, better);
#else
  return hn::Div(hn::Set(d, 1.0F), hn::Sqrt(x));
#endif
}

// The normal distribution: its share below x, Φ(x) = ½·erfc(−x/√2), and its density there.
//
// Φ(−a) = exp(−a²/2)·t·P(1 − t) with t = 1/(1 + 0.4·a), P fitted to the smallest relative error for a in
// [0, 15], 1.7e-8, with P(0) = ½ exactly; so the far side is as good as the near one. What the rounding of a²
// loses is put back where there is a fused multiply-add; elsewhere it costs a²/2 ulp.
struct Normal {
  VF share, density;
};
HWY_INLINE Normal normal(DF d, VF x) {
  const VF one = hn::Set(d, 1.0F);
  const VF half = hn::Set(d, 0.5F);
  const VF a = not_above(hn::Set(d, 15.0F), hn::Abs(x));  // Φ(−15) is 0 in f32
  const VF a2 = hn::Mul(a, a);
  const VF lost = hn::Mul(half, hn::MulSub(a, a, a2));
  VF e = exp_nonpositive(d, hn::Neg(hn::Mul(half, a2)));
  e = hn::NegMulAdd(lost, e, e);
  const VF t = hn::Div(one, hn::MulAdd(hn::Set(d, 0.4F), a, one));
  const VF u = hn::Mul(hn::Mul(hn::Set(d, 0.4F), a), t);
  const VF p = polynomial(d, u, -0x1.05a16ap-5F, 0x1.ca830ep-4F, -0x1.00d41ep-3F, 0x1.c492d8p-5F,
                          -0x1.eae558p-5F, 0x1.6f6396p-6F, 0x1.de2fc2p-4F, 0x1.15e2a2p-4F,
                          -0x1.fd4b20p-2F, 0.5F);
  const VF beyond = hn::Mul(e, hn::Mul(t, p));
  return {hn::IfThenElse(hn::Lt(x, hn::Zero(d)), beyond, hn::Sub(one, beyond)),
          hn::Mul(e, hn::Set(d, 0.3989422804F))};
}

// b·log2(m·2^e) for half a vector, in double: 24 bits of the result need 33 of the exponent.
// log2(1 + r) = r·P(r), P fitted to the smallest relative error on [√½ − 1, √2 − 1], 1.0e-10.
using DD = hn::Repartition<double, DF>;
using DHalf = hn::Half<DF>;
HWY_INLINE hn::Vec<DD> times_log2(hn::Vec<DHalf> r32, hn::Vec<DHalf> e32, hn::Vec<DHalf> b32) {
  const DD dd;
  const auto r = hn::PromoteTo(dd, r32);
  constexpr double kC[] = {0x1.71547652efa2ep+0,  -0x1.7154767bad923p-1, 0x1.ec709c0087ce9p-2,
                           -0x1.715435ece9050p-2, 0x1.277732eff7dc8p-2,  -0x1.ec8d738be67d4p-3,
                           0x1.a615c38f2afaap-3,  -0x1.6eb02a4398d3fp-3, 0x1.45a2f330dfe63p-3,
                           -0x1.4180420da3cb5p-3, 0x1.3d244ae339192p-3,  -0x1.61a76a5129108p-4};
  auto p = hn::Set(dd, kC[11]);
  for (int i = 10; i >= 0; --i) p = hn::MulAdd(p, r, hn::Set(dd, kC[i]));
  return hn::Mul(hn::PromoteTo(dd, b32), hn::MulAdd(p, r, hn::PromoteTo(dd, e32)));
}

// |a|^b = 2^t, t = b·log2|a|: its whole part as the exponent, 2^fraction by a polynomial fitted on
// [−½, ½] (1.9e-9). Special cases as IEEE 754: x^0 = 1^y = 1 whatever the other is.
HWY_INLINE VF pow_f32(DF d, VF a, VF b) {
  const DHalf dh;
  const DD dd;
  const VF one = hn::Set(d, 1.0F);
  const VF zero = hn::Zero(d);
  const VF size = hn::Abs(a);
  const Parts parts = parts_of(d, size);
  const VF r = hn::Sub(parts.m, one);
  const auto halves = [&](VF v, auto& low, auto& high) HWY_ATTR {
    low = hn::LowerHalf(dh, v);
    high = hn::UpperHalf(dh, v);
  };
  hn::Vec<DHalf> r0, r1, e0, e1, b0, b1;
  halves(r, r0, r1);
  halves(parts.e, e0, e1);
  halves(b, b0, b1);
  hn::Vec<DHalf> n0, n1, f0, f1;
  const auto split = [&](hn::Vec<DD> t, hn::Vec<DHalf>& whole, hn::Vec<DHalf>& fraction) HWY_ATTR {
    t = not_above(hn::Set(dd, 200.0), not_below(hn::Set(dd, -200.0), t));
    const auto n = hn::Round(t);
    whole = hn::DemoteTo(dh, n);
    fraction = hn::DemoteTo(dh, hn::Sub(t, n));
  };
  split(times_log2(r0, e0, b0), n0, f0);
  split(times_log2(r1, e1, b1), n1, f1);
  const VF n = hn::Combine(d, n1, n0);
  const VF f = hn::Combine(d, f1, f0);
  const VF p = polynomial(d, f, 0x1.41d32ep-13F, 0x1.5f456ap-10F, 0x1.3b2dbcp-7F, 0x1.c6aed4p-5F,
                          0x1.ebfbdap-3F, 0x1.62e430p-1F, 1.0F);
#if HWY_TARGET == HWY_AVX3
  VF y{_mm512_scalef_ps(p.raw, n.raw)};
#else
  VF y = times_power_of_two(d, p, n);
#endif
  // What has no logarithm, and infinite exponents: the result is 0 or infinity.
  const VF inf = hn::Set(d, kInf);
  const auto grows =
      hn::Xor(hn::VecFromMask(d, hn::Gt(size, one)), hn::VecFromMask(d, hn::Lt(b, zero)));
  const VF limit = hn::IfThenElseZero(hn::MaskFromVec(grows), inf);
  const auto extreme =
      hn::Or(hn::Or(hn::Eq(size, zero), hn::Eq(size, inf)), hn::Eq(hn::Abs(b), inf));
  y = hn::IfThenElse(extreme, limit, y);
  // Signs: a negative base needs a whole exponent, and an odd one keeps the sign. From 2^24 on all are even.
  const auto whole = hn::Eq(hn::Floor(b), b);
  const VF half_b = hn::Mul(b, hn::Set(d, 0.5F));
  const auto odd = hn::And(whole, hn::And(hn::Lt(hn::Abs(b), hn::Set(d, 0x1p24F)),
                                          hn::Not(hn::Eq(hn::Floor(half_b), half_b))));
  y = hn::Or(y, hn::And(hn::IfThenElseZero(odd, a), hn::SignBit(d)));  // y has no sign yet
  const auto complex = hn::And(hn::And(hn::Lt(a, zero), hn::Lt(size, inf)), hn::Not(whole));
  y = hn::IfThenElse(complex, hn::Set(d, kNaN), y);
  y = hn::IfThenElse(hn::Or(hn::IsNaN(a), hn::IsNaN(b)), hn::Set(d, kNaN), y);
  const auto unit = hn::Or(hn::And(hn::Eq(size, one), hn::Eq(hn::Abs(b), inf)),
                           hn::Or(hn::Eq(a, one), hn::Eq(b, zero)));
  return hn::IfThenElse(unit, one, y);
}

}  // namespace mlxtape::ops::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
