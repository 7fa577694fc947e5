#include "mlxtape/base/dtype.h"

#include <gtest/gtest.h>
#include <rapidcheck.h>

#include <bit>
#include <cmath>
#include <iterator>
#include <limits>
#include <sstream>
#include <string>
#include <vector>

namespace mlxtape {
namespace {

template <class To, class From>
To converted(From value) {
  To result{};
  convert(&value, kDType<From>, &result, kDType<To>, 1);
  return result;
}

TEST(DType, NamesAndSizesRoundTrip) {
  for (std::size_t i = 0; i < kDTypeCount; ++i) {
    const auto t = static_cast<DType>(i);
    EXPECT_EQ(dtype_from_name(name_of(t)), t);
    visit(t, [&](auto zero) {
      EXPECT_EQ(sizeof zero, size_of(t)) << name_of(t);
      EXPECT_EQ(kDType<decltype(zero)>, t);
    });
  }
  EXPECT_FALSE(dtype_from_name("float"));
  EXPECT_FALSE(dtype_from_name(""));
}

// Every 16-bit pattern: to f32 and back gives the same bits, but for signalling NaN.
TEST(Half, EveryValueSurvivesTheTripThroughF32) {
  for (std::uint32_t bits = 0; bits < 65536; ++bits) {
    BF16 b;
    b.bits = static_cast<std::uint16_t>(bits);
    F16 h;
    h.bits = static_cast<std::uint16_t>(bits);
    const auto fb = static_cast<float>(b);
    const auto fh = static_cast<float>(h);
    if (std::isnan(fb)) {
      EXPECT_TRUE(std::isnan(static_cast<float>(BF16(fb))));
    } else {
      EXPECT_EQ(BF16(fb).bits, b.bits);
    }
    if (std::isnan(fh)) {
      EXPECT_TRUE(std::isnan(static_cast<float>(F16(fh))));
    } else {
      EXPECT_EQ(F16(fh).bits, h.bits);
    }
  }
}

// Between two neighbours: everything under the middle goes down, over it up, the middle to even.
// Done in double, so that the middle and its neighbourhood are exact.
template <class Half>
void check_rounding_between(std::uint16_t low_bits) {
  Half low, high;
  low.bits = low_bits;
  high.bits = static_cast<std::uint16_t>(low_bits + 1);
  const auto a = static_cast<double>(low);
  const auto b = static_cast<double>(high);
  if (!std::isfinite(a) || !std::isfinite(b)) return;
  const double middle = (a + b) / 2;
  const Half even = low_bits % 2 == 0 ? low : high;
  ASSERT_EQ(Half(middle).bits, even.bits) << a;
  ASSERT_EQ(Half(std::nextafter(middle, a)).bits, low.bits) << a;
  ASSERT_EQ(Half(std::nextafter(middle, b)).bits, high.bits) << a;
  ASSERT_EQ(Half(-middle).bits, even.bits | 0x8000U) << a;
}

TEST(Half, RoundsOnceToNearestEven) {
  for (std::uint32_t bits = 0; bits < 0x7fff; ++bits) {
    check_rounding_between<BF16>(static_cast<std::uint16_t>(bits));
    check_rounding_between<F16>(static_cast<std::uint16_t>(bits));
  }
}

TEST(Half, EdgesOfTheRange) {
  const double inf = std::numeric_limits<double>::infinity();
  EXPECT_EQ(static_cast<float>(F16(65504.0F)), 65504.0F);
  EXPECT_EQ(static_cast<double>(F16(65519.999)), 65504.0);
  EXPECT_EQ(static_cast<double>(F16(65520.0)), inf);
  EXPECT_EQ(static_cast<double>(F16(1e300)), inf);
  EXPECT_EQ(static_cast<double>(F16(-1e300)), -inf);
  EXPECT_EQ(static_cast<double>(F16(0x1p-25)), 0.0);  // a tie between 0 and the smallest: even
  EXPECT_EQ(static_cast<double>(F16(0x1.00001p-25)), 0x1p-24);
  EXPECT_TRUE(std::signbit(static_cast<float>(F16(-0.0F))));
  EXPECT_EQ(static_cast<double>(BF16(3.3e38)), static_cast<double>(BF16(3.3e38F)));
  EXPECT_EQ(static_cast<double>(BF16(1e300)), inf);
  EXPECT_EQ(static_cast<double>(BF16(0x1p-134)), 0.0);
  EXPECT_TRUE(std::isnan(static_cast<float>(BF16(std::nanf("")))));
  const auto low_payload = std::bit_cast<float>(0x7f800001U);  // what is cut off alone says NaN
  EXPECT_TRUE(std::isnan(static_cast<float>(BF16(low_payload))));
  EXPECT_TRUE(std::isnan(static_cast<float>(F16(low_payload))));
}

// What mlx.core.add returns for every pair, mlx 0.32, rows and columns in the order of DType.
TEST(Promote, IsThatOfMlx) {
  const char* const rows[] = {
      "bool u8 u16 u32 u64 i8 i16 i32 i64 f16 bf16 f32 f64",
      "u8 u8 u16 u32 u64 i16 i16 i32 i64 f16 bf16 f32 f64",
      "u16 u16 u16 u32 u64 i32 i32 i32 i64 f16 bf16 f32 f64",
      "u32 u32 u32 u32 u64 i64 i64 i64 i64 f16 bf16 f32 f64",
      "u64 u64 u64 u64 u64 f32 f32 f32 f32 f16 bf16 f32 f64",
      "i8 i16 i32 i64 f32 i8 i16 i32 i64 f16 bf16 f32 f64",
      "i16 i16 i32 i64 f32 i16 i16 i32 i64 f16 bf16 f32 f64",
      "i32 i32 i32 i64 f32 i32 i32 i32 i64 f16 bf16 f32 f64",
      "i64 i64 i64 i64 f32 i64 i64 i64 i64 f16 bf16 f32 f64",
      "f16 f16 f16 f16 f16 f16 f16 f16 f16 f16 f32 f32 f64",
      "bf16 bf16 bf16 bf16 bf16 bf16 bf16 bf16 bf16 f32 bf16 f32 f64",
      "f32 f32 f32 f32 f32 f32 f32 f32 f32 f32 f32 f32 f64",
      "f64 f64 f64 f64 f64 f64 f64 f64 f64 f64 f64 f64 f64",
  };
  ASSERT_EQ(std::size(rows), kDTypeCount);
  for (std::size_t i = 0; i < kDTypeCount; ++i) {
    std::istringstream row(rows[i]);
    for (std::size_t j = 0; j < kDTypeCount; ++j) {
      std::string want;
      row >> want;
      const auto a = static_cast<DType>(i);
      const auto b = static_cast<DType>(j);
      EXPECT_EQ(name_of(promote(a, b)), want) << name_of(a) << " and " << name_of(b);
    }
  }
}

// 2^24 + 1 is a tie for f32, and through f32 it would be a tie for bf16, too.
TEST(Convert, IntegersAreRoundedOnce) {
  const std::int64_t just_over = (std::int64_t{257} << 32) + 1;  // over the middle of two bf16
  EXPECT_EQ(static_cast<double>(converted<BF16>(just_over)), std::ldexp(258.0, 32));
  EXPECT_EQ(static_cast<double>(converted<BF16>(std::int64_t{257} << 32)), std::ldexp(256.0, 32));
  EXPECT_EQ(static_cast<double>(converted<BF16>(-just_over)), -std::ldexp(258.0, 32));
  EXPECT_EQ(static_cast<double>(converted<F16>(std::uint64_t{2049})), 2048.0);
  EXPECT_EQ(static_cast<double>(converted<F16>(std::int32_t{-2051})), -2052.0);
  EXPECT_EQ(converted<float>(std::int64_t{16777217}), 16777216.0F);
  EXPECT_EQ(static_cast<double>(converted<BF16>(std::numeric_limits<std::int64_t>::min())),
            -0x1p63);
}

TEST(Convert, FloatsToIntegersClampAndDropTheFraction) {
  EXPECT_EQ(converted<std::int8_t>(3.99F), 3);
  EXPECT_EQ(converted<std::int8_t>(-3.99F), -3);
  EXPECT_EQ(converted<std::int8_t>(1e9F), 127);
  EXPECT_EQ(converted<std::int8_t>(-1e9F), -128);
  EXPECT_EQ(converted<std::int8_t>(128.0F), 127);
  EXPECT_EQ(converted<std::int64_t>(0x1p63), std::numeric_limits<std::int64_t>::max());
  EXPECT_EQ(converted<std::uint8_t>(-0.5F), 0);
  EXPECT_EQ(converted<std::uint64_t>(1e30), std::numeric_limits<std::uint64_t>::max());
  EXPECT_EQ(converted<std::int64_t>(-1e30), std::numeric_limits<std::int64_t>::min());
  EXPECT_EQ(converted<std::int32_t>(std::nan("")), 0);
  EXPECT_EQ(converted<std::int32_t>(F16(-7.5F)), -7);
  EXPECT_TRUE(converted<bool>(0.25F));
  EXPECT_TRUE(converted<bool>(std::nan("")));
  EXPECT_FALSE(converted<bool>(-0.0));
  EXPECT_EQ(converted<float>(true), 1.0F);
}

TEST(Convert, EveryPairOfTypesKeepsSmallIntegers) {
  for (std::size_t i = 0; i < kDTypeCount; ++i) {
    for (std::size_t j = 0; j < kDTypeCount; ++j) {
      const auto from = static_cast<DType>(i);
      const auto to = static_cast<DType>(j);
      const std::vector<double> values{0, 1, 1, 0};
      std::vector<unsigned char> a(values.size() * 8), b(values.size() * 8);
      std::vector<double> back(values.size());
      convert(values.data(), DType::kF64, a.data(), from, values.size());
      convert(a.data(), from, b.data(), to, values.size());
      convert(b.data(), to, back.data(), DType::kF64, values.size());
      EXPECT_EQ(back, values) << name_of(from) << " to " << name_of(to);
    }
  }
}

TEST(Convert, DoubleToHalfIsTheNearestOfAll) {
  EXPECT_TRUE(rc::check("no bf16 or f16 lies closer", [] {
    const double v = *rc::gen::arbitrary<double>() * std::ldexp(1, *rc::gen::inRange(-60, 60));
    const auto b = static_cast<double>(BF16(v));
    BF16 up, down;
    up.bits = static_cast<std::uint16_t>(BF16(v).bits + 1);
    down.bits = static_cast<std::uint16_t>(BF16(v).bits - 1);
    RC_PRE(std::isfinite(b) && b != 0);
    for (const BF16 other : {up, down}) {
      if (std::isfinite(static_cast<float>(other))) {
        RC_ASSERT(std::abs(b - v) <= std::abs(static_cast<double>(other) - v));
      }
    }
  }));
}

}  // namespace
}  // namespace mlxtape
