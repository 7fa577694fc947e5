#include "mlxtape/ops/log_softmax.h"

#include <rapidcheck.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <numeric>

#include "support/nan.h"
#include "support/op_test.h"

namespace mlxtape::test {
namespace {

struct Expected {
  Refs y, dx;
};

// The formula block of log_softmax.h, in double; [outer, cols, inner]. dx is made from the y given,
// which is what the device stored, or from the exact one.
Expected oracle(std::int64_t outer, std::int64_t cols, std::int64_t inner,
                const std::vector<double>& x, const std::vector<double>& dy,
                const std::vector<double>* stored_y = nullptr) {
  const auto n = static_cast<std::size_t>(outer * cols * inner);
  Expected e{Refs(n), Refs(n)};
  for (std::int64_t row = 0; row < outer * inner; ++row) {
    const auto at = [&](std::int64_t c) {
      return static_cast<std::size_t>((row / inner * cols + c) * inner + row % inner);
    };
    double m = -INFINITY, sum = 0, lost = 0, s = 0, s_abs = 0;
    for (std::int64_t c = 0; c < cols; ++c) m = std::max(m, x[at(c)]);
    for (std::int64_t c = 0; c < cols; ++c) {
      const double share = std::exp(x[at(c)] - m);
      sum += share;
      if (share > 0) lost += share * (m - x[at(c)]) / 16;
      s += dy[at(c)];
      s_abs += std::abs(dy[at(c)]);
    }
    for (std::int64_t c = 0; c < cols; ++c) {
      // A relative error of the sum is an absolute one of its logarithm; x − m is rounded once, which
      // is an error of half an ulp of it in units of its share.
      const double below = x[at(c)] - m;
      e.y[at(c)] = {below - std::log(sum), 1 + std::abs(below) + std::log(sum) + lost / sum};
      const double y = stored_y != nullptr ? (*stored_y)[at(c)] : e.y[at(c)].value;
      const double size = std::exp(y) * (y > -200 ? 1 + std::abs(y) / 8 : 1);
      e.dx[at(c)] = {dy[at(c)] - std::exp(y) * s, std::abs(dy[at(c)]) + size * s_abs};
    }
  }
  return e;
}

// Sums are made of many short ones: no chain of additions is longer than this.
std::int64_t chain(std::int64_t n) { return std::min<std::int64_t>(n, 1024); }

std::vector<double> values(const Refs& refs) {
  std::vector<double> v;
  for (const Ref& r : refs) v.push_back(r.value);
  return v;
}

TEST(LogSoftmaxOracle, GradientMatchesCentralDifference) {
  Noise noise(1);
  const auto x = random_values(noise, 3 * 7 * 2, DType::kF64, 3);
  const auto dy = random_values(noise, 3 * 7 * 2, DType::kF64);
  const auto loss = [&](const Arrays& at) {
    const auto y = values(oracle(3, 7, 2, at[0], dy).y);
    return std::inner_product(y.begin(), y.end(), dy.begin(), 0.0);
  };
  expect_gradient(loss, {x}, {values(oracle(3, 7, 2, x, dy).dx)});
}

TEST(LogSoftmaxCheck, SaysWhatIsWrong) {
  const auto f32 = Tensor::meta({4, 2});
  const auto fwd = [](const Tensor& x, std::int64_t axis) {
    return ops::log_softmax_check(x, axis);
  };
  const auto bwd = [](const Tensor& y, const Tensor& dy) {
    return ops::log_softmax_backward_check(y, dy, -1);
  };
  expect_refused({
      {"rank 0", fwd(Tensor::meta({}), 0), Errc::kShape, "at least one axis, got []"},
      {"axis past the end", fwd(f32, 2), Errc::kArgument, "in [-2, 2), got 2"},
      {"integers", fwd(Tensor::meta({4}, DType::kI32), 0), Errc::kDType, "got i32"},
      {"y is refused like x", bwd(Tensor::meta({}), Tensor::meta({})), Errc::kShape, "got []"},
      {"another shape", bwd(f32, Tensor::meta({2, 4})), Errc::kShape, "[4, 2], got [2, 4]"},
      {"another type", bwd(f32, Tensor::meta({4, 2}, DType::kBF16)), Errc::kDType, "got bf16"},
      {"another device", bwd(f32, Tensor::meta({4, 2}, DType::kF32, Backend::kMetal)),
       Errc::kDevice, "got metal"},
  });
  EXPECT_FALSE(fwd(Tensor::meta({0, 3}, DType::kF16), 1));
}

class LogSoftmax : public OnDevice {
 protected:
  // Forward and backward of one shape against the oracle.
  void check(const Shape& shape, std::int64_t axis, DType dtype, double size = 4,
             bool strided = false, std::int64_t offset = 0) {
    const std::int64_t a = *normal_axis(axis, shape.rank());
    std::int64_t outer = 1, inner = 1;
    for (std::int64_t i = 0; i < a; ++i) outer *= shape[i];
    for (std::int64_t i = a + 1; i < shape.rank(); ++i) inner *= shape[i];
    Noise noise(static_cast<std::uint64_t>(outer + 31 * shape[a] + 97 * inner));
    const std::int64_t n = outer * shape[a] * inner;
    check_values(outer, shape[a], inner, shape, axis, dtype, random_values(noise, n, dtype, size),
                 random_values(noise, n, dtype), strided, offset);
  }
  void check_values(std::int64_t outer, std::int64_t cols, std::int64_t inner, const Shape& shape,
                    std::int64_t axis, DType dtype, const std::vector<double>& x,
                    const std::vector<double>& dy, bool strided, std::int64_t offset) {
    const auto put = [&](const std::vector<double>& v) {
      return strided ? upload_strided(v, shape, dtype) : upload(v, shape, dtype, offset);
    };
    const std::string at =
        to_string(shape) + " axis " + std::to_string(axis) + " " + name_of(dtype);
    const Tensor y = ops::log_softmax(encoder(), put(x), axis);
    const auto y_stored = download(y);
    const Expected want = oracle(outer, cols, inner, x, dy, &y_stored);
    expect_close("y " + at, y_stored, want.y, dtype, chain(cols));
    const Tensor dx = ops::log_softmax_backward(encoder(), y, put(dy), axis);
    expect_close("dx " + at, download(dx), want.dx, dtype, chain(cols));
  }
};

constexpr DType kTypes[] = {DType::kF32, DType::kF16, DType::kBF16};

TEST_P(LogSoftmax, MatchesOracleForEveryShape) {
  for (const DType dtype : kTypes) {
    for (const std::int64_t rows : {0, 1, 2, 5}) {
      for (const std::int64_t cols : {1, 2, 7, 31, 32, 33, 255, 256, 257, 2047, 2048, 4097}) {
        check({rows, cols}, -1, dtype);
      }
    }
  }
}

// The lengths at which a GPU changes from one form to the next, and rows cut over a CPU's threads.
TEST_P(LogSoftmax, MatchesOracleForEveryForm) {
  for (const std::int64_t cols : {64, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 151936}) {
    check({2, cols}, -1, DType::kF32);
    check({3, cols}, -1, DType::kBF16);
  }
  check({2, 250000}, -1, DType::kF16);
  check({2, 151937}, -1, DType::kBF16);
  check({1, 300000}, -1, DType::kF32);
  check({scaled(33), 40000}, -1, DType::kBF16);
}

TEST_P(LogSoftmax, MatchesOracleOnEveryAxis) {
  for (const DType dtype : kTypes) {
    check({3, 5, 7}, 0, dtype);
    check({3, 5, 7}, 1, dtype);
    check({2, 33, 300}, 1, dtype);
    check({9}, 0, dtype);
    check({2, 1, 3, 2, 1, 2, 2, 5}, 2, dtype);
  }
}

TEST_P(LogSoftmax, MatchesOracleForViews) {
  for (const DType dtype : kTypes) {
    check({5, 33}, -1, dtype, 4, true);
    check({5, 33}, 0, dtype, 4, true);
    for (const std::int64_t offset : {1, 3, 17}) check({5, 257}, -1, dtype, 4, false, offset);
    check({scaled(1100), 2047}, -1, dtype, 4, false, 3);  // written past the cache
  }
}

TEST_P(LogSoftmax, BlocksFarFromEachOther) {
  const auto padded = [](std::int64_t c) {
    return c < 100 ? -INFINITY : -200;
  };
  const auto masked_odd = [](std::int64_t c) {
    return c / 2048 % 2 == 1 ? -INFINITY : 0;
  };
  const auto rising = [](std::int64_t c) {
    const std::int64_t block = c / 2048;
    return static_cast<double>(block * 200 - 200);
  };
  const std::function<double(std::int64_t)> kinds[] = {padded, masked_odd, rising};
  for (const DType dtype : kTypes) {
    for (const std::int64_t cols : {1024, 5003, 65536}) {
      for (const auto& kind : kinds) {
        Noise noise(7);
        std::vector<double> x;
        for (std::int64_t c = 0; c < cols; ++c)
          x.push_back(round_to(dtype, kind(c) + noise.next()));
        const Tensor y = ops::log_softmax(encoder(), upload(x, {1, cols}, dtype));
        const auto dy = random_values(noise, cols, dtype);
        const auto stored = download(y);
        const Expected want = oracle(1, cols, 1, x, dy, &stored);
        for (std::size_t c = 0; c < x.size(); ++c) {
          if (x[c] == -INFINITY) {
            EXPECT_EQ(stored[c], -INFINITY);
          }
        }
        Refs finite;
        std::vector<double> got;
        for (std::size_t c = 0; c < x.size(); ++c) {
          if (x[c] == -INFINITY) continue;
          finite.push_back(want.y[c]);
          got.push_back(stored[c]);
        }
        expect_close("y", got, finite, dtype, chain(cols));
        const Tensor dx = ops::log_softmax_backward(encoder(), y, upload(dy, {1, cols}, dtype));
        expect_close("dx", download(dx), want.dx, dtype, chain(cols));
      }
    }
  }
}

TEST_P(LogSoftmax, ExtremeNumbers) {
  const double inf = INFINITY, nan = std::nan("");
  const auto run = [&](const std::vector<double>& x) {
    const auto n = static_cast<std::int64_t>(x.size());
    return download(ops::log_softmax(encoder(), upload(x, {1, n}, DType::kF32)));
  };
  EXPECT_EQ(run({-inf, 3, -inf}), (std::vector<double>{-inf, 0, -inf}));
  EXPECT_EQ(run({7}), (std::vector<double>{0}));
  for (std::vector<double> bad : {std::vector<double>{-inf, -inf}, {inf, 1}, {1, nan, 2}}) {
    for (const std::size_t length : {bad.size(), std::size_t{5000}}) {
      bad.resize(length, -inf);
      for (const double v : run(bad)) EXPECT_TRUE(std::isnan(v)) << v;
    }
  }
  for (const DType dtype : kTypes) check({4, 300}, -1, dtype, 1e4);
  check({3, 3000}, -1, DType::kF32, 1e4);
}

TEST_P(LogSoftmax, SameBitsOnEveryRun) {
  Noise noise(5);
  for (const Shape& shape : {Shape{scaled(300), 512}, Shape{3, 40000}}) {
    for (const DType dtype : kTypes) {
      const std::int64_t n = *element_count(shape);
      const Tensor x = upload(random_values(noise, n, dtype, 4), shape, dtype);
      const Tensor dy = upload(random_values(noise, n, dtype), shape, dtype);
      expect_repeatable(encoder(), [&] {
        const Tensor y = ops::log_softmax(encoder(), x);
        return std::vector<Tensor>{y, ops::log_softmax_backward(encoder(), y, dy)};
      });
    }
  }
}

TEST_P(LogSoftmax, GradientThroughTheTape) {
  Noise noise(9);
  const auto x = random_values(noise, 4 * 33, DType::kF32, 3);
  const auto dy = random_values(noise, 4 * 33, DType::kF32);
  Tape tape(encoder());
  const Tensor watched = tape.watch(upload(x, {4, 33}, DType::kF32));
  const Tensor y = ops::log_softmax(tape, watched);
  tape.backward(y, upload(dy, {4, 33}, DType::kF32));
  const auto stored = download(y);
  expect_close("dx", download(tape.grad(watched)), oracle(4, 33, 1, x, dy, &stored).dx, DType::kF32,
               33);
  ops::log_softmax(tape, upload(x, {4, 33}, DType::kF32));
  EXPECT_EQ(tape.nodes(), 0) << "nothing tracked, nothing recorded";
}

// mlx.nn.log_softmax(x, axis=…), and mx.grad of (log_softmax(x)·dy).sum().
TEST_P(LogSoftmax, AsMlx) {
  Tape tape(encoder());
  const Tensor x =
      tape.watch(upload({1, 2, 3, -1, 0, 0, 0, 5, -2, 0.5, 0.25, 1}, {3, 4}, DType::kF32));
  const Tensor y = ops::log_softmax(tape, x);
  expect_close(
      "y", download(y),
      refs_of({-2.4197166, -1.4197166, -0.419716656, -4.41971684, -5.02001238, -5.02001238,
               -5.02001238, -0.0200122558, -3.75550413, -1.25550413, -1.50550413, -0.755504072},
              1),
      DType::kF32, 4);
  expect_close(
      "along axis 0", download(ops::log_softmax(encoder(), x, 0)),
      refs_of({-0.349012166, -0.306355804, -0.107701212, -6.02058125, -1.34901214, -2.30635571,
               -3.1077013, -0.0205811393, -3.34901214, -1.80635583, -2.8577013, -4.02058125},
              1),
      DType::kF32, 3);
  tape.backward(y, upload({1, 0, -1, 0.5, 2, 1, 0, 0, 0.25, -0.5, 1, 3}, {3, 4}, DType::kF32));
  expect_close(
      "dx", download(tape.grad(x)),
      refs_of({0.95552659, -0.120891258, -1.3286165, 0.493981183, 1.9801867, 0.980186641,
               -0.0198133364, -2.94055986, 0.162292525, -1.56849563, 0.167854726, 1.23834848},
              1),
      DType::kF32, 4);
}

TEST_P(LogSoftmax, RandomShapesAndAxes) {
  EXPECT_TRUE(rc::check("log_softmax matches its oracle", [this] {
    Shape shape;
    const int rank = *rc::gen::inRange(1, 5);
    for (int i = 0; i < rank; ++i) shape.push_back(*rc::gen::inRange(1, 9));
    shape[*rc::gen::inRange(0, rank)] = *rc::gen::inRange(1, 80);
    check(shape, *rc::gen::inRange(-rank, rank),
          *rc::gen::elementOf(std::vector<DType>(std::begin(kTypes), std::end(kTypes))), 4,
          *rc::gen::arbitrary<bool>());
    RC_ASSERT(!HasFailure());
  }));
}

TEST_P(LogSoftmax, NaNFillsItsRowAlongAnyAxis) {
  for (const DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
    for (const std::size_t at : {0, 17, 39}) {  // in a column of 40 rows, the first, one, the last
      std::vector<double> x(40 * 3, 0.5);
      x[at * 3 + 1] = NAN;
      std::vector<std::size_t> column;
      for (std::size_t r = 0; r < 40; ++r) column.push_back(r * 3 + 1);
      const Tensor y = ops::log_softmax(encoder(), upload(x, {40, 3}, dtype), 0);
      EXPECT_EQ(nans_of(download(y)), column);
      const Tensor dy = upload(std::vector<double>(120, 1), {40, 3}, dtype);
      EXPECT_EQ(nans_of(download(ops::log_softmax_backward(encoder(), y, dy, 0))), column);
      const Tensor rows = ops::log_softmax(encoder(), upload(x, {3, 40}, dtype));
      EXPECT_EQ(nans_of(download(rows)), places((at * 3 + 1) / 40 * 40, 40));
    }
  }
}

MT_ON_EVERY_BACKEND(LogSoftmax);

}  // namespace
}  // namespace mlxtape::test
