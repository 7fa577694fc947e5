#include "mlxtape/ops/elementwise.h"

#include <rapidcheck.h>

#include <cmath>
#include <functional>
#include <limits>

#include "elementwise_oracle.h"
#include "mlxtape/core/reuse.h"
#include "support/op_test.h"

namespace mlxtape::test {
namespace {

constexpr DType kTypes[] = {DType::kF32, DType::kF16, DType::kBF16};
constexpr double kInf = std::numeric_limits<double>::infinity();
const double kNaN = std::nan("");

std::vector<double> between(Noise& noise, std::int64_t n, DType dtype, double low, double high) {
  std::vector<double> values(static_cast<std::size_t>(n));
  for (double& v : values) v = round_to(dtype, (low + high) / 2 + (high - low) / 2 * noise.next());
  return values;
}

// For each element of shape, where the element of a tensor stretched to it is.
std::vector<std::size_t> positions(const Shape& from, const Shape& shape) {
  const Strides strides = Tensor::meta(from).broadcast_to(shape).strides();
  std::vector<std::size_t> at;
  for (std::int64_t i = 0; i < *element_count(shape); ++i) {
    std::int64_t rest = i, where = 0;
    for (std::int64_t axis = shape.rank() - 1; axis >= 0; --axis) {
      where += rest % shape[axis] * strides[axis];
      rest /= shape[axis];
    }
    at.push_back(static_cast<std::size_t>(where));
  }
  return at;
}

TEST(ElementwiseOracle, SlopesMatchCentralDifferences) {
  constexpr double kStep = 1e-5;
  const auto near = [](double difference, double slope, const char* name) {
    EXPECT_NEAR(difference, slope, 1e-7 * (1 + std::abs(slope))) << name;
  };
  for (const Unary& op : unaries()) {
    Noise noise(7);
    for (int i = 0; i < 200; ++i) {
      const double x = (op.low + op.high) / 2 + (op.high - op.low) / 2 * noise.next();
      const double difference = (op.value(x + kStep) - op.value(x - kStep)) / (2 * kStep);
      near(difference, op.slope(x, op.value(x)), op.name);
    }
  }
  for (const Binary& op : binaries()) {
    Noise noise(8);
    for (int i = 0; i < 200; ++i) {
      const double a = (op.low + op.high) / 2 + (op.high - op.low) / 2 * noise.next();
      const double b = (op.low + op.high) / 2 + (op.high - op.low) / 2 * noise.next();
      if (std::abs(a - b) < 1e-3) continue;
      near((op.value(a + kStep, b) - op.value(a - kStep, b)) / (2 * kStep), op.slope_a(a, b),
           op.name);
      near((op.value(a, b + kStep) - op.value(a, b - kStep)) / (2 * kStep), op.slope_b(a, b),
           op.name);
    }
  }
}

TEST(ElementwiseCheck, SaysWhatIsWrong) {
  const auto f32 = Tensor::meta({4, 2});
  const auto i32 = Tensor::meta({4, 2}, DType::kI32);
  const auto metal = Tensor::meta({4, 2}, DType::kF32, Backend::kMetal);
  expect_refused({
      {"integers", ops::unary_check("exp", i32), Errc::kDType,
       "exp: x must be f32, f16 or bf16, got i32"},
      {"shapes", ops::binary_check("add", f32, Tensor::meta({4})), Errc::kShape,
       "add: a and b must broadcast, got [4, 2] and [4]"},
      {"devices", ops::binary_check("add", f32, metal), Errc::kDevice, "got metal"},
      {"a small integer",
       ops::binary_check("add", Tensor::meta({1}, DType::kI8), Tensor::meta({1}, DType::kI8)),
       Errc::kDType, "i32, u32 or i64, got i8"},
      {"integers divided", ops::binary_check("divide", i32, i32), Errc::kDType,
       "divide: the type of a and b together must be f32, f16 or bf16, got i32"},
      {"a double", ops::number_check("add", Tensor::meta({1}, DType::kF64), 1), Errc::kDType,
       "got f64"},
      {"half an integer", ops::number_check("add", i32, 0.5), Errc::kArgument,
       "the number must be one that i32 has, got 0.5"},
      {"too large an integer", ops::number_check("add", i32, 1e10), Errc::kArgument, "i32 has"},
      {"just too large", ops::number_check("add", Tensor::meta({1}, DType::kI64), 0x1p63),
       Errc::kArgument, "i64 has"},
      {"logical", ops::logical_check("logical_or", f32, Tensor::meta({3})), Errc::kShape,
       "logical_or"},
      {"where: sides", ops::where_check(f32, f32, Tensor::meta({3})), Errc::kShape,
       "where: a and b"},
      {"where: condition", ops::where_check(Tensor::meta({3}), f32, f32), Errc::kShape,
       "condition must broadcast with [4, 2], got [3]"},
      {"where: device", ops::where_check(metal, f32, f32), Errc::kDevice,
       "condition must be where a is"},
  });
  EXPECT_FALSE(ops::number_check("power", f32, 0.5));
  EXPECT_FALSE(ops::binary_check("add", i32, Tensor::meta({}, DType::kU8)));
}

class Elementwise : public OnDevice {
 protected:
  // y and dx of one function on n numbers.
  void check(const Unary& op, const Shape& shape, DType dtype, bool strided = false,
             std::int64_t offset = 0) {
    const std::int64_t n = *element_count(shape);
    Noise noise(static_cast<std::uint64_t>(n + 1));
    const auto x = between(noise, n, dtype, op.low, op.high);
    const auto dy = random_values(noise, n, dtype);
    const auto put = [&](const std::vector<double>& v) {
      return strided ? upload_strided(v, shape, dtype) : upload(v, shape, dtype, offset);
    };
    const std::string at =
        std::string(op.name) + " " + to_string(shape) + " " + name_of(dtype) + " ";
    Tape tape(encoder());
    const Tensor watched = tape.watch(put(x));
    const Tensor y = op.record(tape, watched);
    const auto stored = download(y);
    Refs want_y, want_dx;
    for (std::size_t i = 0; i < x.size(); ++i) {
      const double value = op.value(x[i]);
      const double from = op.keeps_y ? stored[i] : value;
      const double slope = op.slope(x[i], from);
      const double scale = op.slope_scale != nullptr ? op.slope_scale(x[i], from) : std::abs(slope);
      want_y.push_back({value, op.value_scale != nullptr ? op.value_scale(x[i]) : std::abs(value)});
      want_dx.push_back({slope * dy[i], std::abs(dy[i]) * scale});
    }
    expect_close(at + "y", stored, want_y, dtype, 0);
    EXPECT_EQ(download(op.run(encoder(), put(x))), stored) << at;
    if (n == 0) return;
    tape.backward(y, put(dy));
    expect_close(at + "dx", download(tape.grad(watched)), want_dx, dtype, 0);
  }

