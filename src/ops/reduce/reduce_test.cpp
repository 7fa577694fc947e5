#include "mlxtape/ops/reduce.h"

#include <rapidcheck.h>

#include <cmath>
#include <limits>
#include <numeric>

#include "support/op_test.h"

namespace mlxtape::test {
namespace {

constexpr DType kTypes[] = {DType::kF32, DType::kF16, DType::kBF16};
constexpr double kInf = std::numeric_limits<double>::infinity();
const double kNaN = std::nan("");

enum class Kind { kSum, kMean, kMax, kMin, kLogsumexp, kVar };
constexpr Kind kKinds[] = {Kind::kSum, Kind::kMean,      Kind::kMax,
                           Kind::kMin, Kind::kLogsumexp, Kind::kVar};
const char* name_of(Kind kind) {
  constexpr const char* kNames[] = {"sum", "mean", "max", "min", "logsumexp", "var"};
  return kNames[static_cast<int>(kind)];
}

Tensor record(Kind kind, Tape& tape, const Tensor& x, const ops::Axes& axes, bool keepdims,
              std::int64_t ddof) {
  switch (kind) {
    case Kind::kSum: return ops::sum(tape, x, axes, keepdims);
    case Kind::kMean: return ops::mean(tape, x, axes, keepdims);
    case Kind::kMax: return ops::max(tape, x, axes, keepdims);
    case Kind::kMin: return ops::min(tape, x, axes, keepdims);
    case Kind::kLogsumexp: return ops::logsumexp(tape, x, axes, keepdims);
    default: return ops::var(tape, x, axes, keepdims, ddof);
  }
}

// The results that the elements of x go into, in order.
std::vector<std::size_t> groups(const Shape& shape, const ops::Axes& axes) {
  std::vector<bool> reduced(static_cast<std::size_t>(shape.rank()), axes.all);
  for (const std::int64_t a : axes.list) {
    reduced[static_cast<std::size_t>(*normal_axis(a, shape.rank()))] = true;
  }
  std::vector<std::size_t> at;
  for (std::int64_t i = 0; i < *element_count(shape); ++i) {
    std::int64_t rest = i, where = 0, step = 1;
    for (std::int64_t axis = shape.rank() - 1; axis >= 0; --axis) {
      if (!reduced[static_cast<std::size_t>(axis)]) {
        where += rest % shape[axis] * step;
        step *= shape[axis];
      }
      rest /= shape[axis];
    }
    at.push_back(static_cast<std::size_t>(where));
  }
  return at;
}

struct Expected {
  Refs y, dx;
};

// The formula block of reduce.h, in double.
Expected oracle(Kind kind, const std::vector<double>& x, const std::vector<double>& dy,
                const std::vector<std::size_t>& at, std::int64_t ddof) {
  const std::size_t results = dy.size();
  const auto n = static_cast<double>(x.size()) / static_cast<double>(results);
  std::vector<double> sum(results), size(results), top(results, -kInf), low(results, kInf);
  for (std::size_t i = 0; i < x.size(); ++i) {
    sum[at[i]] += x[i];
    size[at[i]] += std::abs(x[i]);
    top[at[i]] = std::max(top[at[i]], x[i]);
    low[at[i]] = std::min(low[at[i]], x[i]);
  }
  std::vector<double> second(results), ties(results);
  const double divisor = n - static_cast<double>(ddof);
  for (std::size_t i = 0; i < x.size(); ++i) {
    const double away = x[i] - sum[at[i]] / n;
    second[at[i]] += kind == Kind::kVar ? away * away : std::exp(x[i] - top[at[i]]);
    ties[at[i]] += x[i] == (kind == Kind::kMin ? low : top)[at[i]] ? 1 : 0;
  }
  Expected e;
  for (std::size_t r = 0; r < results; ++r) {
    switch (kind) {
      case Kind::kSum: e.y.push_back({sum[r], size[r]}); break;
      case Kind::kMean: e.y.push_back({sum[r] / n, size[r] / n}); break;
      case Kind::kMax: e.y.push_back({top[r], std::abs(top[r])}); break;
      case Kind::kMin: e.y.push_back({low[r], std::abs(low[r])}); break;
      case Kind::kLogsumexp: {
        const double y = top[r] + std::log(second[r]);
        e.y.push_back({y, std::abs(top[r]) + std::abs(std::log(second[r])) + 0.25});
        break;
      }
      case Kind::kVar: {
        // The mean is rounded, too: an error of its size, squared with the distance.
        e.y.push_back(
            {second[r] / divisor, second[r] / divisor + size[r] / n * size[r] / n * 0.25});
        break;
      }
    }
  }
  for (std::size_t i = 0; i < x.size(); ++i) {
    const double g = dy[at[i]], m = top[at[i]];
    switch (kind) {
      case Kind::kSum: e.dx.push_back({g, std::abs(g)}); break;
      case Kind::kMean: e.dx.push_back({g / n, std::abs(g / n)}); break;
      case Kind::kMax:
      case Kind::kMin: {
        const double y = kind == Kind::kMin ? low[at[i]] : m;
        const double share = x[i] == y ? g / ties[at[i]] : 0;
        e.dx.push_back({share, std::abs(share)});
        break;
      }
      case Kind::kLogsumexp: {
        const double share = g * std::exp(x[i] - m) / second[at[i]];
        e.dx.push_back({share, std::abs(share) * (1 + std::abs(x[i] - m) / 8)});
        break;
      }
      case Kind::kVar: {
        const double mean = sum[at[i]] / n, size_of_mean = size[at[i]] / n;
        e.dx.push_back({2 * g * (x[i] - mean) / divisor,
                        2 * std::abs(g) * (std::abs(x[i]) + size_of_mean) / divisor});
        break;
      }
    }
  }
  return e;
}

std::vector<double> values(const Refs& refs) {
  std::vector<double> v;
  for (const Ref& r : refs) v.push_back(r.value);
  return v;
}

TEST(ReduceOracle, GradientMatchesCentralDifference) {
  Noise noise(1);
  const Shape shape{3, 5, 4};
  const auto x = random_values(noise, 60, DType::kF64, 3);
  for (const ops::Axes& axes : {ops::Axes(1), ops::Axes{0, 2}, ops::Axes()}) {
    const auto at = groups(shape, axes);
    const std::size_t results = *std::max_element(at.begin(), at.end()) + 1;
    const auto dy = random_values(noise, static_cast<std::int64_t>(results), DType::kF64);
    for (const Kind kind : kKinds) {
      const auto loss = [&](const Arrays& in) {
        const auto y = values(oracle(kind, in[0], dy, at, 1).y);
        return std::inner_product(y.begin(), y.end(), dy.begin(), 0.0);
      };
      expect_gradient(loss, {x}, {values(oracle(kind, x, dy, at, 1).dx)});
    }
  }
}

TEST(ReduceCheck, SaysWhatIsWrong) {
  const auto f32 = Tensor::meta({4, 2});
  const auto empty = Tensor::meta({0, 2});
  expect_refused({
      {"axis", ops::reduce_check("sum", f32, 2), Errc::kArgument,
       "sum: axes must be in [-2, 2), got 2"},
      {"twice", ops::reduce_check("sum", f32, {0, -2}), Errc::kArgument,
       "at most once, got [0, -2]"},
      {"double", ops::reduce_check("mean", Tensor::meta({1}, DType::kF64), {}), Errc::kDType,
       "got f64"},
      {"integers", ops::reduce_check("max", Tensor::meta({1}, DType::kI32), {}), Errc::kDType,
       "x must be f32, f16 or bf16, got i32"},
      {"nothing", ops::reduce_check("max", empty, 0), Errc::kShape,
       "something to reduce, got [0, 2]"},
      {"empty", ops::reduce_check("logsumexp", empty, 1), Errc::kShape,
       "must not be empty, got [0, 2]"},
      {"sum_to", ops::sum_to_check(f32, {4}), Errc::kShape, "[4, 2], got [4]"},
      {"sum_to up", ops::sum_to_check(Tensor::meta({2}), {4, 2}), Errc::kShape, "[2], got [4, 2]"},
      {"sum_to type", ops::sum_to_check(Tensor::meta({2}, DType::kI32), {1}), Errc::kDType,
       "got i32"},
  });
  EXPECT_FALSE(ops::reduce_check("min", empty, 1));
  EXPECT_FALSE(ops::reduce_check("sum", empty, {}));
}

class Reduce : public OnDevice {
 protected:
  void check(Kind kind, const Shape& shape, const ops::Axes& axes, DType dtype,
             bool strided = false, bool keepdims = false, std::int64_t ddof = 0) {
    const std::int64_t n = *element_count(shape);
    Noise noise(static_cast<std::uint64_t>(n + 1));
    const auto at = groups(shape, axes);
    // Of another size for each result, or large ones would all be the same, and not around 0, where long sums
    // are lost in their own rounding.
    auto x = random_values(noise, n, DType::kF64, kind == Kind::kLogsumexp ? 4 : 1);
    for (std::size_t i = 0; i < x.size(); ++i) {
      x[i] = round_to(dtype, (x[i] + 0.5) * (1 + static_cast<double>(at[i] % 5)));
    }
    const std::size_t results = *std::max_element(at.begin(), at.end()) + 1;
    const auto dy = random_values(noise, static_cast<std::int64_t>(results), dtype);
    const Expected want = oracle(kind, x, dy, at, ddof);
    const std::string what = std::string(name_of(kind)) + " " + to_string(shape) + " over " +
                             (axes.all ? "all" : to_string(axes.list)) + " " +
                             mlxtape::name_of(dtype) + " ";
    Tape tape(encoder());
    const Tensor tx =
        tape.watch(strided ? upload_strided(x, shape, dtype) : upload(x, shape, dtype));
    const Tensor y = record(kind, tape, tx, axes, keepdims, ddof);
    const std::int64_t terms = n / static_cast<std::int64_t>(results);
    if (kind == Kind::kMax || kind == Kind::kMin) {
      EXPECT_EQ(download(y), values(want.y)) << what;
    } else {
      expect_close(what + "y", download(y), want.y, dtype, terms);
    }
    tape.backward(y, upload(dy, y.shape(), dtype));
    EXPECT_EQ(tape.grad(tx).shape(), shape);
    const bool sums = kind == Kind::kLogsumexp || kind == Kind::kVar;
    expect_close(what + "dx", download(tape.grad(tx)), want.dx, dtype, sums ? terms : 0);
  }
};

TEST_P(Reduce, MatchesOracleForEveryShape) {
  for (const Kind kind : kKinds) {
    for (const DType dtype : kTypes) {
      for (const std::int64_t cols : {2, 7, 31, 32, 33, 64, 65, 255, 256, 257, 1000, 4097}) {
        check(kind, {5, cols}, 1, dtype);  // rows
        check(kind, {cols, 5}, 0, dtype);  // columns, few
        check(kind, {3, cols}, 0, dtype);  // columns, many
        check(kind, {cols}, {}, dtype);    // all
      }
      check(kind, {3, 17, 70}, 1, dtype);
      check(kind, {2, 3, 4, 5}, {0, 2}, dtype);
      check(kind, {2, 3, 4, 5}, {1, 3}, dtype, false, true);
      check(kind, {2, 3, 4, 5}, {-1, 1, 0}, dtype, true);
      check(kind, {6, 1, 7}, {1, 2}, dtype, false, true);
      check(kind, {9, 11}, 0, dtype, true);
      check(kind, {9, 11}, 1, dtype, false, true, kind == Kind::kVar ? 1 : 0);
    }
  }
}

// Cut over threads and blocks, and written past the cache.
TEST_P(Reduce, MatchesOracleForLongOnes) {
  for (const Kind kind : kKinds) {
    check(kind, {scaled(300007)}, {}, DType::kF32);
    check(kind, {2, scaled(140000)}, 1, DType::kBF16);
    check(kind, {scaled(20011), 9}, 0, DType::kF32);
    check(kind, {scaled(700), 1500}, 0, DType::kF32);
    check(kind, {2, scaled(300), 1030}, 1, DType::kF16);
    check(kind, {scaled(1200), 900}, 1, DType::kF32);
  }
}

TEST_P(Reduce, NumbersThatAreNone) {
  const auto run = [&](auto&& op, const std::vector<double>& x) {
    return download(
        op(encoder(), upload(x, {1, static_cast<std::int64_t>(x.size())}, DType::kF32)))[0];
  };
  const auto max = [](CommandEncoder& e, const Tensor& x) {
    return ops::max(e, x, 1);
  };
  const auto min = [](CommandEncoder& e, const Tensor& x) {
    return ops::min(e, x, 1);
  };
  const auto logsumexp = [](CommandEncoder& e, const Tensor& x) {
    return ops::logsumexp(e, x, 1);
  };
  for (std::size_t at = 0; at < 100; at += 7) {
    std::vector<double> x(100, 1);
    x[at] = kNaN;
    EXPECT_TRUE(std::isnan(run(max, x)) && std::isnan(run(min, x)) && std::isnan(run(logsumexp, x)))
        << at;
    x[at] = kInf;
    EXPECT_EQ(run(max, x), kInf);
    EXPECT_EQ(run(logsumexp, x), kInf);
  }
  EXPECT_EQ(run(max, {-kInf, -kInf}), -kInf);
  EXPECT_EQ(run(min, {kInf, kInf}), kInf);
  EXPECT_EQ(run(logsumexp, {-kInf, -kInf}), -kInf);
  EXPECT_EQ(run(logsumexp, {-kInf, 3}), 3);
  EXPECT_EQ(run(logsumexp, {3e38, -3e38}), round_to(DType::kF32, 3e38));

  const Tensor nothing = upload({}, {0, 3}, DType::kF32);
  EXPECT_EQ(download(ops::sum(encoder(), nothing, 0)), (std::vector<double>{0, 0, 0}));
  for (const Tensor& y : {ops::mean(encoder(), nothing, 0), ops::var(encoder(), nothing, 0)}) {
    for (const double v : download(y)) EXPECT_TRUE(std::isnan(v));
  }
  EXPECT_EQ(ops::max(encoder(), nothing, 1).shape(), (Shape{0}));
  const Tensor two = upload({1, 2}, {2}, DType::kF32);
  EXPECT_EQ(download(ops::var(encoder(), two, {}, false, 2))[0], kInf);
  EXPECT_EQ(download(ops::var(encoder(), two, {}, false, 3))[0], kInf);
  // Far from 0 as near it: no difference of large squares.
  const Tensor far = upload({1e4, 1e4 + 1, 1e4 + 2, 1e4 + 3}, {4}, DType::kF32);
  EXPECT_EQ(download(ops::var(encoder(), far))[0], 1.25);
}

// What mlx.core does, asked of it: ties share, NaN makes all NaN.
TEST_P(Reduce, GradientsAtTheEdges) {
  const auto grad = [&](Kind kind, const std::vector<double>& x, const Shape& shape,
                        const ops::Axes& axes) {
    Tape tape(encoder());
    const Tensor tx = tape.watch(upload(x, shape, DType::kF32));
    const Tensor y = record(kind, tape, tx, axes, false, 0);
    tape.backward(y, upload(std::vector<double>(static_cast<std::size_t>(y.size()), 1), y.shape(),
                            DType::kF32));
    return download(tape.grad(tx));
  };
  using Values = std::vector<double>;
  EXPECT_EQ(grad(Kind::kMax, {1, 3, 3, 2}, {4}, {}), (Values{0, 0.5, 0.5, 0}));
  EXPECT_EQ(grad(Kind::kMin, {1, 1, 3, 2}, {4}, {}), (Values{0.5, 0.5, 0, 0}));
  EXPECT_EQ(grad(Kind::kMax, {1, 3, 3, 2, 1, 5}, {3, 2}, 0), (Values{0, 0, 1, 0, 0, 1}));
  for (const double v : grad(Kind::kMax, {1, kNaN, 3}, {3}, {})) EXPECT_TRUE(std::isnan(v));
  for (const double v : grad(Kind::kLogsumexp, {-kInf, -kInf}, {2}, {})) EXPECT_TRUE(std::isnan(v));
  EXPECT_EQ(grad(Kind::kLogsumexp, {-kInf, 3}, {2}, {}), (Values{0, 1}));
}

TEST_P(Reduce, Integers) {
  const auto type_of = [&](DType dtype) {
    return ops::sum(encoder(), upload({1, 1, 0}, {3}, dtype)).dtype();
  };
  EXPECT_EQ(type_of(DType::kBool), DType::kI32);
  EXPECT_EQ(type_of(DType::kI16), DType::kI32);
  EXPECT_EQ(type_of(DType::kU8), DType::kU32);
  EXPECT_EQ(type_of(DType::kI64), DType::kI64);
  for (const DType dtype :
       {DType::kBool, DType::kI32, DType::kU32, DType::kI64, DType::kU64, DType::kI8}) {
    std::vector<double> x;
    for (int i = 0; i < 5 * 301; ++i) x.push_back(i % 3 == 0 ? 1 : 0);
    std::vector<double> rows(5), columns(301);
    for (std::size_t i = 0; i < x.size(); ++i) rows[i / 301] += x[i], columns[i % 301] += x[i];
    const Tensor tx = upload(x, {5, 301}, dtype);
    EXPECT_EQ(download(ops::sum(encoder(), tx, 1)), rows);
    EXPECT_EQ(download(ops::sum(encoder(), tx, 0)), columns);
    EXPECT_EQ(download(ops::mean(encoder(), upload({1, 0, 1, 1}, {4}, dtype)))[0], 0.75);
  }
}

// mx.var([1, 2, 4, 7], ddof=…), and mx.grad of it: ddof below 0 divides by more than there are.
TEST_P(Reduce, VarianceAsMlx) {
  const auto var = [&](std::int64_t ddof, const std::vector<double>& dx) {
    Tape tape(encoder());
    const Tensor x = tape.watch(upload({1, 2, 4, 7}, {4}, DType::kF32));
    const Tensor y = ops::var(tape, x, {}, false, ddof);
    tape.backward(y);
    if (!dx.empty()) expect_close("dx", download(tape.grad(x)), refs_of(dx), DType::kF32, 4);
    return download(y);
  };
  expect_close("-1", var(-1, {-1, -0.6, 0.2, 1.4}), refs_of({4.2}), DType::kF32, 4);
  expect_close("-3", var(-3, {-5.0 / 7, -3.0 / 7, 1.0 / 7, 1}), refs_of({3}), DType::kF32, 4);
  expect_close("0", var(0, {-1.25, -0.75, 0.25, 1.75}), refs_of({5.25}), DType::kF32, 4);
  expect_close("1", var(1, {-5.0 / 3, -1, 1.0 / 3, 7.0 / 3}), refs_of({7}), DType::kF32, 4);
  EXPECT_EQ(var(4, {})[0], INFINITY);
  EXPECT_EQ(var(INT64_MAX, {})[0], INFINITY);
  EXPECT_LT(var(INT64_MIN, {})[0], 1e-17);
}

TEST_P(Reduce, SumToUndoesBroadcasts) {
  const Tensor x = upload({1, 2, 3, 4, 5, 6}, {1, 2, 3}, DType::kF32);
  const auto to = [&](const Shape& shape) {
    const Tensor y = ops::sum_to(encoder(), x, shape);
    EXPECT_EQ(y.shape(), shape);
    return download(y);
  };
  EXPECT_EQ(to({1, 2, 3}), (std::vector<double>{1, 2, 3, 4, 5, 6}));
  EXPECT_EQ(to({2, 3}), (std::vector<double>{1, 2, 3, 4, 5, 6}));
  EXPECT_EQ(to({3}), (std::vector<double>{5, 7, 9}));
  EXPECT_EQ(to({2, 1}), (std::vector<double>{6, 15}));
  EXPECT_EQ(to({1, 1}), (std::vector<double>{21}));
  EXPECT_EQ(to({}), (std::vector<double>{21}));
}

TEST_P(Reduce, SameBitsOnEveryRun) {
  Noise noise(5);
  for (const Shape& shape : {Shape{scaled(300000)}, Shape{scaled(3000), 70}, Shape{7, 5000}}) {
    const Tensor x =
        upload(random_values(noise, *element_count(shape), DType::kF32), shape, DType::kF32);
    expect_repeatable(encoder(), [&] {
      std::vector<Tensor> all;
      for (const Kind kind : kKinds) {
        Tape tape(encoder());
        const Tensor tx = tape.watch(x);
        const Tensor y = record(kind, tape, tx, 0, false, 0);
        tape.backward(y, ops::mean(encoder(), x, 0));
        all.push_back(y);
        all.push_back(tape.grad(tx));
      }
      return all;
    });
  }
}

TEST_P(Reduce, RandomShapesAndAxes) {
  EXPECT_TRUE(rc::check("reductions match their oracle", [this] {
    Shape shape;
    const int rank = *rc::gen::inRange(1, 6);
    for (int i = 0; i < rank; ++i) shape.push_back(*rc::gen::inRange(1, 6));
    shape[*rc::gen::inRange(0, rank)] = *rc::gen::inRange(1, 80);
    ops::Axes axes;
    for (int i = 0; i < rank; ++i) {
      if (*rc::gen::arbitrary<bool>()) axes.list.push_back(i);
    }
    axes.all = axes.list.empty();
    check(*rc::gen::elementOf(std::vector<Kind>(std::begin(kKinds), std::end(kKinds))), shape, axes,
          *rc::gen::elementOf(std::vector<DType>(std::begin(kTypes), std::end(kTypes))),
          *rc::gen::arbitrary<bool>(), *rc::gen::arbitrary<bool>());
    RC_ASSERT(!HasFailure());
  }));
}

// One f32 sum over a million rows would be half a percent off: past 65536 each 205/2048 counts as 208.
TEST_P(Reduce, LongColumnsAreCut) {
  const std::int64_t rows = scaled(1000000);
  const Tensor x = encoder().full({64, rows, 2}, DType::kF32, 205.0 / 2048);
  const double want = rows * (205.0 / 2048);
  const double bound = want * (4096 + 256) * 0x1p-24;  // as many roundings as a piece has rows
  for (const double got : download(ops::sum(encoder(), x, {1}))) {
    ASSERT_NEAR(got, want, bound);
  }
}

MT_ON_EVERY_BACKEND(Reduce);

}  // namespace
}  // namespace mlxtape::test
