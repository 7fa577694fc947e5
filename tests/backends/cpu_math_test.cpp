// The functions of math-inl.h, on every instruction set of this machine, against double over their whole
// range: every 4021st f32 there is, and a fine grid near 0.
#include "backends/cpu/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "backends/cpu_math_test.cpp"
#include <hwy/foreach_target.h>

#include "backends/cpu/device/math-inl.h"

HWY_BEFORE_NAMESPACE();
namespace mlxtape::ops::HWY_NAMESPACE {

// n is a multiple of the lanes of any vector.
template <class Fn>
void each(const float* x, float* y, std::size_t n, const Fn& fn) {
  const DF d;
  for (std::size_t i = 0; i < n; i += hn::Lanes(d))
    hn::StoreU(fn(d, hn::LoadU(d, x + i)), d, y + i);
}
void run_log(const float* x, float* y, std::size_t n) {
  each(x, y, n, [](DF d, VF v) HWY_ATTR { return log_f32(d, v); });
}
void run_log1p(const float* x, float* y, std::size_t n) {
  each(x, y, n, [](DF d, VF v) HWY_ATTR { return log1p_f32(d, v); });
}
void run_tanh(const float* x, float* y, std::size_t n) {
  each(x, y, n, [](DF d, VF v) HWY_ATTR { return tanh_f32(d, v); });
}
void run_normal(const float* x, float* y, std::size_t n) {
  each(x, y, n, [](DF d, VF v) HWY_ATTR { return normal(d, v).share; });
}
void run_pow(const float* a, const float* b, float* y, std::size_t n) {
  const DF d;
  for (std::size_t i = 0; i < n; i += hn::Lanes(d)) {
    hn::StoreU(pow_f32(d, hn::LoadU(d, a + i), hn::LoadU(d, b + i)), d, y + i);
  }
}

}  // namespace mlxtape::ops::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstdio>
#include <string>
#include <vector>

#include "mlxtape/base/error.h"
#include "support/oracle.h"

namespace mlxtape::ops {
HWY_EXPORT(run_log);
HWY_EXPORT(run_log1p);
HWY_EXPORT(run_tanh);
HWY_EXPORT(run_normal);
HWY_EXPORT(run_pow);

namespace {

class CpuMath : public testing::TestWithParam<std::string> {
 protected:
  void SetUp() override { cpu::limit_target(GetParam()); }
  void TearDown() override { cpu::limit_target(cpu::available_targets().front()); }

  // In units of the last place of the exact value.
  static double ulps_off(float got, double want) {
    if (std::isnan(want)) return std::isnan(got) ? 0 : INFINITY;
    if (std::abs(want) > 3.4028235677973366e38) {
      return std::isinf(got) && std::signbit(got) == std::signbit(want) ? 0 : INFINITY;
    }
    int exponent = 0;
    std::frexp(want, &exponent);
    const double error = std::abs(got - want) / std::ldexp(1, std::max(exponent - 24, -149));
    return std::isnan(error) ? INFINITY : error;
  }

  // allowed(x): ulp
  template <class Run, class Want, class Allowed>
  void check(const char* name, const Run& run, const Want& want, const Allowed& allowed) {
    std::vector<float> x;
    for (std::uint64_t bits = 0; bits < std::uint64_t{1} << 32U; bits += 4021) {
      x.push_back(std::bit_cast<float>(static_cast<std::uint32_t>(bits)));
    }
    for (float v = -20; v < 20; v += 1.3e-4F) x.push_back(v);  // where most happens
    for (const float v : {0.0F, -0.0F, 1.0F, -1.0F, INFINITY, -INFINITY, NAN}) x.push_back(v);
    x.resize((x.size() + 63) / 64 * 64);
    std::vector<float> y(x.size());
    run(x.data(), y.data(), x.size());
    double worst = 0;
    for (std::size_t i = 0; i < x.size(); ++i) {
      const double error = ulps_off(y[i], want(double{x[i]}));
      if (std::isfinite(x[i])) worst = std::max(worst, error);
      ASSERT_LE(error, allowed(x[i])) << name << "(" << x[i] << ") = " << y[i];
    }
    std::printf("%s: at most %.2f ulp on %s\n", name, worst, GetParam().c_str());
  }
};

double four(float) { return 4; }

TEST_P(CpuMath, LogIsWithinFourUlp) {
  check("log", HWY_DYNAMIC_DISPATCH(run_log), [](double x) { return std::log(x); }, four);
}
TEST_P(CpuMath, Log1pIsWithinFourUlp) {
  check("log1p", HWY_DYNAMIC_DISPATCH(run_log1p), [](double x) { return std::log1p(x); }, four);
}
TEST_P(CpuMath, TanhIsWithinFourUlp) {
  check("tanh", HWY_DYNAMIC_DISPATCH(run_tanh), [](double x) { return std::tanh(x); }, four);
}
// Without a fused multiply-add the rounding of x² costs x²/2 ulp on the far side.
TEST_P(CpuMath, NormalShareIsWithinFiveUlp) {
  const bool fused = GetParam() != "SSSE3";
  check(
      "normal share", HWY_DYNAMIC_DISPATCH(run_normal),
      [](double x) { return 0.5 * std::erfc(-x * std::sqrt(0.5)); },
      [&](float x) { return fused || !(x < 0) ? 5 : 5 + 0.5 * double{x} * x; });
}
TEST_P(CpuMath, PowIsWithinFourUlp) {
  test::Noise noise(1);
  std::vector<float> a, b;
  for (int i = 0; i < 1 << 18; ++i) {
    // Bases of any size with exponents that keep the result in range, and either sign.
    const double size = std::exp2(140 * noise.next());
    const double exponent = 149 * noise.next() / std::max(0.3, std::abs(std::log2(size)));
    a.push_back(static_cast<float>(i % 4 == 0 ? -size : size));
    b.push_back(static_cast<float>(i % 2 == 0 ? std::rint(8 * exponent) : exponent));
  }
  std::vector<float> y(a.size());
  HWY_DYNAMIC_DISPATCH(run_pow)(a.data(), b.data(), y.data(), a.size());
  double worst = 0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    const double error = ulps_off(y[i], std::pow(double{a[i]}, double{b[i]}));
    worst = std::max(worst, error);
    ASSERT_LE(error, 4) << a[i] << "^" << b[i] << " = " << y[i];
  }
  std::printf("pow: at most %.2f ulp on %s\n", worst, GetParam().c_str());
}

INSTANTIATE_TEST_SUITE_P(Targets, CpuMath, testing::ValuesIn(cpu::available_targets()),
                         [](const auto& info) { return info.param; });

}  // namespace
}  // namespace mlxtape::ops
#endif
