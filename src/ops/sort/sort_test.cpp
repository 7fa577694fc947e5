#include "mlxtape/ops/sort.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
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

// Which elements of x [outer, n, inner] meet in each row along the axis.
struct Lines {
  std::int64_t n, inner;
  std::size_t count(const std::vector<double>& x) const {
    return n == 0 ? 0 : x.size() / static_cast<std::size_t>(n);
  }
  std::size_t at(std::size_t line, std::int64_t j) const { return at(line, j, n); }
  std::size_t at(std::size_t line, std::int64_t j, std::int64_t length) const {
    const auto o = static_cast<std::int64_t>(line) / inner;
    const auto i = static_cast<std::int64_t>(line) % inner;
    return static_cast<std::size_t>((o * length + j) * inner + i);
  }
};
Lines lines_of(const Shape& shape, OptionalAxis axis) {
  Lines lines{*element_count(shape), 1};
  if (!axis) return lines;
  const std::int64_t a = *normal_axis(*axis, shape.rank());
  lines.n = shape[a];
  for (std::int64_t i = a + 1; i < shape.rank(); ++i) lines.inner *= shape[i];
  return lines;
}

using Order = std::vector<std::int64_t>;  // of one line's elements
using MakeOrder = std::function<Order(const std::vector<double>&)>;

// The formulas of sort.h for one line.
Order sorted(const std::vector<double>& x, bool down = false) {
  Order order(x.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](std::int64_t a, std::int64_t b) {
    const double va = x[static_cast<std::size_t>(a)], vb = x[static_cast<std::size_t>(b)];
    return down && !std::isnan(va) && !std::isnan(vb) ? va > vb : before(va, vb);
  });
  return order;
}
Order partitioned(const std::vector<double>& x, std::int64_t kth) {
  const auto n = static_cast<std::int64_t>(x.size());
  if (kth < 0) kth += n;
  Order order = sorted(x);
  const std::int64_t most = std::min<std::int64_t>(1024, n / 4);
  if (kth + 1 <= most) {
    std::sort(order.begin() + kth + 1, order.end());
  } else if (n - kth <= most) {
    std::sort(order.begin(), order.begin() + kth);
  }
  return order;
}

struct Expected {
  std::vector<double> indices, values, dx;
};
// count: how many of each line are kept. dy: of the values.
Expected expected(const std::vector<double>& x, const Lines& lines, std::int64_t count,
                  const MakeOrder& order_of, const std::vector<double>& dy) {
  Expected want;
  const std::size_t all = lines.count(x) * static_cast<std::size_t>(count);
  want.indices.resize(all);
  want.values.resize(all);
  want.dx.resize(x.size());
  for (std::size_t line = 0; line < lines.count(x); ++line) {
    std::vector<double> v;
    for (std::int64_t j = 0; j < lines.n; ++j) v.push_back(x[lines.at(line, j)]);
    const Order order = order_of(v);
    for (std::int64_t j = 0; j < count; ++j) {
      const std::int64_t i = order[static_cast<std::size_t>(j)];
      const std::size_t to = lines.at(line, j, count);
      want.indices[to] = static_cast<double>(i);
      want.values[to] = x[lines.at(line, i)];
      if (!dy.empty()) want.dx[lines.at(line, i)] = dy[to];
    }
  }
  return want;
}

// Equal, −0 and +0 told apart, NaN equal to NaN.
bool same(const std::vector<double>& a, const std::vector<double>& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(), [](double p, double q) {
    return std::isnan(p) ? std::isnan(q) : p == q && std::signbit(p) == std::signbit(q);
  });
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
      x.push_back(v < 0 ? -kNaN : kNaN);
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

TEST(SortOracle, GradientMatchesCentralDifference) {
  Noise noise(1);
  const std::int64_t n = 12, k = 5;
  const auto x = random_values(noise, 2 * n, DType::kF64);
  const auto dy = random_values(noise, 2 * k, DType::kF64);
  const MakeOrder largest = [](const std::vector<double>& v) {
    return sorted(v, true);
  };
  const auto loss = [&](const Arrays& at) {
    const auto y = expected(at[0], {n, 1}, k, largest, {}).values;
    return std::inner_product(y.begin(), y.end(), dy.begin(), 0.0);
  };
  expect_gradient(loss, {x}, {expected(x, {n, 1}, k, largest, dy).dx});
}

