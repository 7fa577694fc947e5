// The vector helpers of the CPU kernels, on every instruction set of this machine: conversions
// against the scalar ones for all 16-bit values, exp against double over its whole range.
#include "backends/cpu/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "backends/cpu_simd_test.cpp"
#include <hwy/foreach_target.h>

#include "backends/cpu/device/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace mlxtape::ops::HWY_NAMESPACE {

// Plain functions over arrays, so that the tests need no vector types. n need not fill a vector.
void run_exp(const float* x, float* y, std::size_t n) {
  const DF d;
  write_row<false>(
      d, y, n, [&](std::size_t i) HWY_ATTR { return exp_f32(d, load(d, x + i)); },
      [&](std::size_t i, std::size_t count)
          HWY_ATTR { return exp_f32(d, load_n(d, x + i, count)); });
}

void run_exp_for_16_bits(const float* x, float* y, std::size_t n) {
  const DF d;
  for (std::size_t i = 0; i < n; ++i) y[i] = hn::GetLane(exp_for(d, BF16(), hn::Set(d, x[i])));
}

// What each makes of the bound and x: x not below it, not above it, the largest of both.
void run_bounds(const float* bound, const float* x, float (*y)[3], std::size_t n) {
  const DF d;
  for (std::size_t i = 0; i < n; ++i) {
    const VF b = hn::Set(d, bound[i]), v = hn::Set(d, x[i]);
    y[i][0] = hn::GetLane(not_below(b, v));
    y[i][1] = hn::GetLane(not_above(b, v));
    y[i][2] = hn::GetLane(largest(b, v));
  }
}

void run_sigmoid(const float* x, float* value, float* rest, std::size_t n, bool f32) {
  const DF d;
  for (std::size_t i = 0; i < n; ++i) {
    const VF z = hn::Set(d, x[i]);
    const Sigmoid s = f32 ? sigmoid(d, float(), z) : sigmoid(d, F16(), z);
    value[i] = hn::GetLane(s.value);
    rest[i] = hn::GetLane(s.rest);
  }
}

template <class T, bool kStream>
void run_copy(const T* from, T* to, std::size_t n) {
  const DF d;
  write_row<kStream>(
      d, to, n, [&](std::size_t i) HWY_ATTR { return load(d, from + i); },
      [&](std::size_t i, std::size_t count) HWY_ATTR { return load_n(d, from + i, count); });
}

void copy_f32(const float* from, float* to, std::size_t n, bool stream) {
  stream ? run_copy<float, true>(from, to, n) : run_copy<float, false>(from, to, n);
}
void copy_f16(const F16* from, F16* to, std::size_t n, bool stream) {
  stream ? run_copy<F16, true>(from, to, n) : run_copy<F16, false>(from, to, n);
}
void copy_bf16(const BF16* from, BF16* to, std::size_t n, bool stream) {
  stream ? run_copy<BF16, true>(from, to, n) : run_copy<BF16, false>(from, to, n);
}

template <class T>
void run_narrow(const float* from, T* to, std::size_t n) {
  const DF d;
  write_row<false>(
      d, to, n, [&](std::size_t i) HWY_ATTR { return load(d, from + i); },
      [&](std::size_t i, std::size_t count) HWY_ATTR { return load_n(d, from + i, count); });
}
void narrow_f16(const float* from, F16* to, std::size_t n) { run_narrow(from, to, n); }
void narrow_bf16(const float* from, BF16* to, std::size_t n) { run_narrow(from, to, n); }

}  // namespace mlxtape::ops::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
#include <gtest/gtest.h>

#include <cmath>
#include <cstdio>
#include <vector>

#include "mlxtape/base/error.h"

namespace mlxtape::ops {
HWY_EXPORT(run_exp);
HWY_EXPORT(run_exp_for_16_bits);
HWY_EXPORT(run_bounds);
HWY_EXPORT(run_sigmoid);
HWY_EXPORT(copy_f32);
HWY_EXPORT(copy_f16);
HWY_EXPORT(copy_bf16);
HWY_EXPORT(narrow_f16);
HWY_EXPORT(narrow_bf16);
}  // namespace mlxtape::ops

