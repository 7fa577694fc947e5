// Several arrays of two ways to one result, compared at once.
#pragma once

#include <algorithm>
#include <cmath>

#include "support/op_test.h"

namespace mlxtape::test {

// Alike but for the rounding of sums of `terms` numbers as large as the array's largest, which must not be 0.
inline void expect_same_arrays(const std::vector<std::vector<double>>& got,
                               const std::vector<std::vector<double>>& want, DType dtype,
                               std::int64_t terms) {
  ASSERT_EQ(got.size(), want.size());
  for (std::size_t i = 0; i < got.size(); ++i) {
    double most = 0;
    for (const double v : want[i]) most = std::max(most, std::abs(v));
    ASSERT_GT(most, 0) << i;
    EXPECT_EQ(count_wrong(got[i], refs_of(want[i], most), dtype, terms), 0) << i;
  }
}

}  // namespace mlxtape::test