class Sort : public OnDevice {
 protected:
  // A length that is more than one tile on every device, and on an emulated one a third of n.
  std::int64_t length(std::int64_t n) const { return std::min(n, 5 * scaled(n)); }
  // op(tape, x) gives values and, or not, indices.
  void check(const std::string& what, const std::vector<double>& x, const Shape& shape, DType dtype,
             OptionalAxis axis, bool strided, std::int64_t count, const MakeOrder& order_of,
             const std::function<ops::TopK(Tape&, const Tensor&)>& op) {
    const Lines lines = lines_of(shape, axis);
    Shape result = axis ? shape : Shape{lines.n};
    result[axis ? *normal_axis(*axis, shape.rank()) : 0] = count;
    Noise noise(7);
    const auto dy = is_float(dtype) ? random_values(noise, *element_count(result), dtype)
                                    : std::vector<double>();
    const Expected want = expected(x, lines, count, order_of, dy);
    const std::string at = what + " " + to_string(shape) + " " + name_of(dtype) +
                           (axis ? " axis " + std::to_string(*axis) : "") +
                           (strided ? " strided" : "");
    Tape tape(encoder());
    const Tensor plain = strided ? upload_strided(x, shape, dtype) : upload(x, shape, dtype);
    const Tensor tx = is_float(dtype) ? tape.watch(plain) : plain;
    const ops::TopK y = op(tape, tx);
    ASSERT_EQ(y.indices.dtype(), DType::kU32) << at;
    ASSERT_EQ(y.indices.shape(), result) << at;
    ASSERT_TRUE(y.indices.is_contiguous()) << at;
    ASSERT_TRUE(same(download(y.indices), want.indices)) << at;
    if (!y.values.defined()) return;
    ASSERT_EQ(y.values.dtype(), dtype) << at;
    ASSERT_EQ(y.values.shape(), result) << at;
    ASSERT_TRUE(same(download(y.values), want.values)) << at;
    if (!is_float(dtype)) return;
    tape.backward(y.values, upload(dy, result, dtype));
    ASSERT_EQ(tape.grad(tx).shape(), shape) << at;
    ASSERT_TRUE(same(download(tape.grad(tx)), want.dx)) << at;
  }

  void check_sort(const Shape& shape, DType dtype, OptionalAxis axis = -1, bool strided = false) {
    Noise noise(static_cast<std::uint64_t>(*element_count(shape) + 3));
    const auto x = mixed_values(noise, *element_count(shape), dtype);
    check(
        "sort", x, shape, dtype, axis, strided, lines_of(shape, axis).n,
        [](const std::vector<double>& v) { return sorted(v); },
        [&](Tape& tape, const Tensor& t) {
          return ops::TopK{ops::sort(tape, t, axis), ops::argsort(tape.encoder(), t, axis)};
        });
  }
  void check_topk(const Shape& shape, std::int64_t k, DType dtype, OptionalAxis axis = -1,
                  bool strided = false) {
    Noise noise(static_cast<std::uint64_t>(*element_count(shape) + k));
    check_topk_of(mixed_values(noise, *element_count(shape), dtype), shape, k, dtype, axis,
                  strided);
  }
  void check_topk_of(const std::vector<double>& x, const Shape& shape, std::int64_t k, DType dtype,
                     OptionalAxis axis = -1, bool strided = false) {
    check(
        "top " + std::to_string(k), x, shape, dtype, axis, strided, k,
        [](const std::vector<double>& v) { return sorted(v, true); },
        [&](Tape& tape, const Tensor& t) { return ops::topk(tape, t, k, axis); });
  }
  void check_partition(const Shape& shape, std::int64_t kth, DType dtype, OptionalAxis axis = -1,
                       bool strided = false) {
    Noise noise(static_cast<std::uint64_t>(*element_count(shape) + kth + 5000));
    check_partition_of(mixed_values(noise, *element_count(shape), dtype), shape, kth, dtype, axis,
                       strided);
  }
  void check_partition_of(const std::vector<double>& x, const Shape& shape, std::int64_t kth,
                          DType dtype, OptionalAxis axis = -1, bool strided = false) {
    check(
        "partition " + std::to_string(kth), x, shape, dtype, axis, strided, lines_of(shape, axis).n,
        [=](const std::vector<double>& v) { return partitioned(v, kth); },
        [&](Tape& tape, const Tensor& t) {
          return ops::TopK{ops::partition(tape, t, kth, axis),
                           ops::argpartition(tape.encoder(), t, kth, axis)};
        });
  }
};

