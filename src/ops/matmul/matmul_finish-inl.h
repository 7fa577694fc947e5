// What happens to the sums of a matmul on the CPU before they are stored: bias, activation, residual.
#include "backends/cpu/device/simd-inl.h"

#include "matmul_args.h"

// Per-target include guard: Highway flips the toggle for each target.
#if defined(MLXTAPE_MATMUL_FINISH_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef MLXTAPE_MATMUL_FINISH_INL_H_
#undef MLXTAPE_MATMUL_FINISH_INL_H_
#else
#define MLXTAPE_MATMUL_FINISH_INL_H_
#endif

HWY_BEFORE_NAMESPACE();
namespace mlxtape::ops::HWY_NAMESPACE {
namespace {

constexpr float kSqrtHalf = 0x1.6a09e6p-1F;
constexpr float kGeluInner = 0x1.988454p-1F;  // √(2/π)
constexpr float kGeluCubic = 0.044715F;

// erfc(|x|) within 3e-7 of the value, by a rational variable and a polynomial in the exponent that was
// fitted to the smallest relative error over the whole half-line.
HWY_INLINE VF erfc_abs(DF d, VF x) {
  const VF z = hn::Abs(x);
  const VF t = hn::Div(hn::Set(d, 1.0F), hn::MulAdd(hn::Set(d, 0.5F), z, hn::Set(d, 1.0F)));
  VF p = hn::Set(d, 0.17087277F);
  const auto step = [&](float c) HWY_ATTR {
    p = hn::MulAdd(p, t, hn::Set(d, c));
  };
  step(-0.82215223F);
  step(1.48851587F);
  step(-1.13520398F);
  step(0.27886807F);
  step(-0.18628806F);
  step(0.09678418F);
  step(0.37409196F);
  step(1.00002368F);
  step(-1.26551223F);
  return hn::Mul(t, exp_f32(d, hn::NegMulAdd(z, z, p)));
}

// Φ(z), the normal distribution: without a difference where it is small.
HWY_INLINE VF normal_share(DF d, VF z) {
  const VF half = hn::Mul(hn::Set(d, 0.5F), erfc_abs(d, hn::Mul(z, hn::Set(d, kSqrtHalf))));
  return hn::IfThenElse(hn::Lt(z, hn::Zero(d)), half, hn::Sub(hn::Set(d, 1.0F), half));
}

HWY_INLINE VF gelu_tanh_inner(DF d, VF z) {  // 2·√(2/π)·(z + 0.044715·z³)
  const VF cubic = hn::MulAdd(hn::Mul(z, z), hn::Set(d, kGeluCubic), hn::Set(d, 1.0F));
  return hn::Mul(hn::Mul(hn::Set(d, 2 * kGeluInner), z), cubic);
}

HWY_INLINE VF activate(DF d, std::int32_t activation, VF z) {
  switch (activation) {
    case kMatmulSilu: return hn::Mul(z, sigmoid(d, float(), z).value);
    case kMatmulGelu: return hn::Mul(z, normal_share(d, z));
    case kMatmulGeluTanh: return hn::Mul(z, sigmoid(d, float(), gelu_tanh_inner(d, z)).value);
    default: return z;
  }
}

// The activation's slope at z; beyond ±110 it is 0 or 1 to the last bit, and products of z would overflow.
HWY_INLINE VF slope(DF d, std::int32_t activation, VF z) {
  const VF one = hn::Set(d, 1.0F);
  z = not_above(hn::Set(d, 110.0F), not_below(hn::Set(d, -110.0F), z));
  switch (activation) {
    case kMatmulSilu: {
      const Sigmoid s = sigmoid(d, float(), z);
      return hn::Mul(s.value, hn::MulAdd(z, s.rest, one));
    }
    case kMatmulGelu: {
      const VF density = hn::Mul(hn::Set(d, 0x1.988454p-2F),  // 1/√(2π)
                                 exp_f32(d, hn::Mul(hn::Set(d, -0.5F), hn::Mul(z, z))));
      return hn::MulAdd(z, density, normal_share(d, z));
    }
    case kMatmulGeluTanh: {
      const Sigmoid s = sigmoid(d, float(), gelu_tanh_inner(d, z));
      const VF rate = hn::Mul(hn::Set(d, 2 * kGeluInner),
                              hn::MulAdd(hn::Mul(z, z), hn::Set(d, 3 * kGeluCubic), one));
      return hn::Mul(s.value, hn::MulAdd(hn::Mul(z, s.rest), rate, one));
    }
    default: return one;
  }
}

// Where the sums go. O: the type of y, z and residual.
template <class T, class O>
struct Finish {
  O* y;
  O* z;               // or null
  const T* bias;      // [n], or null
  const O* residual;  // or null
  float beta;
  std::int32_t activation;

  // y = sums or y + sums, in f32: the sums can be made in place.
  bool is_plain() const {
    return sizeof(O) == 4 && z == nullptr && bias == nullptr && residual == nullptr &&
           activation == kMatmulNone && (beta == 0 || beta == 1);
  }

  // count sums of one row: at counts elements of y, column those of its row.
  HWY_INLINE void row(const float* sums, std::int64_t at, std::int64_t column,
                      std::int64_t count) const {
    const DF d;
    const auto value = [&](VF v, std::int64_t i, const auto& get, const auto& put) HWY_ATTR {
      if (bias != nullptr) v = hn::Add(v, get(bias + column + i));
      if (z != nullptr) put(v, z + at + i);
      if (activation != kMatmulNone) v = activate(d, activation, v);
      if (residual != nullptr) v = hn::Add(v, get(residual + at + i));
      if (beta != 0) v = hn::MulAdd(hn::Set(d, beta), get(y + at + i), v);
      put(v, y + at + i);
    };
    for_row(
        d, static_cast<std::size_t>(count),
        [&](std::size_t i) HWY_ATTR {
          value(
              hn::LoadU(d, sums + i), static_cast<std::int64_t>(i),
              [&](const auto* p) HWY_ATTR { return load(d, p); },
              [&](VF v, O* p) HWY_ATTR { store(d, v, p); });
        },
        [&](std::size_t i, std::size_t part) HWY_ATTR {
          value(
              load_n(d, sums + i, part), static_cast<std::int64_t>(i),
              [&](const auto* p) HWY_ATTR { return load_n(d, p, part); },
              [&](VF v, O* p) HWY_ATTR { store_n(d, v, p, part); });
        });
  }
};

}  // namespace
}  // namespace mlxtape::ops::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
