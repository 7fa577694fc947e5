// What matmul does with numbers at the edges of their type, and with what lies behind a matrix.
#include <cmath>
#include <limits>
#include <vector>

#include "mlxtape/ops/matmul.h"
#include "support/nan.h"
#include "support/op_test.h"

namespace mlxtape::test {
namespace {

using Values = std::vector<double>;

class MatmulEdges : public OnDevice {};

TEST_P(MatmulEdges, InfinitiesAndNaNsStayInTheirRowsAndColumns) {
  const double inf = INFINITY;
  for (const std::int64_t n : {3, 40}) {
    Values a(static_cast<std::size_t>(20 * 20), 1), b(static_cast<std::size_t>(20 * n), 1);
    a[20 * 7 + 3] = std::nan("");
    b[static_cast<std::size_t>(5 * n + 1)] = inf;
    const Tensor given = upload(a, {20, 20}, DType::kF32), by = upload(b, {20, n}, DType::kF32);
    const auto y = download(ops::matmul(encoder(), given, by));
    for (std::int64_t i = 0; i < 20 * n; ++i) {
      const double v = y[static_cast<std::size_t>(i)];
      EXPECT_TRUE(i / n == 7 ? std::isnan(v) : v == (i % n == 1 ? inf : 20)) << i;
    }
  }
}

// What lies behind the last k is not the matrix's: NaN, also times 0.
TEST_P(MatmulEdges, NothingBehindAnOddDepthIsTaken) {
  for (const std::int64_t k : {1, 33, 255}) {
    Values rows, columns;
    for (std::int64_t i = 0; i < 40 * (k + 1); ++i) {
      rows.push_back(i % (k + 1) == k ? std::nan("") : 1);
      columns.push_back(i / 40 == k ? std::nan("") : 1);
    }
    const Tensor a = upload(rows, {40, k + 1}, DType::kBF16).slice(1, 0, k);
    const Tensor b = upload(columns, {k + 1, 40}, DType::kBF16).slice(0, 0, k);
    for (const Tensor& y : {ops::matmul(encoder(), a, b),
                            ops::matmul(encoder(), b.transpose({1, 0}), a.transpose({1, 0}))}) {
      EXPECT_EQ(download(y), Values(1600, static_cast<double>(k)));
    }
  }
}

TEST_P(MatmulEdges, TiesGoToEven) {
  const std::pair<DType, double> types[] = {{DType::kBF16, 257}, {DType::kF16, 2049}};
  for (const auto& [dtype, missing] : types) {  // the first integer that the type does not have
    for (const std::int64_t n : {2, 40}) {
      const Values a(2 * 20, 1);
      Values b(static_cast<std::size_t>(2 * n), missing - 1);
      std::fill(b.begin() + n, b.end(), 1);
      const Tensor y = ops::matmul(encoder(), upload(a, {20, 2}, dtype), upload(b, {2, n}, dtype));
      EXPECT_EQ(download(y), Values(static_cast<std::size_t>(20 * n), missing - 1));
    }
  }
}

// What becomes of a sum: activations, and their slopes on the way back.
TEST_P(MatmulEdges, NaNPassesEveryActivation) {
  using ops::Activation;
  for (const auto activation : {Activation::kSilu, Activation::kGelu, Activation::kGeluTanh}) {
    for (const DType dtype : {DType::kF32, DType::kBF16}) {
      std::vector<double> a(3 * 20, 0.25);
      a[20 + 3] = NAN;
      const Tensor x = upload(a, {3, 20}, dtype);
      const Tensor w = upload(std::vector<double>(20 * 24, 0.5), {20, 24}, dtype);
      ops::MatmulOptions options;
      options.activation = activation;
      const auto got = ops::matmul_with_z(encoder(), x, w, options);
      EXPECT_EQ(nans_of(download(got.y)), places(24, 24));
      const Tensor dy = upload(std::vector<double>(3 * 24, 1), {3, 24}, dtype);
      const auto g =
          ops::matmul_backward(encoder(), x, w, got.z, dy, activation, {true, false, false});
      EXPECT_EQ(nans_of(download(g.da)), places(20, 20));
    }
  }
}

MT_ON_EVERY_BACKEND(MatmulEdges);

}  // namespace
}  // namespace mlxtape::test
