// The number reader, without the formats that use it: a part of kernel_tests too, which other processors run.
#include "formats/real.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <random>
#include <string>
#include <vector>

namespace mlxtape::formats {
namespace {

// Two ways to read a number, of which a build uses one: the same bits, and the same numbers refused.
TEST(Real, IsTheSameByEitherLibrary) {
  std::vector<std::string> texts = {"0",
                                    "-0",
                                    "1",
                                    "1.5",
                                    "-2.5e-5",
                                    "1e308",
                                    "1.8e308",
                                    "-1e999",
                                    "5e-324",
                                    "2e-324",
                                    "1e-999",
                                    "0e999",
                                    "1e-310",
                                    "123456789012345678901234567890",
                                    "0.30000000000000004"};
  std::mt19937_64 random(5);
  for (int i = 0; i < 2000; ++i) {
    const auto value = std::bit_cast<double>(random());
    if (!std::isfinite(value)) continue;
    char text[40];
    std::snprintf(text, sizeof text, "%.17g", value);
    texts.emplace_back(text);
    double read = 0;
    EXPECT_TRUE(to_real(text, read)) << text;
    EXPECT_EQ(std::bit_cast<std::uint64_t>(read), std::bit_cast<std::uint64_t>(value)) << text;
  }
  for (const std::string& text : texts) {
    double one = 7, other = 7;
    EXPECT_EQ(to_real(text, one), to_real_by_c(text, other)) << text;
    EXPECT_EQ(std::bit_cast<std::uint64_t>(one), std::bit_cast<std::uint64_t>(other)) << text;
  }
  double value = 7;
  EXPECT_FALSE(to_real_by_c("1e999", value));
  EXPECT_FALSE(to_real_by_c("1e-999", value));
  EXPECT_EQ(value, 7);
}

}  // namespace
}  // namespace mlxtape::formats
