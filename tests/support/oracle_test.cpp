// The proof machinery itself: a comparison that cannot fail is a bug.
#include "support/oracle.h"

#include <gtest/gtest-spi.h>

#include <cmath>

namespace mlxtape::test {
namespace {

Refs refs(const std::vector<double>& values) {
  Refs r;
  for (const double v : values) r.push_back({v, std::abs(v)});
  return r;
}

TEST(Oracle, CountsEveryKindOfWrong) {
  const std::vector<double> v{1, -2, 3};
  const auto wrong = [&](const std::vector<double>& got) {
    return count_wrong(got, refs(v), DType::kF32, 1);
  };
  EXPECT_EQ(wrong(v), 0);
  EXPECT_EQ(wrong({1, -2, 3 * (1 + 0x1p-22)}), 0);
  EXPECT_EQ(wrong({1, -2, 3 * (1 + 0x1p-18)}), 1);
  EXPECT_EQ(wrong({1, -2, std::nan("")}), 1);
  EXPECT_EQ(wrong({1, -2, INFINITY}), 1);
  EXPECT_EQ(wrong({1, -2}), 1);
  EXPECT_EQ(wrong({1, -2, 3, 4}), 1);
  EXPECT_EQ(count_wrong({1}, {{std::nan(""), 1}}, DType::kF32, 1), 1);
  EXPECT_EQ(count_wrong({std::nan("")}, {{std::nan(""), 1}}, DType::kF32, 1), 0);
  EXPECT_EQ(count_wrong({INFINITY}, {{INFINITY, 1}}, DType::kF32, 1), 0);
}

TEST(Oracle, TheBoundFollowsTheStoredType) {
  EXPECT_LT(rounding_bound(DType::kF32, 1), 2e-6);
  EXPECT_GT(rounding_bound(DType::kBF16, 1), 3.9e-3);
  EXPECT_LT(rounding_bound(DType::kF16, 1), 5e-4);
  const std::vector<double> v{1, 2};
  EXPECT_EQ(count_wrong({1.003, 2}, refs(v), DType::kBF16, 1), 0);
  EXPECT_EQ(count_wrong({1.003, 2}, refs(v), DType::kF16, 1), 1);
}

// A scale far above the values makes any comparison blind, and expect_close must say so.
void compare_blindly() {
  expect_close("blind", {1, 2, 3}, {{1, 1e9}, {2, 1e9}, {3, 1e9}}, DType::kF32, 1);
}
TEST(Oracle, ABlindComparisonIsAFailure) {
  testing::TestPartResultArray found;
  {
    testing::ScopedFakeTestPartResultReporter reporter(
        testing::ScopedFakeTestPartResultReporter::INTERCEPT_ONLY_CURRENT_THREAD, &found);
    compare_blindly();
  }
  ASSERT_GT(found.size(), 0);
  EXPECT_NE(std::string(found.GetTestPartResult(0).message()).find("blind to"), std::string::npos);
}

TEST(Oracle, AWrongGradientIsAFailure) {
  const auto loss = [](const Arrays& at) {
    return at[0][0] * at[0][0] * at[0][1];
  };
  expect_gradient(loss, {{2, 3}}, {{12, 4}});
  testing::TestPartResultArray found;
  {
    testing::ScopedFakeTestPartResultReporter reporter(
        testing::ScopedFakeTestPartResultReporter::INTERCEPT_ONLY_CURRENT_THREAD, &found);
    expect_gradient(loss, {{2, 3}}, {{12, 4.0001}});
  }
  EXPECT_GT(found.size(), 0);
}

TEST(Oracle, NoiseIsSpreadAndRepeatable) {
  Noise a(7), b(7), c(8);
  double sum = 0, least = 1, most = -1;
  bool differs = false;
  for (int i = 0; i < 10000; ++i) {
    const double v = a.next();
    EXPECT_EQ(v, b.next());
    differs |= v != c.next();
    sum += v;
    least = std::min(least, v);
    most = std::max(most, v);
  }
  EXPECT_TRUE(differs);
  EXPECT_LT(std::abs(sum / 10000), 0.03);
  EXPECT_LT(least, -0.99);
  EXPECT_GT(most, 0.99);
}

}  // namespace
}  // namespace mlxtape::test