TEST_P(Sort, MatchesOracleForEveryShape) {
  for (const DType dtype : kTypes) {
    for (const std::int64_t cols :
         {0, 1, 2, 3, 7, 31, 32, 33, 127, 128, 129, 255, 256, 257, 1000, 2049, 4096}) {
      check_sort({1, cols}, dtype);
      check_sort({scaled(5), cols}, dtype);
    }
    check_sort({0, 4}, dtype);
    check_sort({3, 17, 70}, dtype, 1);
    check_sort({300, 5}, dtype, 0);
    check_sort({9, 11}, dtype, -1, true);
    check_sort({9, 11}, dtype, 0, true);
    check_sort({4, 3, 50}, dtype, std::nullopt);
    check_sort({7, 150}, dtype, std::nullopt, true);
  }
}

// One thread's rows, rows cut into pieces; on CUDA one block's and many blocks'.
TEST_P(Sort, MatchesOracleForLongOnes) {
  for (const DType dtype : kTypes) {
    check_sort({1, 8191}, dtype);
    check_sort({scaled(2), 8193}, dtype);
    check_sort({scaled(17), length(16385)}, dtype);
    check_sort({1, length(65536)}, dtype);
    check_sort({scaled(16), scaled(65536)}, dtype);
    check_sort({1, length(65537)}, dtype);
    check_sort({2, scaled(100003)}, dtype);
  }
}

// Digits that are the same in all keys are not looked at.
TEST_P(Sort, NarrowRanges) {
  for (const std::int64_t n :
       {std::int64_t{200}, std::int64_t{5000}, length(20000), length(70000)}) {
    for (const std::int64_t range : {1, 2, 200, 60000}) {
      for (const double from : {0.0, 1000.0, 16777216.0}) {
        Noise noise(static_cast<std::uint64_t>(n + range));
        std::vector<double> x;
        for (std::int64_t i = 0; i < n; ++i) {
          x.push_back(from + static_cast<double>(noise.below(range)));
        }
        const auto order = sorted(x);
        EXPECT_EQ(download(ops::argsort(encoder(), upload(x, {n}, DType::kI32))),
                  std::vector<double>(order.begin(), order.end()))
            << n << " of " << range << " from " << from;
      }
    }
  }
}

TEST_P(Sort, TheFirstFewForEveryShape) {
  const std::int64_t rows = scaled(3);
  for (const DType dtype : kTypes) {
    for (const std::int64_t cols :
         {1, 2, 7, 31, 33, 63, 64, 65, 127, 128, 500, 512, 1000, 1024, 1025, 3000}) {
      for (const std::int64_t k : {1, 2, 8, 33, 250, 1024}) {
        if (k > cols) continue;
        check_topk({rows, cols}, k, dtype);
        check_partition({rows, cols}, k - 1, dtype);
        check_partition({rows, cols}, -k, dtype);
      }
      check_topk({2, cols}, cols, dtype);
      check_topk({2, cols}, 0, dtype);
    }
    check_topk({0, 4}, 2, dtype);
    check_topk({40, 500}, 5, dtype, 0);
    check_topk({3, 70, 9}, 20, dtype, 1, true);
    check_topk({4, 3, 50}, 9, dtype, std::nullopt);
    check_partition({3, 700, 2}, 20, dtype, 1, true);
    check_partition({700, 2}, -20, dtype, 0);
    check_partition({4, 3, 50}, 300, dtype, std::nullopt);
  }
}

TEST_P(Sort, TheFirstFewOfLongOnes) {
  for (const DType dtype : kTypes) {
    for (const std::int64_t k : {1, 100, 1024, 1025}) {
      check_topk({scaled(3), length(20011)}, k, dtype);
      check_partition({2, length(9001)}, k - 1, dtype);
      check_partition({2, length(9001)}, -k, dtype);
    }
    check_topk({1, scaled(151936)}, 1024, dtype);
    check_partition({1, scaled(100003)}, -1024, dtype);
  }
}