  struct Sides {
    Shape a, b;
  };
  void check(const Binary& op, const Sides& sides, DType dtype, bool strided = false) {
    const Shape shape = *broadcast_shapes(sides.a, sides.b);
    const std::int64_t n = *element_count(shape);
    Noise noise(static_cast<std::uint64_t>(n + 1));
    const auto a = between(noise, *element_count(sides.a), dtype, op.low, op.high);
    const auto b = between(noise, *element_count(sides.b), dtype, op.low, op.high);
    const auto dy = random_values(noise, n, dtype);
    const auto put = [&](const std::vector<double>& v, const Shape& s) {
      return strided ? upload_strided(v, s, dtype) : upload(v, s, dtype);
    };
    const std::string at = std::string(op.name) + " " + to_string(sides.a) + " " +
                           to_string(sides.b) + " " + name_of(dtype) + " ";
    const auto at_a = positions(sides.a, shape);
    const auto at_b = positions(sides.b, shape);
    Refs want_y, want_a(a.size()), want_b(b.size());
    for (std::size_t i = 0; i < static_cast<std::size_t>(n); ++i) {
      const double u = a[at_a[i]], v = b[at_b[i]];
      const double y = op.value(u, v);
      want_y.push_back({y, op.value_scale != nullptr ? op.value_scale(u, v) : std::abs(y)});
      const double da = op.slope_a(u, v), db = op.slope_b(u, v);
      const double scale = op.scale_a != nullptr ? op.scale_a(u, v) : std::abs(da);
      // Rounded to the stored type before they are added up.
      want_a[at_a[i]].value += da * dy[i];
      want_a[at_a[i]].scale += 2 * scale * std::abs(dy[i]);
      want_b[at_b[i]].value += db * dy[i];
      want_b[at_b[i]].scale += 2 * std::abs(db * dy[i]);
    }
    if (a.size() == static_cast<std::size_t>(n))
      for (Ref& r : want_a) r.scale /= 2;
    if (b.size() == static_cast<std::size_t>(n))
      for (Ref& r : want_b) r.scale /= 2;
    Tape tape(encoder());
    const Tensor ta = tape.watch(put(a, sides.a));
    const Tensor tb = tape.watch(put(b, sides.b));
    const Tensor y = op.record(tape, ta, tb);
    EXPECT_EQ(y.shape(), shape);
    expect_close(at + "y", download(y), want_y, dtype, 0);
    if (n == 0) return;
    tape.backward(y, upload(dy, shape, dtype));
    const auto terms = [&](std::size_t size) {
      return n / static_cast<std::int64_t>(size);
    };
    expect_close(at + "da", download(tape.grad(ta)), want_a, dtype, terms(a.size()));
    expect_close(at + "db", download(tape.grad(tb)), want_b, dtype, terms(b.size()));
  }

