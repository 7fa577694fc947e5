#include "mlxtape/ops/scan.h"

#include <cmath>
#include <numeric>

#include "support/op_test.h"

namespace mlxtape::test {
namespace {

struct Case {
  Shape shape;
  std::int64_t axis;
  bool reverse = false, inclusive = true;
};
const bool kBoth[] = {false, true};

// The formula block of scan.h in double.
Refs oracle(const Case& c, const std::vector<double>& x, bool back = false) {
  const std::int64_t count = c.shape[c.axis];
  std::int64_t inner = 1;
  for (std::int64_t i = c.axis + 1; i < c.shape.rank(); ++i) inner *= c.shape[i];
  Refs y(x.size());
  if (x.empty()) return y;
  const std::int64_t outer = static_cast<std::int64_t>(x.size()) / (count * inner);
  const bool from_end = c.reverse != back;
  for (std::int64_t o = 0; o < outer; ++o) {
    for (std::int64_t i = 0; i < inner; ++i) {
      double sum = 0, size = 0;
      for (std::int64_t k = 0; k < count; ++k) {
        const std::int64_t at = (o * count + (from_end ? count - 1 - k : k)) * inner + i;
        const double v = x[static_cast<std::size_t>(at)];
        const Ref before{sum, size};
        sum += v;
        size += std::abs(v);
        y[static_cast<std::size_t>(at)] = c.inclusive ? Ref{sum, size} : before;
      }
    }
  }
  return y;
}

TEST(ScanOracle, GradientMatchesCentralDifference) {
  Noise noise(1);
  for (const bool reverse : kBoth) {
    for (const bool inclusive : kBoth) {
      const Case c{{2, 5, 3}, 1, reverse, inclusive};
      const auto x = random_values(noise, 30, DType::kF64),
                 dy = random_values(noise, 30, DType::kF64);
      const auto values = [&](const std::vector<double>& in, bool back) {
        std::vector<double> v;
        for (const Ref& r : oracle(c, in, back)) v.push_back(r.value);
        return v;
      };
      const auto loss = [&](const Arrays& at) {
        const auto y = values(at[0], false);
        return std::inner_product(y.begin(), y.end(), dy.begin(), 0.0);
      };
      expect_gradient(loss, {x}, {values(dy, true)});
    }
  }
}

class Scan : public OnDevice {
 protected:
  void check(const Case& c, DType dtype, bool strided = false, std::int64_t offset = 0) {
    const std::int64_t n = *element_count(c.shape);
    Noise noise(static_cast<std::uint64_t>(n + c.axis));
    // All of one sign: a sum in which nothing cancels shows a lost element. f16 ends at 65504.
    auto x = random_values(noise, n, dtype, dtype == DType::kF16 ? 0.125 : 1),
         dy = random_values(noise, n, dtype);
    for (double& v : x) v = std::abs(v);
    Tape tape(encoder());
    const Tensor in =
        tape.watch(strided ? upload_strided(x, c.shape, dtype) : upload(x, c.shape, dtype, offset));
    const Tensor y = ops::cumsum(tape, in, c.axis, c.reverse, c.inclusive);
    const std::string at = to_string(c.shape) + " axis " + std::to_string(c.axis) + " " +
                           name_of(dtype) + (c.reverse ? " reverse" : "") +
                           (c.inclusive ? "" : " exclusive");
    const std::int64_t count = c.shape[c.axis];
    expect_close("y " + at, download(y), oracle(c, x), dtype, count);
    tape.backward(y, upload(dy, c.shape, dtype));
    expect_close("dx " + at, download(tape.grad(in)), oracle(c, dy, true), dtype, count);
  }
};

TEST_P(Scan, RowsMatchOracle) {
  for (const DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
    for (const bool reverse : kBoth) {
      for (const bool inclusive : kBoth) {
        for (const std::int64_t count :
             {0, 1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 255, 257, 1031}) {
          check({{3, count}, 1, reverse, inclusive}, dtype);
        }
        check({{0, 5}, 1, reverse, inclusive}, dtype);
        check({{2, 3, 40}, 2, reverse, inclusive}, dtype, true);
        check({{5, 96}, 1, reverse, inclusive}, dtype, false, 3);
      }
    }
  }
}

TEST_P(Scan, ColumnsMatchOracle) {
  for (const DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
    for (const bool reverse : kBoth) {
      for (const bool inclusive : kBoth) {
        for (const std::int64_t inner : {2, 3, 15, 16, 17, 33, 48, 64, 65, 511, 512, 513, 1030}) {
          check({{2, 5, inner}, 1, reverse, inclusive}, dtype);
        }
        check({{40, 3, 7}, 1, reverse, inclusive}, dtype);
        check({{7, 2, 3}, 0, reverse, inclusive}, dtype, true);
        check({{33, 0}, 0, reverse, inclusive}, dtype);
      }
    }
  }
}

// Few and long: cut into pieces, more of them than one group has.
TEST_P(Scan, LongRowsMatchOracle) {
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    for (const bool reverse : kBoth) {
      for (const bool inclusive : kBoth) {
        check({{1, 50021}, 1, reverse, inclusive}, dtype);
        check({{scaled(40009), 3}, 0, reverse, inclusive}, dtype);
        check({{2, 301, scaled(530)}, 1, reverse, inclusive}, dtype);
      }
    }
  }
  check({{2, scaled(300007)}, 1}, DType::kF32);
  check({{2, scaled(300007)}, 1, true, false}, DType::kF16);
  check({{scaled(100003), 5}, 0, true}, DType::kF32);
  check({{scaled(70001), 20}, 0}, DType::kBF16);
}

// Large enough to be written past the cache.
TEST_P(Scan, LargeOnesMatchOracle) {
  check({{scaled(260), 4096}, 1}, DType::kF32);
  check({{scaled(260), 4096}, 1, true}, DType::kF32);
  check({{scaled(260), 8192}, 1, true, false}, DType::kBF16);
  check({{scaled(16), 66001}, 1}, DType::kF32);  // rows that do not begin a line
  check({{scaled(22000), 48}, 0}, DType::kF32);
  check({{scaled(16500), 64}, 0, true, false}, DType::kF32);
  check({{scaled(520), 2048}, 0}, DType::kF32);
  check({{scaled(520), 2049}, 0, true}, DType::kF32);
  check({{scaled(66000), 32}, 0, true}, DType::kBF16);
}

TEST_P(Scan, IntegersWrapAroundInTheirType) {
  const auto run = [&](DType dtype, const std::vector<double>& x, Shape shape, std::int64_t axis,
                       bool reverse, bool inclusive) {
    return download(ops::cumsum(encoder(), upload(x, shape, dtype), axis, reverse, inclusive));
  };
  using V = std::vector<double>;
  // mx.cumsum(mx.array([100, 100, 7], int8)) and its like
  EXPECT_EQ(run(DType::kI8, {100, 100, 7}, {3}, 0, false, true), (V{100, -56, -49}));
  EXPECT_EQ(run(DType::kU8, {200, 100, 7}, {3}, 0, true, true), (V{51, 107, 7}));
  EXPECT_EQ(run(DType::kI16, {30000, 30000}, {2}, 0, false, true), (V{30000, -5536}));
  EXPECT_EQ(run(DType::kU16, {1, 2, 3}, {3}, 0, false, false), (V{0, 1, 3}));
  EXPECT_EQ(run(DType::kI32, {1, -2, 3, 4, 5, -6}, {2, 3}, 0, false, true),
            (V{1, -2, 3, 5, 3, -3}));
  EXPECT_EQ(run(DType::kU32, {1, 2, 3, 4, 5, 6}, {2, 3}, 1, true, false), (V{5, 3, 0, 11, 6, 0}));
  EXPECT_EQ(run(DType::kI64, {0x1p40, -1, 5}, {3}, 0, false, true),
            (V{0x1p40, 0x1p40 - 1, 0x1p40 + 4}));
  EXPECT_EQ(run(DType::kBool, {1, 1, 0, 1}, {4}, 0, false, true), (V{1, 2, 2, 3}));
  V many(5000);
  for (std::size_t i = 0; i < many.size(); ++i) many[i] = static_cast<double>(i % 11) - 5;
  for (const auto& [shape, axis] :
       {std::pair<Shape, std::int64_t>{{5000}, 0}, {{4, 1250}, 1}, {{4, 1250}, 0}}) {
    for (const bool reverse : kBoth) {
      V want;
      for (const Ref& r : oracle({shape, axis, reverse}, many)) want.push_back(r.value);
      EXPECT_EQ(run(DType::kI32, many, shape, axis, reverse, true), want);
    }
  }
}

TEST_P(Scan, BoolsAreCountedInI32) {
  EXPECT_EQ(ops::cumsum(encoder(), upload({1, 0}, {2}, DType::kBool), 0).dtype(), DType::kI32);
}

// What comes after an infinity is infinite, after NaN is NaN; what comes before is as it was.
// mx.cumsum(x, axis=…, reverse=…, inclusive=…), and mx.grad of (cumsum(x)·dy).sum().
TEST_P(Scan, AsMlx) {
  using Values = std::vector<double>;
  const auto expect = [&](bool reverse, bool inclusive, const Values& want, const Values& dx) {
    Tape tape(encoder());
    const Tensor x = tape.watch(upload({1, 2, 3, 4, -5, 6}, {2, 3}, DType::kF32));
    const Tensor y = ops::cumsum(tape, x, 1, reverse, inclusive);
    EXPECT_EQ(download(y), want);
    tape.backward(y, upload({1, 2, 4, 8, 16, 32}, {2, 3}, DType::kF32));
    EXPECT_EQ(download(tape.grad(x)), dx);
  };
  expect(false, true, {1, 3, 6, 4, -1, 5}, {7, 6, 4, 56, 48, 32});
  expect(false, false, {0, 1, 3, 0, 4, -1}, {6, 4, 0, 48, 32, 0});
  expect(true, true, {6, 5, 3, 5, 1, 6}, {1, 3, 7, 8, 24, 56});
  expect(true, false, {5, 3, 0, 1, 6, 0}, {0, 1, 3, 0, 8, 24});
  const Tensor x = upload({1, 2, 3, 4, -5, 6}, {2, 3}, DType::kF32);
  EXPECT_EQ(download(ops::cumsum(encoder(), x, -2, true, false)), (Values{4, -5, 6, 0, 0, 0}));
  const Tensor small = ops::cumsum(encoder(), upload({100, 100, 100}, {3}, DType::kI8), 0);
  EXPECT_EQ(small.dtype(), DType::kI8);
  EXPECT_EQ(download(small), (Values{100, -56, 44}));
}

TEST_P(Scan, InfinityAndNaNStayToTheEnd) {
  for (const std::int64_t at : {0, 5, 16, 17, 40}) {
    std::vector<double> x(50, 1);
    x[static_cast<std::size_t>(at)] = INFINITY;
    x[45] = -INFINITY;
    const auto y = download(ops::cumsum(encoder(), upload(x, {50}, DType::kF32), 0));
    for (std::int64_t i = 0; i < 50; ++i) {
      const double got = y[static_cast<std::size_t>(i)];
      if (i < at) {
        EXPECT_EQ(got, static_cast<double>(i + 1));
      } else if (i < 45) {
        EXPECT_EQ(got, INFINITY);
      } else {
        EXPECT_TRUE(std::isnan(got));
      }
    }
  }
}

TEST_P(Scan, SameBitsOnEveryRun) {
  Noise noise(2);
  for (const Shape& shape : {Shape{2, scaled(100003)}, Shape{40, 999}, Shape{scaled(30011), 4}}) {
    const Tensor x =
        upload(random_values(noise, *element_count(shape), DType::kF32), shape, DType::kF32);
    for (const std::int64_t axis : {0, 1}) {
      expect_repeatable(encoder(), [&] {
        return std::vector<Tensor>{ops::cumsum(encoder(), x, axis),
                                   ops::cumsum(encoder(), x, axis, true, false)};
      });
    }
  }
}

TEST(ScanCheck, SaysWhatIsWrong) {
  expect_refused({
      {"rank", ops::cumsum_check(Tensor::meta({}), 0), Errc::kShape, "got []"},
      {"axis", ops::cumsum_check(Tensor::meta({2, 3}), 2), Errc::kArgument, "[-2, 2), got 2"},
      {"type", ops::cumsum_check(Tensor::meta({2}, DType::kF64), 0), Errc::kDType, "got f64"},
  });
}

MT_ON_EVERY_BACKEND(Scan);

}  // namespace
}  // namespace mlxtape::test
