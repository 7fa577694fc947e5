#include "mlxtape/ops/softmax.h"

#include <rapidcheck.h>

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

// The formula block of softmax.h, in double; [outer, cols, inner]. dx is made from the y given,
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
    double m = -INFINITY, sum = 0, s = 0, s_abs = 0;
    for (std::int64_t c = 0; c < cols; ++c) m = std::max(m, x[at(c)]);
    for (std::int64_t c = 0; c < cols; ++c) {
      e.y[at(c)].value = std::exp(x[at(c)] - m);
      sum += e.y[at(c)].value;
    }
    for (std::int64_t c = 0; c < cols; ++c) e.y[at(c)].value /= sum;
    const auto y = [&](std::int64_t c) {
      return stored_y != nullptr ? (*stored_y)[at(c)] : e.y[at(c)].value;
    };
    for (std::int64_t c = 0; c < cols; ++c) {
      s += y(c) * dy[at(c)];
      s_abs += std::abs(y(c) * dy[at(c)]);
    }
    for (std::int64_t c = 0; c < cols; ++c) {
      // x − m is rounded once: an error of half an ulp of it, in units of y.
      const double exact = e.y[at(c)].value;
      const double lost = m == x[at(c)] || exact == 0 ? 0 : std::abs(x[at(c)] - m) / 16;
      e.y[at(c)] = {exact, exact * (1 + lost)};
      e.dx[at(c)] = {y(c) * (dy[at(c)] - s), std::abs(y(c)) * (std::abs(dy[at(c)]) + s_abs)};
    }
  }
  return e;
}

std::vector<double> values(const Refs& refs) {
  std::vector<double> v;
  for (const Ref& r : refs) v.push_back(r.value);
  return v;
}

TEST(SoftmaxOracle, GradientMatchesCentralDifference) {
  Noise noise(1);
  const auto x = random_values(noise, 3 * 7 * 2, DType::kF64, 3);
  const auto dy = random_values(noise, 3 * 7 * 2, DType::kF64);
  const auto loss = [&](const Arrays& at) {
    const auto y = values(oracle(3, 7, 2, at[0], dy).y);
    return std::inner_product(y.begin(), y.end(), dy.begin(), 0.0);
  };
  expect_gradient(loss, {x}, {values(oracle(3, 7, 2, x, dy).dx)});
}

TEST(SoftmaxCheck, SaysWhatIsWrong) {
  const auto f32 = Tensor::meta({4, 2});
  const auto fwd = [](const Tensor& x, std::int64_t axis) {
    return ops::softmax_check(x, axis);
  };
  const auto bwd = [](const Tensor& y, const Tensor& dy) {
    return ops::softmax_backward_check(y, dy, -1);
  };
  expect_refused({
      {"rank 0", fwd(Tensor::meta({}), 0), Errc::kShape, "at least one axis, got []"},
      {"axis past the end", fwd(f32, 2), Errc::kArgument, "in [-2, 2), got 2"},
      {"axis before the start", fwd(f32, -3), Errc::kArgument, "got -3"},
      {"integers", fwd(Tensor::meta({4}, DType::kI32), 0), Errc::kDType, "got i32"},
      {"double", fwd(Tensor::meta({4}, DType::kF64), 0), Errc::kDType, "got f64"},
      {"y is refused like x", bwd(Tensor::meta({}), Tensor::meta({})), Errc::kShape, "got []"},
      {"another shape", bwd(f32, Tensor::meta({2, 4})), Errc::kShape, "[4, 2], got [2, 4]"},
      {"another type", bwd(f32, Tensor::meta({4, 2}, DType::kBF16)), Errc::kDType, "got bf16"},
      {"another device", bwd(f32, Tensor::meta({4, 2}, DType::kF32, Backend::kMetal)),
       Errc::kDevice, "got metal"},
  });
  EXPECT_FALSE(fwd(Tensor::meta({0, 3}, DType::kF16), 1));
}

class Softmax : public OnDevice {
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
    const auto x = random_values(noise, n, dtype, size);
    const auto dy = random_values(noise, n, dtype);
    const auto put = [&](const std::vector<double>& v) {
      return strided ? upload_strided(v, shape, dtype) : upload(v, shape, dtype, offset);
    };
    const std::string at =
        to_string(shape) + " axis " + std::to_string(axis) + " " + name_of(dtype);
    const Tensor y = ops::softmax(encoder(), put(x), axis);
    const auto y_stored = download(y);
    const Expected want = oracle(outer, shape[a], inner, x, dy, &y_stored);
    expect_close("y " + at, y_stored, want.y, dtype, shape[a]);
    const Tensor dx = ops::softmax_backward(encoder(), y, put(dy), axis);
    expect_close("dx " + at, download(dx), want.dx, dtype, shape[a]);
  }
};

constexpr DType kTypes[] = {DType::kF32, DType::kF16, DType::kBF16};