// In order, in the other order, all alike, few different ones, almost no numbers: where a guess of the last one
// chosen is wrong, and where its equals are not all chosen.
TEST_P(Sort, TheFirstFewOfUnlikelyRows) {
  const std::int64_t n = length(12345);
  const auto row = [&](auto&& value) {
    std::vector<double> x;
    for (std::int64_t i = 0; i < n; ++i) x.push_back(value(i));
    return x;
  };
  const std::vector<std::vector<double>> rows = {
      row([](std::int64_t i) { return static_cast<double>(i); }),
      row([](std::int64_t i) { return static_cast<double>(-i); }),
      row([](std::int64_t) { return 2.0; }),
      row([](std::int64_t i) { return static_cast<double>(i % 3); }),
      row([](std::int64_t i) { return i == 77 ? -1.0 : kNaN; }),
      row([](std::int64_t i) { return i % 1000 == 7 ? static_cast<double>(i) : -kInf; }),
      row([](std::int64_t i) { return i % 32 < 5 ? 1e30 + 1e27 * static_cast<double>(i) : 0.5; }),
      row([&](std::int64_t i) { return i < 3 * n / 4 ? 0.0 : -0.0; }),
  };
  for (const std::vector<double>& exact : rows) {
    std::vector<double> x;
    for (const double v : exact) x.push_back(round_to(DType::kF32, v));
    for (const std::int64_t k : {1, 3, 1000, 1024}) {
      check_topk_of(x, {1, n}, k, DType::kF32);
      check_partition_of(x, {1, n}, k - 1, DType::kF32);
      check_partition_of(x, {1, n}, -k, DType::kF32);
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

class SortArgmax : public OnDevice {
 protected:
  void check(const Shape& shape, DType dtype, OptionalAxis axis, bool nan = false,
             bool strided = false, bool keepdims = false) {
    Noise noise(static_cast<std::uint64_t>(*element_count(shape) + 11));
    auto x = mixed_values(noise, *element_count(shape), dtype);
    if (!nan) std::replace_if(x.begin(), x.end(), [](double v) { return std::isnan(v); }, -1.0);
    const Lines lines = lines_of(shape, axis);
    Shape result = shape;
    for (std::int64_t i = 0; i < shape.rank(); ++i) {
      if (!axis || i == *normal_axis(*axis, shape.rank())) result[i] = 1;
    }
    if (!keepdims) {
      result = Shape();
      for (std::int64_t i = 0; axis && i < shape.rank(); ++i) {
        if (i != *normal_axis(*axis, shape.rank())) result.push_back(shape[i]);
      }
    }
    const Tensor tx = strided ? upload_strided(x, shape, dtype) : upload(x, shape, dtype);
    for (const bool smallest : {false, true}) {
      std::vector<double> want;
      for (std::size_t line = 0; line < lines.count(x); ++line) {
        std::int64_t best = 0;
        for (std::int64_t j = 1; j < lines.n; ++j) {
          const double v = x[lines.at(line, j)], b = x[lines.at(line, best)];
          if (std::isnan(v) ? !std::isnan(b) : smallest ? v < b : v > b) best = j;
        }
        want.push_back(static_cast<double>(best));
      }
      const Tensor y = smallest ? ops::argmin(encoder(), tx, axis, keepdims)
                                : ops::argmax(encoder(), tx, axis, keepdims);
      const std::string at = to_string(shape) + " " + name_of(dtype) + (smallest ? " min" : " max");
      EXPECT_EQ(y.dtype(), DType::kU32) << at;
      EXPECT_EQ(y.shape(), result) << at;
      EXPECT_EQ(download(y), want) << at;
    }
  }
};

TEST_P(SortArgmax, MatchesOracleForEveryShape) {
  for (const DType dtype : kTypes) {
    for (const bool nan : {false, true}) {
      for (const std::int64_t n : {1, 2, 7, 15, 16, 17, 31, 32, 33, 65, 257, 1000, 4095, 4097}) {
        check({5, n}, dtype, 1, nan);
        check({n, 5}, dtype, 0, nan);
        check({3, n}, dtype, 0, nan);
        check({n}, dtype, std::nullopt, nan);
      }
      check({3, 17, 70}, dtype, 1, nan, true);
      check({3, 17, 70}, dtype, -1, nan, true, true);
      check({3, 17, 70}, dtype, std::nullopt, nan, false, true);
    }
    check({0, 3}, dtype, 1);
    check({1}, dtype, 0, true);
  }
}

// Cut into chunks.
TEST_P(SortArgmax, MatchesOracleForLongOnes) {
  for (const DType dtype : kTypes) {
    check({scaled(300007)}, dtype, std::nullopt);
    check({2, scaled(140000)}, dtype, 1);
    check({scaled(20011), 9}, dtype, 0);
    check({300, 1500}, dtype, 0);
    check({2, 300, scaled(1030)}, dtype, 1, true);
  }
}

// The best of the last row or element alone: no chunk and no tail is left out, equals give the first.
TEST_P(SortArgmax, EveryPlaceIsLookedAt) {
  for (const std::int64_t n : {70, 5000, 70000}) {
    for (const std::int64_t at : {std::int64_t{0}, n / 2, n - 17, n - 2, n - 1}) {
      std::vector<double> x(static_cast<std::size_t>(n), -1);
      x[static_cast<std::size_t>(at)] = 3;
      const Tensor row = upload(x, {n}, DType::kF32);
      EXPECT_EQ(download(ops::argmax(encoder(), row)), (std::vector<double>{double(at)}));
      EXPECT_EQ(download(ops::argmin(encoder(), row)), (std::vector<double>{at == 0 ? 1.0 : 0.0}));
    }
  }
}

// What mlx.core does, asked of it: the first NaN wins both, −0 and +0 are equal.
TEST_P(SortArgmax, EdgesAreThoseOfMlx) {
  const auto both = [&](const std::vector<double>& x) {
    const Tensor tx = upload(x, {static_cast<std::int64_t>(x.size())}, DType::kF32);
    return std::pair(download(ops::argmax(encoder(), tx))[0],
                     download(ops::argmin(encoder(), tx))[0]);
  };
  EXPECT_EQ(both({1, kNaN, 3}), std::pair(1.0, 1.0));
  EXPECT_EQ(both({1, 3, kNaN, kNaN}), std::pair(2.0, 2.0));
  EXPECT_EQ(both({1, 3, 3, 2}), std::pair(1.0, 0.0));
  EXPECT_EQ(both({-0.0, 0.0}), std::pair(0.0, 0.0));
  EXPECT_EQ(both({0.0, -0.0}), std::pair(0.0, 0.0));
  EXPECT_EQ(both({-kInf, -kInf, kInf, kInf}), std::pair(2.0, 0.0));
}

TEST_P(SortArgmax, SameBitsOnEveryRun) {
  Noise noise(6);
  const Tensor x = upload(mixed_values(noise, 200000, DType::kF32), {1000, 200}, DType::kF32);
  expect_repeatable(encoder(), [&] {
    return std::vector<Tensor>{ops::argmax(encoder(), x), ops::argmax(encoder(), x, 0),
                               ops::argmin(encoder(), x, 1)};
  });
}

// Indices carry no gradient, and whoever uses them is recorded as ever.
TEST_P(Sort, IndicesAreNotRecorded) {
  Tape tape(encoder());
  const Tensor x = tape.watch(upload({3, 1, 2}, {3}, DType::kF32));
  const Tensor p = ops::argpartition(encoder(), x, 1);
  EXPECT_EQ(tape.nodes(), 0);
  const Tensor y = ops::take_along_axis(tape, x, p, 0);
  tape.backward(y, upload({1, 2, 3}, {3}, DType::kF32));
  EXPECT_EQ(download(tape.grad(x)), (std::vector<double>{3, 1, 2}));
}

TEST_P(Sort, SameBitsOnEveryRun) {
  Noise noise(5);
  for (const Shape& shape : {Shape{scaled(100000)}, Shape{30, 500}}) {
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
      {"kth", ops::partition_check("partition", Tensor::meta({5, 2}), 5, 0), Errc::kArgument,
       "partition: kth must be in [-5, 5), got 5"},
      {"kth below", ops::partition_check("partition", Tensor::meta({5, 2}), -3, 1), Errc::kArgument,
       "got -3"},
      {"kth of none", ops::partition_check("partition", Tensor::meta({0}), 0, 0), Errc::kArgument,
       "got 0"},
      {"partition axis", ops::partition_check("partition", Tensor::meta({5}), 0, 1),
       Errc::kArgument, "got 1"},
      {"k", ops::topk_check(Tensor::meta({5, 2}), 6, 0), Errc::kArgument,
       "topk: k must be in [0, 5], got 6"},
      {"k below", ops::topk_check(Tensor::meta({5, 2}), -1, 0), Errc::kArgument, "got -1"},
      {"argmax axis", ops::argmax_check("argmax", Tensor::meta({5, 2}), 2), Errc::kArgument,
       "argmax: axis"},
      {"argmax of none", ops::argmax_check("argmax", Tensor::meta({2, 0}), 1), Errc::kShape,
       "something to choose from, got [2, 0]"},
      {"argmax of nothing", ops::argmax_check("argmax", Tensor::meta({0}), std::nullopt),
       Errc::kShape, "got [0]"},
      {"topk axis", ops::topk_check(Tensor::meta({5, 2}), 1, -3), Errc::kArgument, "got -3"},
  });
  EXPECT_FALSE(ops::sort_check("argsort", Tensor::meta({}), std::nullopt));
}

MT_ON_EVERY_BACKEND(Sort);
MT_ON_EVERY_BACKEND(SortArgmax);

}  // namespace
}  // namespace mlxtape::test