namespace mlxtape::ops {
namespace {

class CpuSimd : public testing::TestWithParam<std::string> {
 protected:
  void SetUp() override { cpu::limit_target(GetParam()); }
  void TearDown() override { cpu::limit_target(cpu::available_targets().front()); }
};

std::vector<float> exp_of(const std::vector<float>& x) {
  std::vector<float> y(x.size());
  HWY_DYNAMIC_DISPATCH(run_exp)(x.data(), y.data(), x.size());
  return y;
}

// In units of the last place of the exact value, which is 1/2^24 to 1/2^23 of it.
double ulps_off(float got, double want) {
  int exponent = 0;
  std::frexp(want, &exponent);
  return std::abs(got - want) / std::ldexp(1, std::max(exponent - 24, -149));
}

TEST_P(CpuSimd, ExpIsWithinTwoUlp) {
  std::vector<float> x;
  for (float v = -104.5F; v < 89; v += 3.1e-5F) x.push_back(v);
  const std::vector<float> y = exp_of(x);
  double worst = 0;
  for (std::size_t i = 0; i < x.size(); ++i) {
    const double want = std::exp(static_cast<double>(x[i]));
    if (want > 3.4028235677973366e38) {
      ASSERT_TRUE(std::isinf(y[i])) << x[i];
      continue;
    }
    const double error = ulps_off(y[i], want);
    worst = std::max(worst, error);
    ASSERT_LE(error, 2) << "exp(" << x[i] << ")";
  }
  RecordProperty("worst_ulp", std::to_string(worst));
  std::printf("exp: at most %.2f ulp on %s\n", worst, GetParam().c_str());
}

TEST_P(CpuSimd, ExpAtItsEdges) {
  const float inf = INFINITY;
  const auto y = exp_of({-inf, 0, -0.0F, inf, NAN, -1e30F, 1e30F, -104.0F, 88.72F, -87.3F});
  EXPECT_EQ(y[0], 0);
  EXPECT_EQ(y[1], 1);
  EXPECT_EQ(y[2], 1);
  EXPECT_EQ(y[3], inf);
  EXPECT_TRUE(std::isnan(y[4]));
  EXPECT_EQ(y[5], 0);
  EXPECT_EQ(y[6], inf);
  EXPECT_EQ(y[7], 0);
  EXPECT_TRUE(std::isfinite(y[8]));
  EXPECT_GT(y[9], 0);
}

// x·log2(e) is rounded once, and log2(e) itself is a fifth of an ulp off: 5/4 ulp of |x|. The
// polynomial adds 3.
TEST_P(CpuSimd, ExpFor16BitsIsAsGoodAsItsArgument) {
  std::vector<float> x = {-INFINITY, INFINITY, NAN, -1e30F, 1e30F, 0};
  for (float v = -100; v < 88; v += 1.7e-4F) x.push_back(v);
  std::vector<float> y(x.size());
  HWY_DYNAMIC_DISPATCH(run_exp_for_16_bits)(x.data(), y.data(), x.size());
  EXPECT_EQ(y[0], 0);
  EXPECT_EQ(y[1], INFINITY);
  EXPECT_TRUE(std::isnan(y[2]));
  EXPECT_EQ(y[3], 0);
  EXPECT_EQ(y[4], INFINITY);
  for (std::size_t i = 5; i < x.size(); ++i) {
    ASSERT_LE(ulps_off(y[i], std::exp(double{x[i]})), 3 + 1.25 * std::abs(x[i]))
        << "exp(" << x[i] << ")";
  }
}

// NaN stays where a number is bounded, and is passed over where the largest is looked for.
TEST_P(CpuSimd, BoundsSayWhatBecomesOfNaN) {
  const float bound[] = {1, 1, 1, -INFINITY, 0};
  const float x[] = {2, -3, NAN, NAN, -0.0F};
  float y[5][3];
  HWY_DYNAMIC_DISPATCH(run_bounds)(bound, x, y, 5);
  EXPECT_TRUE(y[0][0] == 2 && y[0][1] == 1 && y[0][2] == 2);
  EXPECT_TRUE(y[1][0] == 1 && y[1][1] == -3 && y[1][2] == 1);
  EXPECT_TRUE(std::isnan(y[2][0]) && std::isnan(y[2][1]) && y[2][2] == 1);
  EXPECT_TRUE(std::isnan(y[3][0]) && std::isnan(y[3][1]) && y[3][2] == -INFINITY);
  EXPECT_TRUE(std::signbit(y[4][0]) && std::signbit(y[4][1]));  // equal to the bound: x itself
}

TEST_P(CpuSimd, SigmoidLosesNothingOnEitherSide) {
  std::vector<float> z = {-INFINITY, INFINITY, NAN, -3e38F, 3e38F, 0};
  for (float v = -103; v < 103; v += 1.7e-4F) z.push_back(v);
  std::vector<float> value(z.size()), rest(z.size());
  for (const bool f32 : {true, false}) {
    HWY_DYNAMIC_DISPATCH(run_sigmoid)(z.data(), value.data(), rest.data(), z.size(), f32);
    for (const std::size_t i : {0, 3}) EXPECT_TRUE(value[i] == 0 && rest[i] == 1) << z[i];
    for (const std::size_t i : {1, 4}) EXPECT_TRUE(value[i] == 1 && rest[i] == 0) << z[i];
    EXPECT_TRUE(std::isnan(value[2]) && std::isnan(rest[2]));
    for (std::size_t i = 5; i < z.size(); ++i) {
      // 3 ulp of exp (or its argument's), one each of the sum, the reciprocal and the product.
      const double allowed = 6 + (f32 ? 0 : 1.25 * std::abs(z[i]));
      ASSERT_LE(ulps_off(value[i], 1 / (1 + std::exp(-double{z[i]}))), allowed) << z[i];
      ASSERT_LE(ulps_off(rest[i], 1 / (1 + std::exp(double{z[i]}))), allowed) << z[i];
    }
  }
}

// Every length and every misalignment around a few vectors; nothing beyond the row is touched.
template <class T, class Copy>
void check_rows(const Copy& copy) {
  for (std::size_t n = 0; n < 80; ++n) {
    for (const std::size_t shift : {0, 1, 5, 16, 31}) {
      std::vector<T> from(n + 40), to(n + 160, T(77.0F));
      for (std::size_t i = 0; i < from.size(); ++i) from[i] = T(static_cast<float>(i + 1));
      for (const bool stream : {false, true}) {
        copy(from.data() + shift, to.data() + 64 + shift, n, stream);
        for (std::size_t i = 0; i < to.size(); ++i) {
          const bool inside = i >= 64 + shift && i < 64 + shift + n;
          const float want = inside ? static_cast<float>(i - 64 + 1) : 77.0F;
          ASSERT_EQ(static_cast<float>(to[i]), want) << n << " from " << shift << " at " << i;
        }
      }
    }
  }
}

TEST_P(CpuSimd, RowsOfEveryLengthAndAlignment) {
  check_rows<float>(HWY_DYNAMIC_DISPATCH(copy_f32));
  check_rows<F16>(HWY_DYNAMIC_DISPATCH(copy_f16));
  check_rows<BF16>(HWY_DYNAMIC_DISPATCH(copy_bf16));
}

template <class T, class Copy>
void check_all_values(const Copy& copy) {
  std::vector<T> all(65536), back(65536);
  for (std::uint32_t i = 0; i < 65536; ++i) all[i].bits = static_cast<std::uint16_t>(i);
  copy(all.data(), back.data(), all.size(), false);
  for (std::uint32_t i = 0; i < 65536; ++i) {
    if (std::isnan(static_cast<float>(all[i]))) {
      ASSERT_TRUE(std::isnan(static_cast<float>(back[i]))) << i;
    } else {
      ASSERT_EQ(all[i].bits, back[i].bits);
    }
  }
}

TEST_P(CpuSimd, EveryHalfSurvivesTheTrip) {
  check_all_values<F16>(HWY_DYNAMIC_DISPATCH(copy_f16));
  check_all_values<BF16>(HWY_DYNAMIC_DISPATCH(copy_bf16));
}

// f32 patterns around every rounding boundary, NaN with every kind of payload among them.
template <class T, class Narrow>
void check_rounding(const Narrow& narrow) {
  std::vector<float> x;
  for (std::uint32_t high = 0; high < 65536; high += 3) {
    for (const std::uint32_t low :
         {0U, 1U, 0xfffU, 0x1000U, 0x1001U, 0x7fffU, 0x8000U, 0x8001U, 0xefffU, 0xf000U, 0xffffU}) {
      const float v = std::bit_cast<float>(high << 16U | low);
      x.push_back(std::isnan(v) ? v + v : v);  // arithmetic hands on quiet NaN only
    }
  }
  std::vector<T> y(x.size());
  narrow(x.data(), y.data(), x.size());
  for (std::size_t i = 0; i < x.size(); ++i) {
    if (std::isnan(x[i])) {
      ASSERT_TRUE(std::isnan(static_cast<float>(y[i]))) << std::bit_cast<std::uint32_t>(x[i]);
    } else {
      ASSERT_EQ(y[i].bits, T(x[i]).bits) << std::bit_cast<std::uint32_t>(x[i]);
    }
  }
}

TEST_P(CpuSimd, NarrowingRoundsAsTheScalarTypesDo) {
  check_rounding<F16>(HWY_DYNAMIC_DISPATCH(narrow_f16));
  check_rounding<BF16>(HWY_DYNAMIC_DISPATCH(narrow_bf16));
}

INSTANTIATE_TEST_SUITE_P(Targets, CpuSimd, testing::ValuesIn(cpu::available_targets()),
                         [](const auto& info) { return info.param; });

TEST(CpuTargets, AnUnknownNameIsRefused) { EXPECT_THROW(cpu::limit_target("AVX9"), Error); }

}  // namespace
}  // namespace mlxtape::ops
#endif