TEST_P(Softmax, MatchesOracleForEveryShape) {
  for (const DType dtype : kTypes) {
    for (const std::int64_t rows : {0, 1, 2, 5}) {
      for (const std::int64_t cols : {1, 2, 7, 31, 32, 33, 255, 256, 257, 512, 2048, 4096, 4097}) {
        check({rows, cols}, -1, dtype);
      }
    }
  }
}

TEST_P(Softmax, MatchesOracleForLongRows) {
  for (const DType dtype : kTypes) {
    check({2, 32768}, -1, dtype);
    check({2, 151937}, -1, dtype);  // cut over threads in f32, in one piece in 16 bits
  }
  check({1, 1000003}, -1, DType::kBF16);
  check({3, 1000003}, -1, DType::kF32);
  check({2, 1000000}, -1, DType::kF32);
  // More rows than are worked on at once, of the lengths that take 1, 2, 4 and 8 blocks of a GPU.
  check({scaled(300), 12288}, -1, DType::kF32);
  check({scaled(300), 20000}, -1, DType::kBF16);
  check({scaled(140), 65536}, -1, DType::kF32);
  check({scaled(70), 131072}, -1, DType::kF16);
  check({scaled(34), 262144}, -1, DType::kF32);
}

// The lengths at which a GPU changes from one form to the next; few enough for its slow checkers.
TEST_P(Softmax, MatchesOracleForEveryForm) {
  for (const std::int64_t cols :
       {16, 64, 128, 256, 512, 1024, 2048, 8192, 16384, 32768, 65536, 151936, 262144, 524288}) {
    check({2, cols}, -1, DType::kF32);
    check({3, cols}, -1, DType::kBF16);
  }
  check({2, 65537}, -1, DType::kF32);
  check({2, 700000}, -1, DType::kF16);
  check({scaled(40), 151936}, -1, DType::kBF16);  // several rows for every cluster
  check({scaled(20), 65540}, -1, DType::kF32);
  check({70, 65600}, -1, DType::kBF16);  // more long rows than are cut for their number
  check({5, 256}, -1, DType::kF32, 4, false, 1);
}

TEST_P(Softmax, MatchesOracleOnEveryAxis) {
  for (const DType dtype : kTypes) {
    check({3, 5, 7}, 0, dtype);
    check({3, 5, 7}, 1, dtype);
    check({3, 5, 7}, -1, dtype);
    check({2, 33, 300}, 1, dtype);
    check({9}, 0, dtype);
    check({2, 1, 3, 2, 1, 2, 2, 5}, 2, dtype);
  }
}

TEST_P(Softmax, MatchesOracleForViews) {
  for (const DType dtype : kTypes) {
    check({5, 33}, -1, dtype, 4, true);
    check({5, 33}, 0, dtype, 4, true);
    for (const std::int64_t offset : {1, 3, 17}) check({5, 257}, -1, dtype, 4, false, offset);
  }
}

// Large enough to be written past the cache, with rows that start in the middle of a line.
TEST_P(Softmax, MatchesOracleWhenStreamed) {
  for (const DType dtype : kTypes) check({scaled(1100), 2047}, -1, dtype, 4, false, 3);
}

// Rows of several blocks of 2048 columns: what the first elements of a block say about the rest of it,
// and one block about the others, is of no use here.
TEST_P(Softmax, BlocksFarFromEachOther) {
  const auto padded = [](std::int64_t c) {
    return c < 100 ? -INFINITY : -200;
  };
  const auto padded_near_zero = [](std::int64_t c) {
    return c < 100 ? -INFINITY : 0;
  };
  const auto one_number = [](std::int64_t c) {
    return c == 1900 ? 0 : -INFINITY;
  };
  const auto masked_even = [](std::int64_t c) {
    return c / 2048 % 2 == 0 ? -INFINITY : 0;
  };
  const auto masked_odd = [](std::int64_t c) {
    return c / 2048 % 2 == 1 ? -INFINITY : 0;
  };
  const auto rising = [](std::int64_t c) {
    const std::int64_t block = c / 2048;
    return static_cast<double>(block * 200 - 200);
  };
  // Within a block far above its first elements, yet far below the first block.
  const auto low = [](std::int64_t c) {
    return c < 2048 ? 0.0 : c % 2048 < 64 ? -98.0 : -80.0;
  };
  const std::function<double(std::int64_t)> kinds[] = {padded, masked_even,      masked_odd, rising,
                                                       low,    padded_near_zero, one_number};
  for (const DType dtype : kTypes) {
    for (const std::int64_t cols : {1024, 2047, 2048, 5000, 5003, 65536, 250007, 262144}) {
      for (std::size_t kind = 0; kind < std::size(kinds); ++kind) {
        if (kind == 1 && cols <= 2048) continue;  // nothing but -inf
        if (kind == 6 && cols <= 1900) continue;
        Noise noise(kind + 1);
        std::vector<double> x;
        for (std::int64_t c = 0; c < cols; ++c) {
          x.push_back(round_to(dtype, kinds[kind](c) + noise.next()));
        }
        const auto dy = random_values(noise, cols, dtype);
        const Tensor y = ops::softmax(encoder(), upload(x, {1, cols}, dtype));
        const auto stored = download(y);
        const Expected want = oracle(1, cols, 1, x, dy, &stored);
        const std::string at =
            std::to_string(kind) + ", " + std::to_string(cols) + " columns, " + name_of(dtype);
        expect_close("y of kind " + at, stored, want.y, dtype, cols);
        const Tensor dx = ops::softmax_backward(encoder(), y, upload(dy, {1, cols}, dtype));
        expect_close("dx of kind " + at, download(dx), want.dx, dtype, cols);
      }
    }
  }
}

