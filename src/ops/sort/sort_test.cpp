#include "mlxtape/ops/sort.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "support/op_test.h"

namespace mlxtape::test {
namespace {

using ops::OptionalAxis;

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr DType kTypes[] = {DType::kF32, DType::kF16, DType::kBF16, DType::kI32, DType::kU32};

// Numbers, then NaN.
bool before(double a, double b) { return std::isnan(b) ? !std::isnan(a) : a < b; }

// The formula of sort.h on [outer, n, inner].
std::vector<double> oracle(const std::vector<double>& x, std::int64_t n, std::int64_t inner = 1) {
  std::vector<double> p(x.size());
  if (x.empty()) return p;
  const std::int64_t outer = static_cast<std::int64_t>(x.size()) / n / inner;
  for (std::int64_t o = 0; o < outer; ++o) {
    for (std::int64_t i = 0; i < inner; ++i) {
      const auto at = [&](std::int64_t j) {
        return static_cast<std::size_t>((o * n + j) * inner + i);
      };
      std::vector<std::int64_t> order(static_cast<std::size_t>(n));
      std::iota(order.begin(), order.end(), 0);
      std::stable_sort(order.begin(), order.end(),
                       [&](std::int64_t a, std::int64_t b) { return before(x[at(a)], x[at(b)]); });
      for (std::int64_t j = 0; j < n; ++j) {
        p[at(j)] = static_cast<double>(order[static_cast<std::size_t>(j)]);
      }
    }
  }
  return p;
}

// Numbers of the whole range of the type, with the same ones again, zeros of both signs and NaN.
std::vector<double> mixed_values(Noise& noise, std::int64_t n, DType dtype) {
  std::vector<double> x;
  x.reserve(static_cast<std::size_t>(n));
  for (std::int64_t i = 0; i < n; ++i) {
    const std::int64_t kind = noise.below(16);
    const double v = noise.next();
    if (!is_float(dtype)) {
      const double shift = dtype == DType::kU32 ? 0x1p31 : 0;
      x.push_back(kind < 4 ? std::floor(v * 20 + 20) : std::floor(v * 0x1p31) + shift);
    } else if (kind == 0) {
      x.push_back(kNaN);
    } else if (kind == 1) {
      x.push_back(v < 0 ? -kInf : kInf);
    } else if (kind < 4) {
      x.push_back(v < 0 ? -0.0 : 0.0);
    } else if (kind < 8) {
      x.push_back(std::floor(v * 8));
    } else {
      x.push_back(round_to(dtype, v * std::exp2(8 * noise.next())));
    }
  }
  return x;
}

class Sort : public OnDevice {
 protected:
  void check(const Shape& shape, DType dtype, OptionalAxis axis = -1, bool strided = false) {
    Noise noise(static_cast<std::uint64_t>(*element_count(shape) + 3));
    const auto x = mixed_values(noise, *element_count(shape), dtype);
    std::int64_t n = *element_count(shape), inner = 1;
    if (axis) {
      const std::int64_t a = *normal_axis(*axis, shape.rank());
      n = shape[a];
      for (std::int64_t i = a + 1; i < shape.rank(); ++i) inner *= shape[i];
    }
    const Tensor tx = strided ? upload_strided(x, shape, dtype) : upload(x, shape, dtype);
    const Tensor p = ops::argsort(encoder(), tx, axis);
    EXPECT_EQ(p.dtype(), DType::kU32);
    EXPECT_EQ(p.shape(), axis ? shape : Shape{n});
    EXPECT_EQ(download(p), oracle(x, n, inner)) << to_string(shape) << " " << name_of(dtype);
  }
};

TEST_P(Sort, MatchesOracleForEveryShape) {
  for (const DType dtype : kTypes) {
    for (const std::int64_t cols :
         {0, 1, 2, 3, 7, 31, 32, 33, 127, 128, 129, 255, 256, 257, 1000, 2049, 4096}) {
      check({1, cols}, dtype);
      check({5, cols}, dtype);
    }
    check({0, 4}, dtype);
    check({3, 17, 70}, dtype, 1);
    check({300, 5}, dtype, 0);
    check({9, 11}, dtype, -1, true);
    check({9, 11}, dtype, 0, true);
    check({4, 3, 50}, dtype, std::nullopt);
    check({7, 150}, dtype, std::nullopt, true);
  }
}

// One thread's rows, rows cut into pieces; on CUDA one block's and many blocks'.
TEST_P(Sort, MatchesOracleForLongOnes) {
  for (const DType dtype : kTypes) {
    check({1, 8191}, dtype);
    check({2, 8193}, dtype);
    check({17, 16385}, dtype);
    check({1, 65536}, dtype);
    check({16, 65536}, dtype);
    check({1, 65537}, dtype);
    check({2, 100003}, dtype);
  }
}

// Digits that are the same in all keys are not looked at.
TEST_P(Sort, NarrowRanges) {
  for (const std::int64_t n : {200, 5000, 20000, 70000}) {
    for (const std::int64_t range : {1, 2, 200, 60000}) {
      for (const double from : {0.0, 1000.0, 16777216.0}) {
        Noise noise(static_cast<std::uint64_t>(n + range));
        std::vector<double> x;
        for (std::int64_t i = 0; i < n; ++i) {
          x.push_back(from + static_cast<double>(noise.below(range)));
        }
        EXPECT_EQ(download(ops::argsort(encoder(), upload(x, {n}, DType::kI32))), oracle(x, n))
            << n << " of " << range << " from " << from;
      }
    }
  }
}

// What mlx.core does, asked of it: mx.argsort(mx.array(...)).
TEST_P(Sort, EdgesAreThoseOfMlx) {
  using Values = std::vector<double>;
  const auto argsort = [&](const Values& x) {
    return download(
        ops::argsort(encoder(), upload(x, {static_cast<std::int64_t>(x.size())}, DType::kF32)));
  };
  EXPECT_EQ(argsort({kNaN, 1, kNaN, 3, kNaN, 2}), (Values{1, 5, 3, 0, 2, 4}));
  EXPECT_EQ(argsort({0.0, -0.0}), (Values{0, 1}));
  EXPECT_EQ(argsort({-0.0, 0.0}), (Values{0, 1}));
  EXPECT_EQ(argsort({kNaN, kInf, -kInf, kNaN}), (Values{2, 1, 0, 3}));
  EXPECT_EQ(argsort({1, 3, 3, 2}), (Values{0, 3, 1, 2}));
}

TEST_P(Sort, SameBitsOnEveryRun) {
  Noise noise(5);
  for (const Shape& shape : {Shape{100000}, Shape{30, 500}}) {
    const Tensor x =
        upload(mixed_values(noise, *element_count(shape), DType::kF32), shape, DType::kF32);
    expect_repeatable(encoder(), [&] { return std::vector<Tensor>{ops::argsort(encoder(), x)}; });
  }
}

TEST(SortCheck, SaysWhatIsWrong) {
  expect_refused({
      {"axis", ops::sort_check("argsort", Tensor::meta({2, 3}), 2), Errc::kArgument,
       "argsort: axis must be in [-2, 2), got 2"},
      {"no axes", ops::sort_check("argsort", Tensor::meta({}), -1), Errc::kArgument, "got -1"},
      {"long", ops::sort_check("argsort", Tensor::meta({1, std::int64_t{1} << 32}), -1),
       Errc::kShape, "less than 2^32"},
      {"type", ops::sort_check("argsort", Tensor::meta({2}, DType::kF64), -1), Errc::kDType,
       "got f64"},
  });
  EXPECT_FALSE(ops::sort_check("argsort", Tensor::meta({}), std::nullopt));
}

MT_ON_EVERY_BACKEND(Sort);

}  // namespace

std::vector<BenchCase> sort_bench_cases() {
  std::vector<BenchCase> cases;
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    for (const Shape& shape : {Shape{4096, 4096}, Shape{1, 1 << 20}, Shape{1, 1 << 14}}) {
      const std::int64_t n = *element_count(shape);
      cases.push_back({"argsort", "fwd", std::to_string(shape[0]) + "x" + std::to_string(shape[1]),
                       dtype, n * static_cast<std::int64_t>(size_of(dtype)), n * 4, 1, 1,
                       [=](CommandEncoder& encoder) {
                         const Tensor x = random_tensor(encoder, shape, dtype, 1);
                         return [=, &encoder] {
                           static_cast<void>(ops::argsort(encoder, x));
                         };
                       }});
    }
  }
  return cases;
}

}  // namespace mlxtape::test
