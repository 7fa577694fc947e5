#include "mlxtape/ops/dampen.h"

#include <cmath>
#include <numeric>

#include "support/op_test.h"

namespace mlxtape::test {
namespace {

struct Expected {
  Refs y, dx, dgain;
};

// The formula block of dampen.h, in double; [rows, cols].
Expected oracle(std::int64_t rows, std::int64_t cols, const std::vector<double>& x_all,
                const std::vector<double>& gain, const std::vector<double>& dy_all) {
  Expected e;
  for (std::int64_t r = 0; r < rows; ++r) {
    const double* x = x_all.data() + r * cols;
    const double* dy = dy_all.data() + r * cols;
    const double g = gain[static_cast<std::size_t>(r)];
    double m = 0, s = 0, s_abs = 0;
    for (std::int64_t c = 0; c < cols; ++c) {
      m += x[c] * x[c] / static_cast<double>(cols);
      s += dy[c] * x[c];
      s_abs += std::abs(dy[c] * x[c]);
    }
    const double u = 1 / (1 + g * m);
    for (std::int64_t c = 0; c < cols; ++c) {
      const double w = 2 / static_cast<double>(cols) * g * u * u * x[c];
      e.y.push_back({u * x[c], std::abs(u * x[c])});
      e.dx.push_back({u * dy[c] - w * s, std::abs(u * dy[c]) + std::abs(w) * s_abs});
    }
    e.dgain.push_back({-m * u * u * s, m * u * u * s_abs});
  }
  return e;
}

std::vector<double> values(const Refs& refs) {
  std::vector<double> v;
  for (const Ref& r : refs) v.push_back(r.value);
  return v;
}

std::vector<double> random_gain(Noise& noise, std::int64_t rows) {
  std::vector<double> gain = random_values(noise, rows, DType::kF32);
  for (double& g : gain) g = std::abs(g);
  return gain;
}

TEST(DampenOracle, GradientMatchesCentralDifference) {
  Noise noise(1);
  const auto x = random_values(noise, 3 * 7, DType::kF64, 2);
  const auto gain = random_gain(noise, 3);
  const auto dy = random_values(noise, 3 * 7, DType::kF64);
  const auto loss = [&](const Arrays& at) {
    const auto y = values(oracle(3, 7, at[0], at[1], dy).y);
    return std::inner_product(y.begin(), y.end(), dy.begin(), 0.0);
  };
  const Expected want = oracle(3, 7, x, gain, dy);
  expect_gradient(loss, {x, gain}, {values(want.dx), values(want.dgain)});
}

TEST(DampenCheck, SaysWhatIsWrong) {
  const auto x = Tensor::meta({4, 2});
  const auto row = Tensor::meta({4});
  const auto far = [](Shape shape) {
    return Tensor::meta(shape, DType::kF32, Backend::kMetal);
  };
  const auto bwd = [&](const Tensor& m, const Tensor& dy) {
    return ops::dampen_backward_check(x, row, m, dy);
  };
  expect_refused({
      {"rank 1", ops::dampen_check(row, row), Errc::kShape, "x must be [R, C], got [4]"},
      {"no column", ops::dampen_check(Tensor::meta({4, 0}), row), Errc::kShape, "got [4, 0]"},
      {"integers", ops::dampen_check(Tensor::meta({4, 2}, DType::kI32), row), Errc::kDType,
       "got i32"},
      {"gain too long", ops::dampen_check(x, Tensor::meta({5})), Errc::kShape,
       "gain must be [R] = [4], got [5]"},
      {"gain not f32", ops::dampen_check(x, Tensor::meta({4}, DType::kF16)), Errc::kDType,
       "got f16"},
      {"gain elsewhere", ops::dampen_check(x, far({4})), Errc::kDevice, "got metal"},
      {"x is refused as forward does", ops::dampen_backward_check(row, row, row, row), Errc::kShape,
       "x must be"},
      {"m too long", bwd(Tensor::meta({5}), x), Errc::kShape, "m must be [R] = [4], got [5]"},
      {"dy transposed", bwd(row, Tensor::meta({2, 4})), Errc::kShape, "[4, 2], got [2, 4]"},
      {"dy of another type", bwd(row, Tensor::meta({4, 2}, DType::kBF16)), Errc::kDType,
       "got bf16"},
      {"dy elsewhere", bwd(row, far({4, 2})), Errc::kDevice, "got metal"},
  });
  EXPECT_FALSE(ops::dampen_check(Tensor::meta({0, 3}), Tensor::meta({0})));
}

class Dampen : public OnDevice {
 protected:
  void check(std::int64_t rows, std::int64_t cols, DType dtype, bool strided = false) {
    Noise noise(static_cast<std::uint64_t>(rows + 31 * cols));
    const auto x = random_values(noise, rows * cols, dtype, 2);
    const auto gain = random_gain(noise, rows);
    const auto dy = random_values(noise, rows * cols, dtype);
    const auto put = [&](const std::vector<double>& v) {
      return strided ? upload_strided(v, {rows, cols}, dtype) : upload(v, {rows, cols}, dtype);
    };
    const Expected want = oracle(rows, cols, x, gain, dy);
    const std::string at = to_string(Shape{rows, cols}) + " " + name_of(dtype);

    const Tensor x_in = put(x);
    const Tensor gain_in = upload(gain, {rows}, DType::kF32);
    const auto [y, m] = ops::dampen(encoder(), x_in, gain_in);
    expect_close("y " + at, download(y), want.y, dtype, cols);
    const auto [dx, dgain] = ops::dampen_backward(encoder(), x_in, gain_in, m, put(dy));
    expect_close("dx " + at, download(dx), want.dx, dtype, 2 * cols);
    expect_close("dgain " + at, download(dgain), want.dgain, DType::kF32, 2 * cols);
  }
};

constexpr DType kTypes[] = {DType::kF32, DType::kF16, DType::kBF16};

TEST_P(Dampen, MatchesOracleForEveryShape) {
  for (const DType dtype : kTypes) {
    for (const std::int64_t rows : {0, 1, 2, 5}) {
      for (const std::int64_t cols : {1, 2, 31, 32, 33, 255, 256, 257, 2048}) {
        check(rows, cols, dtype);
      }
    }
  }
}

TEST_P(Dampen, MatchesOracleForViews) {
  for (const DType dtype : kTypes) check(5, 33, dtype, true);
}

TEST_P(Dampen, SameBitsOnEveryRun) {
  Noise noise(5);
  const Tensor x = upload(random_values(noise, 300 * 129, DType::kF32), {300, 129}, DType::kF32);
  const Tensor gain = upload(random_gain(noise, 300), {300}, DType::kF32);
  expect_repeatable(encoder(), [&] {
    const auto [y, m] = ops::dampen(encoder(), x, gain);
    const auto [dx, dgain] = ops::dampen_backward(encoder(), x, gain, m, y);
    return std::vector<Tensor>{y, m, dx, dgain};
  });
}

MT_ON_EVERY_BACKEND(Dampen);

}  // namespace
}  // namespace mlxtape::test