TEST_P(Softmax, ExtremeNumbers) {
  const double inf = INFINITY, nan = std::nan("");
  const auto run = [&](const std::vector<double>& x) {
    const auto n = static_cast<std::int64_t>(x.size());
    return download(ops::softmax(encoder(), upload(x, {1, n}, DType::kF32)));
  };
  EXPECT_EQ(run({-inf, 3, -inf}), (std::vector<double>{0, 1, 0}));
  EXPECT_EQ(run({3e38, -3e38}), (std::vector<double>{1, 0}));
  EXPECT_EQ(run({7}), (std::vector<double>{1}));
  for (std::vector<double> bad : {std::vector<double>{-inf, -inf}, {inf, 1}, {1, nan, 2}}) {
    for (const std::size_t length : {bad.size(), std::size_t{5000}}) {
      bad.resize(length, -inf);
      for (const double v : run(bad)) EXPECT_TRUE(std::isnan(v)) << v;
    }
  }
  check({4, 300}, -1, DType::kF32, 1e4);  // most results are 0 or subnormal
  check({4, 5000}, -1, DType::kF32, 90);
}

TEST_P(Softmax, TiesGoToEven) {
  const std::pair<DType, double> types[] = {{DType::kBF16, 257}, {DType::kF16, 2049}};
  for (const auto& [dtype, missing] : types) {  // the first integer that the type does not have
    for (const std::int64_t cols : {2, 64}) {
      for (const double tie : {missing, missing + 2}) {
        const double even = tie == missing ? tie - 1 : tie + 1;
        std::vector<double> dy, want;  // s = -1, so that dx = ±tie · y
        for (std::int64_t c = 0; c < cols; ++c) {
          const double sign = c % 2 == 0 ? 1 : -1;
          dy.push_back(sign * tie - 1);
          want.push_back(sign * even / static_cast<double>(cols));
        }
        const std::vector<double> x(dy.size());
        const Tensor y = ops::softmax(encoder(), upload(x, {1, cols}, dtype));
        const Tensor dx = ops::softmax_backward(encoder(), y, upload(dy, {1, cols}, dtype));
        EXPECT_EQ(download(dx), want) << name_of(dtype) << " " << cols << " columns, " << tie;
      }
    }
  }
}

TEST_P(Softmax, SameBitsOnEveryRun) {
  Noise noise(5);
  for (const Shape& shape : {Shape{300, 512}, Shape{3, 20000}, Shape{2, 300000}}) {
    for (const DType dtype : kTypes) {
      const std::int64_t n = *element_count(shape);
      const Tensor x = upload(random_values(noise, n, dtype, 4), shape, dtype);
      const Tensor dy = upload(random_values(noise, n, dtype), shape, dtype);
      expect_repeatable(encoder(), [&] {
        const Tensor y = ops::softmax(encoder(), x);
        return std::vector<Tensor>{y, ops::softmax_backward(encoder(), y, dy)};
      });
    }
  }
}

TEST_P(Softmax, RandomShapesAndAxes) {
  EXPECT_TRUE(rc::check("softmax matches its oracle", [this] {
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

TEST_P(Softmax, NaNFillsItsRowAlongAnyAxis) {
  for (const DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
    for (const std::size_t at : {0, 17, 39}) {  // in a column of 40 rows, the first, one, the last
      std::vector<double> x(40 * 3, 0.5);
      x[at * 3 + 1] = NAN;
      std::vector<std::size_t> column;
      for (std::size_t r = 0; r < 40; ++r) column.push_back(r * 3 + 1);
      const Tensor y = ops::softmax(encoder(), upload(x, {40, 3}, dtype), 0);
      EXPECT_EQ(nans_of(download(y)), column);
      const Tensor dy = upload(std::vector<double>(120, 1), {40, 3}, dtype);
      EXPECT_EQ(nans_of(download(ops::softmax_backward(encoder(), y, dy, 0))), column);
      const Tensor rows = ops::softmax(encoder(), upload(x, {3, 40}, dtype));
      EXPECT_EQ(nans_of(download(rows)), places((at * 3 + 1) / 40 * 40, 40));
    }
  }
}

MT_ON_EVERY_BACKEND(Softmax);

}  // namespace
}  // namespace mlxtape::test