  std::vector<double> of(const Unary& op, const std::vector<double>& x) {
    return download(
        op.run(encoder(), upload(x, {static_cast<std::int64_t>(x.size())}, DType::kF32)));
  }
  Tensor row(const std::vector<double>& v, DType dtype = DType::kF32) {
    return upload(v, {static_cast<std::int64_t>(v.size())}, dtype);
  }
};

TEST_P(Elementwise, UnaryMatchesOracleForEverySize) {
  for (const Unary& op : unaries()) {
    for (const DType dtype : kTypes) {
      for (const std::int64_t n : {0, 1, 2, 7, 15, 16, 17, 31, 32, 33, 64, 255, 256, 257, 4099}) {
        check(op, {n}, dtype);
      }
      check(op, {}, dtype);
      check(op, {5, 33}, dtype, true);
      check(op, {3, 129}, dtype, false, 3);
    }
  }
}

// Large enough for several threads, and to be written past the cache.
TEST_P(Elementwise, MatchesOracleWhenStreamed) {
  for (const std::size_t op : {1U, 8U})
    check(unaries()[op], {scaled(1100), 1009}, DType::kF32, false, 3);
  check(unaries()[1], {scaled(2200), 1009}, DType::kBF16, false, 3);
  check(unaries()[1], {scaled(2200), 1009}, DType::kF16);
  for (const std::size_t op : {0U, 7U}) {
    check(binaries()[op], {{scaled(1100), 1009}, {scaled(1100), 1009}}, DType::kF32);
    check(binaries()[op], {{scaled(2200), 1009}, {scaled(2200), 1009}}, DType::kBF16);
    check(binaries()[op], {{scaled(1100), 1009}, {1009}}, DType::kF32);
  }
}

TEST_P(Elementwise, BinaryMatchesOracleForEveryBroadcast) {
  const Sides sides[] = {{{0}, {0}},
                         {{0, 3}, {1}},
                         {{1}, {1}},
                         {{}, {}},
                         {{33}, {33}},
                         {{257}, {1}},
                         {{1}, {257}},
                         {{5, 67}, {67}},
                         {{5, 67}, {5, 1}},
                         {{1, 67}, {5, 1}},
                         {{7, 3}, {3}},
                         {{300, 5}, {300, 1}},
                         {{2, 3, 4, 5}, {3, 1, 5}},
                         {{2, 1, 70}, {1, 3, 70}},
                         {{}, {4, 9}},
                         {{6, 200}, {6, 200}},
                         {{3, 1, 2}, {1, 80, 1}},
                         {{1, 2500}, {3, 1}}};
  for (const Binary& op : binaries()) {
    for (const DType dtype : kTypes) {
      for (const Sides& s : sides) check(op, s, dtype);
    }
    check(op, {{5, 67}, {67}}, DType::kF32, true);
    check(op, {{4, 1}, {4, 3000}}, DType::kF32, true);
  }
}

// Views whose axes come in another order, read where they lie.
TEST_P(Elementwise, ReadsPermutedViews) {
  Noise noise(3);
  for (const Shape& shape : {Shape{70, 90}, Shape{5, 2000}, Shape{2000, 3}}) {
    const std::int64_t n = *element_count(shape);
    for (const DType dtype : kTypes) {
      const auto a = random_values(noise, n, dtype);
      const auto b = random_values(noise, n, dtype);
      const Tensor ta = upload(a, {shape[1], shape[0]}, dtype).transpose({1, 0});
      const Tensor tb = upload(b, shape, dtype);
      Refs want;
      for (std::int64_t i = 0; i < n; ++i) {
        const double u = a[static_cast<std::size_t>(i % shape[1] * shape[0] + i / shape[1])];
        const double v = b[static_cast<std::size_t>(i)];
        want.push_back({u - v, std::abs(u) + std::abs(v)});
      }
      expect_close("a", download(ops::subtract(encoder(), ta, tb)), want, dtype, 0);
      for (Ref& r : want) r.value = -r.value;
      expect_close("b", download(ops::subtract(encoder(), tb, ta)), want, dtype, 0);
    }
  }
}

TEST_P(Elementwise, NumbersTakeTheTensorsType) {
  Noise noise(4);
  for (const Binary& op : binaries()) {
    if (op.run_left == nullptr) continue;
    for (const DType dtype : kTypes) {
      const auto x = between(noise, 300, dtype, op.low, op.high);
      const auto dy = random_values(noise, 300, dtype);
      const double number = 0.7719;  // no type has it
      const double rounded = round_to(dtype, number);
      for (const bool left : {true, false}) {
        Refs want_y, want_dx;
        for (std::size_t i = 0; i < x.size(); ++i) {
          const double a = left ? x[i] : rounded, b = left ? rounded : x[i];
          const double y = op.value(a, b);
          const double slope = left ? op.slope_a(a, b) : op.slope_b(a, b);
          const double scale = left && op.scale_a != nullptr ? op.scale_a(a, b) : std::abs(slope);
          want_y.push_back({y, op.value_scale != nullptr ? op.value_scale(a, b) : std::abs(y)});
          want_dx.push_back({slope * dy[i], scale * std::abs(dy[i])});
        }
        const std::string at = std::string(op.name) + " " + name_of(dtype) + (left ? " l" : " r");
        Tape tape(encoder());
        const Tensor tx = tape.watch(row(x, dtype));
        const Tensor y =
            left ? op.record_left(tape, tx, number) : op.record_right(tape, number, tx);
        expect_close(at + " y", download(y), want_y, dtype, 0);
        const Tensor plain =
            left ? op.run_left(encoder(), tx, number) : op.run_right(encoder(), number, tx);
        EXPECT_EQ(download(plain), download(y)) << at;
        tape.backward(y, row(dy, dtype));
        expect_close(at + " dx", download(tape.grad(tx)), want_dx, dtype, 0);
      }
    }
  }
  // Rounded first: bf16 has 1.0078125, not 1.004.
  EXPECT_EQ(download(ops::multiply(encoder(), row({256}, DType::kBF16), 1.004)),
            (std::vector<double>{258}));
}

TEST_P(Elementwise, TypesMeet) {
  const Tensor half = row({1, 2, 3}, DType::kF16);
  const Tensor brain = row({1, 2, 3}, DType::kBF16);
  EXPECT_EQ(ops::add(encoder(), half, brain).dtype(), DType::kF32);
  EXPECT_EQ(ops::add(encoder(), row({1, 2, 3}, DType::kI64), brain).dtype(), DType::kBF16);
  EXPECT_EQ(ops::less(encoder(), half, brain).dtype(), DType::kBool);
  Tape tape(encoder());
  const Tensor a = tape.watch(half);
  const Tensor b = tape.watch(brain);
  tape.backward(ops::multiply(tape, a, b), row({1, 1, 1}));
  EXPECT_EQ(tape.grad(a).dtype(), DType::kF16);
  EXPECT_EQ(tape.grad(b).dtype(), DType::kBF16);
  EXPECT_EQ(download(tape.grad(a)), (std::vector<double>{1, 2, 3}));
}

TEST_P(Elementwise, ExtremeNumbers) {
  const std::vector<double> x = {0,     -0.0,     kInf, -kInf, kNaN,   1e-40, -1e-40, 3e38,
                                 -3e38, 0x1p-149, 88.7, -87.5, -103.5, 1,     -1,     -0.5,
                                 15,    -15,      20,   -20,   1e-8,   -1e-8, 0x1p24, -0x1p30};
  const double step = 2 * smallest_step(DType::kF32);
  for (const Unary& op : unaries()) {
    std::vector<double> stored;
    for (const double v : x) stored.push_back(round_to(DType::kF32, v));
    const auto got = of(op, stored);
    for (std::size_t i = 0; i < x.size(); ++i) {
      if (step > 0x1p-148 && x[i] != 0 && std::abs(x[i]) < 0x1p-126) continue;  // may count as 0
      const double want = round_to(DType::kF32, op.value(stored[i]));
      if (std::isnan(want)) {
        EXPECT_TRUE(std::isnan(got[i])) << op.name << "(" << x[i] << ") = " << got[i];
      } else if (std::isinf(want) || want == 0) {
        EXPECT_NEAR(got[i] == want ? 0 : got[i] - want, 0, step) << op.name << "(" << x[i] << ")";
      } else {
        const double scale = op.value_scale != nullptr ? op.value_scale(stored[i]) : std::abs(want);
        EXPECT_LE(std::abs(got[i] - want), scale * 0x1p-20 + (1 + std::abs(x[i])) * step)
            << op.name << "(" << x[i] << ") = " << got[i] << ", want " << want;
      }
    }
  }
}

TEST_P(Elementwise, PowerAsIeeeSays) {
  const double values[] = {0,     -0.0,   1,     -1,       2,     -2,  0.5,  -0.5,
                           3,     -3,     kInf,  -kInf,    kNaN,  2.5, -2.5, 1e30,
                           1e-30, -1e-30, 1e-42, 16777217, -1e30, 1e5};
  std::vector<double> a, b;
  for (const double u : values) {
    for (const double v : values) {
      a.push_back(round_to(DType::kF32, u));
      b.push_back(round_to(DType::kF32, v));
    }
  }
  const auto got = download(ops::power(encoder(), row(a), row(b)));
  const bool flushes = smallest_step(DType::kF32) > 0x1p-149;
  for (std::size_t i = 0; i < a.size(); ++i) {
    if (flushes && b[i] != 0 && std::abs(b[i]) < 0x1p-126) continue;  // may count as 0
    const double want = round_to(DType::kF32, std::pow(a[i], b[i]));
    if (std::isnan(want)) {
      EXPECT_TRUE(std::isnan(got[i])) << a[i] << "^" << b[i] << " = " << got[i];
    } else {
      EXPECT_LE(got[i] == want ? 0 : std::abs(got[i] - want),
                std::abs(want) * 0x1p-21 + 2 * smallest_step(DType::kF32))
          << a[i] << "^" << b[i] << " = " << got[i] << ", want " << want;
      EXPECT_EQ(std::signbit(got[i]), std::signbit(want)) << a[i] << "^" << b[i];
    }
  }
}

// What mlx.core does, asked of it: ties, NaN and bounds.
TEST_P(Elementwise, GradientsAtTheEdges) {
  const auto grads = [&](auto&& op, const std::vector<double>& a, const std::vector<double>& b) {
    Tape tape(encoder());
    const Tensor ta = tape.watch(row(a));
    const Tensor tb = tape.watch(row(b));
    const Tensor y = op(tape, ta, tb);
    tape.backward(y, row(std::vector<double>(a.size(), 1)));
    return std::pair(download(tape.grad(ta)), download(tape.grad(tb)));
  };
  const auto grad = [&](auto&& op, const std::vector<double>& x) {
    Tape tape(encoder());
    const Tensor tx = tape.watch(row(x));
    tape.backward(op(tape, tx), row(std::vector<double>(x.size(), 1)));
    return download(tape.grad(tx));
  };
  using Values = std::vector<double>;
  const Values a{1, 2, 3, kNaN, 1}, b{1, 3, 2, 1, kNaN};
  const auto larger =
      grads([](Tape& t, const Tensor& u, const Tensor& v) { return ops::maximum(t, u, v); }, a, b);
  EXPECT_EQ(larger.first, (Values{0, 0, 1, 0, 0}));
  EXPECT_EQ(larger.second, (Values{1, 1, 0, 0, 0}));
  const auto smaller =
      grads([](Tape& t, const Tensor& u, const Tensor& v) { return ops::minimum(t, u, v); }, a, b);
  EXPECT_EQ(smaller.first, (Values{0, 1, 0, 0, 0}));
  EXPECT_EQ(smaller.second, (Values{1, 0, 1, 0, 0}));
  for (const auto& y :
       {ops::maximum(encoder(), row(a), row(b)), ops::minimum(encoder(), row(a), row(b))}) {
    const auto v = download(y);
    EXPECT_TRUE(std::isnan(v[3]) && std::isnan(v[4]) && !std::isnan(v[2]));
  }
  EXPECT_EQ(grad([](Tape& t, const Tensor& x) { return ops::clip(t, x, -1, 1); },
                 {-2, -1, 0, 1, 2, kNaN}),
            (Values{0, 0, 1, 0, 0, 0}));
  EXPECT_EQ(download(ops::clip(encoder(), row({-2, 0, 2}), 1, -1)), (Values{-1, -1, -1}));
  // A bound is what it is in x's type: f16 and bf16 have a larger number in place of 0.7719.
  for (const DType dtype : {DType::kF16, DType::kBF16}) {
    const double bound = 0.7719, stored = round_to(dtype, bound);
    EXPECT_GT(stored, bound);
    for (const double sign : {1.0, -1.0}) {
      Tape tape(encoder());
      const Tensor x = tape.watch(row({sign * stored, sign}, dtype));
      const Tensor y = sign > 0 ? ops::clip(tape, x, bound, 2) : ops::clip(tape, x, -2, -bound);
      tape.backward(y, row({1, 1}, dtype));
      EXPECT_EQ(download(tape.grad(x)), (Values{0, 1})) << name_of(dtype) << " " << sign;
    }
  }
  EXPECT_EQ(grad([](Tape& t, const Tensor& x) { return ops::abs(t, x); }, {-2, 0, -0.0, 3, kNaN}),
            (Values{-1, 0, 0, 1, 0}));
  EXPECT_EQ(grad([](Tape& t, const Tensor& x) { return ops::sqrt(t, x); }, {0, 4}),
            (Values{kInf, 0.25}));
  EXPECT_EQ(grad([](Tape& t, const Tensor& x) { return ops::rsqrt(t, x); }, {0, 4}),
            (Values{-kInf, -0.0625}));
  // Far from 0, where squares and cubes are infinite, the slopes are their limits.
  const Values far{1e20, -1e20, 3e38, -3e38};
  for (const Unary& op : unaries()) {
    const std::string name = op.name;
    if (name != "gelu" && name != "gelu_tanh" && name != "silu" && name != "softplus") continue;
    EXPECT_EQ(grad([&](Tape& t, const Tensor& x) { return op.record(t, x); }, far),
              (Values{1, 0, 1, 0}))
        << name;
  }
  const auto powers =
      grads([](Tape& t, const Tensor& u, const Tensor& v) { return ops::power(t, u, v); },
            {0, 0, 0, 0, 2, -2}, {2, 1, 0.5, -1, 3, 3});
  EXPECT_EQ(powers.first, (Values{0, 1, kInf, -kInf, 12, 12}));
  EXPECT_EQ(Values(powers.second.begin(), powers.second.begin() + 4), (Values{0, 0, 0, -kInf}));
  EXPECT_TRUE(std::isnan(powers.second[5]));
}

// mx.maximum(a, b) and mx.minimum(a, b): of zeros, b; mx.clip: the bound.
TEST_P(Elementwise, ZerosOfBothSignsAsMlx) {
  const auto signs = [&](const Tensor& t) {
    std::vector<bool> v;
    for (const double x : download(t)) v.push_back(std::signbit(x));
    return v;
  };
  using Signs = std::vector<bool>;
  for (const DType dtype : kTypes) {
    const Tensor a = row({0.0, -0.0}, dtype), b = row({-0.0, 0.0}, dtype);
    EXPECT_EQ(signs(ops::maximum(encoder(), a, b)), (Signs{true, false}));
    EXPECT_EQ(signs(ops::minimum(encoder(), a, b)), (Signs{true, false}));
    EXPECT_EQ(signs(ops::clip(encoder(), b, 0.0, 1.0)), (Signs{false, false}));
    EXPECT_EQ(signs(ops::clip(encoder(), a, -0.0, 1.0)), (Signs{true, true}));
    EXPECT_EQ(signs(ops::clip(encoder(), a, -1.0, -0.0)), (Signs{true, true}));
  }
}

TEST_P(Elementwise, WhereChoosesAndSendsZeros) {
  for (const DType dtype : kTypes) {
    const Tensor condition = upload({1, 0, 1, 0, 1, 1}, {2, 3}, DType::kBool);
    Tape tape(encoder());
    const Tensor a = tape.watch(upload({1, 2, 3}, {3}, dtype));
    const Tensor b = tape.watch(upload({-1, -2}, {2, 1}, dtype));
    const Tensor y = ops::where(tape, condition, a, b);
    EXPECT_EQ(download(y), (std::vector<double>{1, -1, 3, -2, 2, 3}));
    tape.backward(y, upload({1, 2, 4, 8, 16, kInf}, {2, 3}, dtype));
    EXPECT_EQ(download(tape.grad(a)), (std::vector<double>{1, 16, kInf}));
    EXPECT_EQ(download(tape.grad(b)), (std::vector<double>{2, 8}));
  }
  if (GetParam() == Backend::kCpu) {  // a gradient of 8 bytes an element
    Tape tape(encoder());
    const Tensor x = tape.watch(row({1, 2, 3}, DType::kF32));
    const Tensor wide = ops::cast(tape, x, DType::kF64);
    const Tensor y =
        ops::where(tape, row({1, 0, 1}, DType::kBool), wide, row({7, 8, 9}, DType::kF64));
    tape.backward(ops::cast(tape, y, DType::kF32), row({1, 10, 100}, DType::kF32));
    EXPECT_EQ(download(tape.grad(x)), (std::vector<double>{1, 0, 100}));
  }
  for (std::size_t t = 0; t < kDTypeCount; ++t) {  // elements of every size, more than one piece
    const auto dtype = static_cast<DType>(t);
    if (dtype == DType::kF64 && GetParam() != Backend::kCpu) continue;
    std::vector<double> c, a, b, want;
    for (int i = 0; i < 3001; ++i) {
      c.push_back(i % 3 == 0 ? 1 : 0);
      a.push_back(i % 2);
      b.push_back((i + 1) % 2);
      want.push_back(i % 3 == 0 ? a.back() : b.back());
    }
    EXPECT_EQ(download(ops::where(encoder(), row(c, DType::kI32), row(a, dtype), row(b, dtype))),
              want)
        << name_of(dtype);
  }
}

TEST_P(Elementwise, IntegersAndTruthValues) {
  Noise noise(9);
  for (const DType dtype : {DType::kBool, DType::kI32, DType::kU32, DType::kI64, DType::kF16}) {
    for (const Sides& s : {Sides{{2500}, {2500}}, Sides{{40, 70}, {70}}, Sides{{40, 70}, {40, 1}},
                           Sides{{300, 3}, {3}}}) {
      const auto make = [&](std::int64_t n) {
        std::vector<double> v;
        for (std::int64_t i = 0; i < n; ++i) {
          v.push_back(static_cast<double>(noise.below(dtype == DType::kBool ? 2 : 5)) -
                      (is_signed(dtype) ? 2 : 0));
        }
        return v;
      };
      const auto a = make(*element_count(s.a)), b = make(*element_count(s.b));
      const Shape shape = *broadcast_shapes(s.a, s.b);
      const auto at_a = positions(s.a, shape), at_b = positions(s.b, shape);
      const auto expect = [&](const char* what, const Tensor& y, auto&& fn) {
        std::vector<double> want;
        for (std::size_t i = 0; i < at_a.size(); ++i) {
          double v = static_cast<double>(fn(a[at_a[i]], b[at_b[i]]));
          if (y.dtype() == DType::kBool) v = v != 0 ? 1 : 0;
          if (y.dtype() == DType::kU32 && v < 0) v += 0x1p32;
          want.push_back(v);
        }
        EXPECT_EQ(download(y), want) << what << " " << name_of(dtype) << " " << to_string(s.b);
      };
      const Tensor ta = upload(a, s.a, dtype), tb = upload(b, s.b, dtype);
      expect("add", ops::add(encoder(), ta, tb), [](double u, double v) { return u + v; });
      expect("subtract", ops::subtract(encoder(), ta, tb),
             [](double u, double v) { return u - v; });
      expect("multiply", ops::multiply(encoder(), ta, tb),
             [](double u, double v) { return u * v; });
      expect("max", ops::maximum(encoder(), ta, tb),
             [](double u, double v) { return std::max(u, v); });
      expect("min", ops::minimum(encoder(), ta, tb),
             [](double u, double v) { return std::min(u, v); });
      expect("equal", ops::equal(encoder(), ta, tb), [](double u, double v) { return u == v; });
      expect("not_equal", ops::not_equal(encoder(), ta, tb),
             [](double u, double v) { return u != v; });
      expect("less", ops::less(encoder(), ta, tb), [](double u, double v) { return u < v; });
      expect("less_equal", ops::less_equal(encoder(), ta, tb),
             [](double u, double v) { return u <= v; });
      expect("greater", ops::greater(encoder(), ta, tb), [](double u, double v) { return u > v; });
      expect("greater_equal", ops::greater_equal(encoder(), ta, tb),
             [](double u, double v) { return u >= v; });
      expect("and", ops::logical_and(encoder(), ta, tb),
             [](double u, double v) { return u != 0 && v != 0; });
      expect("or", ops::logical_or(encoder(), ta, tb),
             [](double u, double v) { return u != 0 || v != 0; });
      expect("not",
             ops::logical_not(encoder(), ops::add(encoder(), ta, ops::subtract(encoder(), tb, tb))),
             [](double u, double) { return u == 0; });
      if (dtype != DType::kBool) {
        expect("a number", ops::add(encoder(), ta, 3), [](double u, double) { return u + 3; });
      }
    }
  }
  const Tensor nan = row({kNaN}), one = row({1});
  EXPECT_EQ(download(ops::equal(encoder(), nan, nan)), (std::vector<double>{0}));
  EXPECT_EQ(download(ops::not_equal(encoder(), nan, nan)), (std::vector<double>{1}));
  EXPECT_EQ(download(ops::less(encoder(), nan, one)), (std::vector<double>{0}));
  EXPECT_EQ(download(ops::logical_and(encoder(), nan, one)), (std::vector<double>{1}));
  const double top = 2147483647;  // integers wrap around
  EXPECT_EQ(download(ops::add(encoder(), row({top}, DType::kI32), 1)),
            (std::vector<double>{-top - 1}));
}

TEST_P(Elementwise, CastsBetweenAllTypes) {
  // The last, by way of f32 to bf16, would be rounded twice.
  const std::vector<double> values = {0,     1,     -1,  3.99, -3.99,      127.5, 300,     -129,
                                      65535, 65536, 1e9, -1e9, 4294967296, 1e19,  -1e19,   kInf,
                                      -kInf, kNaN,  0.1, 2049, 257,        1e-30, 16842753};
  std::vector<double> many;
  for (int i = 0; i < 1500; ++i)
    many.push_back(values[static_cast<std::size_t>(i) % values.size()]);
  for (std::size_t i = 0; i < kDTypeCount; ++i) {
    for (std::size_t j = 0; j < kDTypeCount; ++j) {
      const auto from = static_cast<DType>(i), to = static_cast<DType>(j);
      if (GetParam() != Backend::kCpu && (from == DType::kF64 || to == DType::kF64)) continue;
      const Tensor x = row(many, from);
      std::vector<unsigned char> bytes(many.size() * size_of(to));
      convert(bits_of(encoder(), x).data(), from, bytes.data(), to, many.size());
      const Tensor y = ops::cast(encoder(), x, to);
      EXPECT_EQ(y.dtype(), to);
      std::vector<double> want(many.size());
      convert(bytes.data(), to, want.data(), DType::kF64, many.size());
      const auto got = download(y);
      for (std::size_t k = 0; k < many.size(); ++k) {
        ASSERT_TRUE(got[k] == want[k] || (std::isnan(got[k]) && std::isnan(want[k])))
            << name_of(from) << " " << many[k] << " to " << name_of(to) << ": " << got[k]
            << ", want " << want[k];
      }
    }
  }
  Noise noise(2);
  const auto x = random_values(noise, scaled(2200000), DType::kF32);
  std::vector<double> want;
  for (const double v : x) want.push_back(round_to(DType::kBF16, v));
  EXPECT_EQ(download(ops::cast(encoder(), row(x), DType::kBF16)), want);
  Tape tape(encoder());
  const Tensor watched = tape.watch(row({1, 2}, DType::kBF16));
  tape.backward(ops::cast(tape, watched, DType::kF32), row({3, 4.001}));
  EXPECT_EQ(tape.grad(watched).dtype(), DType::kBF16);
  EXPECT_EQ(download(tape.grad(watched)), (std::vector<double>{3, 4}));
}

// Memory that is moved in holds the result; memory that somebody else may read does not.
TEST_P(Elementwise, ReusesWhatIsGivenAway) {
  Tensor x = row({1, 2, 3});
  const Tensor other = row({1, 1, 1});
  const void* memory = x.data();
  Tensor y = ops::add(encoder(), std::move(x), other);
  EXPECT_EQ(y.data(), memory);
  EXPECT_EQ(download(y), (std::vector<double>{2, 3, 4}));
  Tensor z = ops::square(encoder(), y);
  EXPECT_NE(z.data(), memory);
  y = ops::multiply(encoder(), 2, std::move(y));
  EXPECT_EQ(y.data(), memory);
  EXPECT_EQ(download(z), (std::vector<double>{4, 9, 16}));
  EXPECT_NE(ops::add(encoder(), std::move(y), row({1, 1, 1}).broadcast_to({2, 3})).data(), memory);
  const Tensor strided = upload_strided({1, 2, 3}, {3}, DType::kF32);
  EXPECT_EQ(reuse_or_empty(encoder(), strided, {3}, DType::kF32).is_contiguous(), true);
  const Tensor bits = row({1, 2, 3});
  EXPECT_NE(reuse_or_empty(encoder(), bits, {3}, DType::kI32).data(), bits.data());
  if (GetParam() == Backend::kCpu) {
    float host[] = {1, 2, 3};
    ops::negative(encoder(), Tensor::wrap(host, {3}));
    EXPECT_EQ(host[0], 1);
  }
}

TEST_P(Elementwise, SavesLittle) {
  Tape tape(encoder());
  const Tensor x = tape.watch(row({1, 2, 3}));
  const Tensor constant = row({1, 1, 1});
  ops::add(tape, ops::negative(tape, x), 2);
  ops::subtract(tape, x, constant);
  EXPECT_EQ(tape.report().saved_bytes, 0U);
  ops::multiply(tape, x, constant);
  const std::size_t one = tape.report().saved_bytes;
  EXPECT_GT(one, 0U);
  ops::divide(tape, x, constant);
  EXPECT_EQ(tape.report().saved_bytes, one);  // the constant alone
}

TEST_P(Elementwise, SameBitsOnEveryRun) {
  Noise noise(5);
  for (const DType dtype : kTypes) {
    const Tensor a = upload(random_values(noise, 300 * 1000, dtype, 4), {300, 1000}, dtype);
    const Tensor b = upload(random_values(noise, 1000, dtype), {1000}, dtype);
    expect_repeatable(encoder(), [&] {
      Tape tape(encoder());
      const Tensor ta = tape.watch(a), tb = tape.watch(b);
      const Tensor y = ops::gelu(tape, ops::multiply(tape, ta, tb));
      tape.backward(y, a);
      return std::vector<Tensor>{y, tape.grad(ta), tape.grad(tb)};
    });
  }
}

TEST_P(Elementwise, RandomBroadcasts) {
  EXPECT_TRUE(rc::check("divide matches its oracle", [this] {
    Shape shape;
    const int rank = *rc::gen::inRange(0, 5);
    for (int i = 0; i < rank; ++i) shape.push_back(*rc::gen::inRange(1, 7));
    if (rank > 0) shape[rank - 1] = *rc::gen::elementOf(std::vector<int>{1, 3, 65, 130});
    Shape a, b;
    const int skip = rank == 0 ? 0 : *rc::gen::inRange(0, rank);
    for (int i = 0; i < rank; ++i) {
      a.push_back(*rc::gen::arbitrary<bool>() ? shape[i] : 1);
      if (i >= skip) b.push_back(*rc::gen::arbitrary<bool>() ? shape[i] : 1);
    }
    check(binaries()[3], {a, b},
          *rc::gen::elementOf(std::vector<DType>(std::begin(kTypes), std::end(kTypes))),
          *rc::gen::arbitrary<bool>());
    RC_ASSERT(!HasFailure());
  }));
}

MT_ON_EVERY_BACKEND(Elementwise);

}  // namespace
}  // namespace mlxtape::test
