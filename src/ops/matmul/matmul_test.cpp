#include "mlxtape/ops/matmul.h"

#include <rapidcheck.h>

#include <cmath>
#include <numeric>

#include "support/op_test.h"

namespace mlxtape::test {
namespace {

using ops::Activation;
using ops::MatmulOptions;

constexpr DType kTypes[] = {DType::kF32, DType::kF16, DType::kBF16};
constexpr Activation kActivations[] = {Activation::kNone, Activation::kSilu, Activation::kGelu,
                                       Activation::kGeluTanh};

// ---- the formula block of matmul.h, in double ----

double act(Activation activation, double z) {
  switch (activation) {
    case Activation::kSilu: return z / (1 + std::exp(-z));
    case Activation::kGelu: return z * 0.5 * std::erfc(-z / std::sqrt(2.0));
    case Activation::kGeluTanh:
      return z * 0.5 * (1 + std::tanh(std::sqrt(2 / M_PI) * (z + 0.044715 * z * z * z)));
    default: return z;
  }
}
double slope(Activation activation, double z) {
  switch (activation) {
    case Activation::kSilu: {
      const double s = 1 / (1 + std::exp(-z));
      return s * (1 + z * (1 - s));
    }
    case Activation::kGelu:
      return 0.5 * std::erfc(-z / std::sqrt(2.0)) + z * std::exp(-z * z / 2) / std::sqrt(2 * M_PI);
    case Activation::kGeluTanh: {
      const double root = std::sqrt(2 / M_PI);
      const double t = std::tanh(root * (z + 0.044715 * z * z * z));
      return 0.5 * (1 + t) + 0.5 * z * (1 - t * t) * root * (1 + 3 * 0.044715 * z * z);
    }
    default: return 1;
  }
}

// Where the matrices of a, b and y of one problem are in arrays without gaps.
struct Layout {
  std::int64_t m, n, k;
  Shape batch, y;                        // y: as the caller sees it
  std::vector<std::int64_t> a_at, b_at;  // of each matrix of the batch
  std::int64_t a_size = 1, b_size = 1, size = 1;

  Layout(Shape a, Shape b) {
    const bool row = a.rank() == 1, column = b.rank() == 1;
    if (row) a = {1, a[0]};
    if (column) b = {b[0], 1};
    m = a[a.rank() - 2], k = a.back(), n = b.back();
    const Shape a_batch(a.begin(), a.end() - 2), b_batch(b.begin(), b.end() - 2);
    batch = *broadcast_shapes(a_batch, b_batch);
    y = batch;
    if (!row) y.push_back(m);
    if (!column) y.push_back(n);
    a_size = *element_count(a), b_size = *element_count(b), size = *element_count(y);
    const std::int64_t count = *element_count(batch);
    const auto start = [&](const Shape& own, std::int64_t i, std::int64_t matrix) {
      std::int64_t at = 0, step = matrix;
      for (std::int64_t axis = batch.rank() - 1; axis >= 0; --axis) {
        const std::int64_t index = i % batch[axis], mine = axis - (batch.rank() - own.rank());
        i /= batch[axis];
        if (mine < 0) continue;
        at += own[mine] == 1 ? 0 : index * step;
        step *= own[mine];
      }
      return at;
    };
    for (std::int64_t i = 0; i < count; ++i) {
      a_at.push_back(start(a_batch, i, m * k));
      b_at.push_back(start(b_batch, i, k * n));
    }
  }

  // fn(index in a, in b, in y, in bias) for every product of two numbers.
  template <class Fn>
  void for_terms(const Fn& fn) const {
    for (std::size_t i = 0; i < a_at.size(); ++i) {
      for (std::int64_t r = 0; r < m; ++r) {
        for (std::int64_t t = 0; t < k; ++t) {
          for (std::int64_t c = 0; c < n; ++c) {
            fn(static_cast<std::size_t>(a_at[i] + r * k + t),
               static_cast<std::size_t>(b_at[i] + t * n + c),
               (i * static_cast<std::size_t>(m) + static_cast<std::size_t>(r)) *
                       static_cast<std::size_t>(n) +
                   static_cast<std::size_t>(c));
          }
        }
      }
    }
  }
};

using Values = std::vector<double>;

// z, with the sizes of its terms.
Refs oracle_z(const Layout& at, const Values& a, const Values& b, const Values& bias) {
  Refs z(static_cast<std::size_t>(at.size));
  at.for_terms([&](std::size_t i, std::size_t j, std::size_t y) {
    z[y].value += a[i] * b[j];
    z[y].scale += std::abs(a[i] * b[j]);
  });
  for (std::size_t i = 0; !bias.empty() && i < z.size(); ++i) {
    const double v = bias[i % static_cast<std::size_t>(at.n)];
    z[i] = {z[i].value + v, z[i].scale + std::abs(v)};
  }
  return z;
}

// What an activation and its slope may be off, beside that of their argument: a few ulp of f32 of z and of
// 1, however little is left of them.
double slack(DType dtype) { return dtype == DType::kF32 ? 0.3 : 0.01; }

// y from z, which is rounded before an activation. dtype: of y.
Refs oracle_y(const Refs& z, Activation activation, const Values& residual, DType dtype) {
  Refs y = z;
  for (std::size_t i = 0; i < y.size(); ++i) {
    const double more = residual.empty() ? 0 : residual[i];
    const double value = act(activation, z[i].value);
    double size = z[i].scale;
    if (activation != Activation::kNone) {
      size = size * (std::abs(slope(activation, z[i].value)) + slack(dtype)) + std::abs(value);
    }
    y[i] = {value + more, size + std::abs(more)};
  }
  return y;
}

struct Gradients {
  Refs da, db, dbias;
};
// z: as stored. rounded: dz is rounded on its way into the sums. dtype: of the gradients.
Gradients oracle_gradients(const Layout& at, const Values& a, const Values& b, const Values& z,
                           const Values& dy, Activation activation, bool rounded, DType dtype) {
  Gradients g{Refs(static_cast<std::size_t>(at.a_size)), Refs(static_cast<std::size_t>(at.b_size)),
              Refs(static_cast<std::size_t>(at.n))};
  Values dz = dy, size(dy.size());
  for (std::size_t i = 0; i < dz.size(); ++i) {
    const bool active = activation != Activation::kNone;
    const double rate = active ? slope(activation, z[i]) : 1;
    size[i] = std::abs(dy[i]) * (std::abs(rate) * (rounded ? 2 : 1) + (active ? slack(dtype) : 0));
    dz[i] *= rate;
    Ref& bias = g.dbias[i % static_cast<std::size_t>(at.n)];
    bias = {bias.value + dz[i], bias.scale + size[i]};
  }
  at.for_terms([&](std::size_t i, std::size_t j, std::size_t y) {
    g.da[i].value += dz[y] * b[j];
    g.da[i].scale += size[y] * std::abs(b[j]);
    g.db[j].value += dz[y] * a[i];
    g.db[j].scale += size[y] * std::abs(a[i]);
  });
  return g;
}

Values values(const Refs& refs) {
  Values v;
  for (const Ref& r : refs) v.push_back(r.value);
  return v;
}

TEST(MatmulOracle, GradientsMatchCentralDifference) {
  for (const Activation activation : kActivations) {
    for (const auto& [a_shape, b_shape] : std::vector<std::pair<Shape, Shape>>{
             {{3, 4}, {4, 5}}, {{2, 1, 3, 4}, {3, 4, 2}}, {{4}, {2, 4, 3}}, {{2, 3, 4}, {4}}}) {
      const Layout at(a_shape, b_shape);
      Noise noise(3);
      const auto random = [&](std::int64_t n) {
        return random_values(noise, n, DType::kF64);
      };
      const Arrays in = {random(at.a_size), random(at.b_size), random(at.n), random(at.size)};
      const Values dy = random(at.size);
      const auto loss = [&](const Arrays& x) {
        const Values y =
            values(oracle_y(oracle_z(at, x[0], x[1], x[2]), activation, x[3], DType::kF64));
        return std::inner_product(y.begin(), y.end(), dy.begin(), 0.0);
      };
      const Values z = values(oracle_z(at, in[0], in[1], in[2]));
      const Gradients g = oracle_gradients(at, in[0], in[1], z, dy, activation, false, DType::kF64);
      expect_gradient(loss, in, {values(g.da), values(g.db), values(g.dbias), dy});
    }
  }
}

TEST(MatmulCheck, SaysWhatIsWrong) {
  const auto meta = [](Shape shape, DType dtype = DType::kF32, Backend where = Backend::kCpu) {
    return Tensor::meta(shape, dtype, where);
  };
  const Tensor a = meta({4, 3}), b = meta({3, 2});
  const auto with = [&](const MatmulOptions& options) {
    return ops::matmul_check(a, b, options);
  };
  const auto bias = [&](const Tensor& t) {
    return with({.bias = t});
  };
  const auto residual = [&](const Tensor& t) {
    return with({.residual = t});
  };
  const auto into = [&](const Tensor& t) {
    return ops::matmul_into_check(a, b, t);
  };
  const auto back = [&](const Tensor& z, const Tensor& dy, Activation activation) {
    return ops::matmul_backward_check(a, b, z, dy, activation);
  };
  const auto b16 = DType::kBF16;
  const Tensor y = meta({4, 2}), elsewhere = meta({4, 2}, DType::kF32, Backend::kMetal);
  const auto none = Activation::kNone, silu = Activation::kSilu;
  expect_refused({
      {"a number", ops::matmul_check(meta({}), b), Errc::kShape, "got [] and [3, 2]"},
      {"a number on the right", ops::matmul_check(a, meta({})), Errc::kShape, "got [4, 3] and []"},
      {"inner sizes", ops::matmul_check(a, meta({4, 2})), Errc::kShape, "[4, 3] and [4, 2]"},
      {"inner sizes of vectors", ops::matmul_check(meta({3}), meta({4})), Errc::kShape, "[3]"},
      {"batches", ops::matmul_check(meta({2, 4, 3}), meta({3, 3, 2})), Errc::kShape, "broadcast"},
      {"integers", ops::matmul_check(meta({4, 3}, DType::kI32), meta({3, 2}, DType::kI32)),
       Errc::kDType, "got i32"},
      {"double", ops::matmul_check(meta({4, 3}, DType::kF64), b), Errc::kDType, "got f64"},
      {"two types", ops::matmul_check(a, meta({3, 2}, b16)), Errc::kDType,
       "cast one of them, got f32 and bf16"},
      {"two devices", ops::matmul_check(a, meta({3, 2}, DType::kF32, Backend::kMetal)),
       Errc::kDevice, "b must be where a is (cpu), got metal"},
      {"a narrower result", with({.out_dtype = b16}), Errc::kDType, "got bf16"},
      {"bias of another length", bias(meta({3})), Errc::kShape, "[N] = [2], got [3]"},
      {"bias of two axes", bias(meta({1, 2})), Errc::kShape, "got [1, 2]"},
      {"bias of another type", bias(meta({2}, b16)), Errc::kDType, "bias must have the type of a"},
      {"bias elsewhere", bias(meta({2}, DType::kF32, Backend::kMetal)), Errc::kDevice, "bias must"},
      {"residual that would stretch", residual(meta({1, 2})), Errc::kShape, "[4, 2], got [1, 2]"},
      {"residual of another type", residual(meta({4, 2}, b16)), Errc::kDType, "residual must"},
      {"residual elsewhere", residual(elsewhere), Errc::kDevice, "residual must"},
      {"into: operands", ops::matmul_into_check(meta({}), b, y), Errc::kShape, "one axis"},
      {"into: another shape", into(meta({2, 4})), Errc::kShape, "[4, 2], got [2, 4]"},
      {"into: another type", into(meta({4, 2}, b16)), Errc::kDType, "out must have"},
      {"into: strided", into(meta({2, 4}).transpose({1, 0})), Errc::kShape, "contiguous"},
      {"into: elsewhere", into(elsewhere), Errc::kDevice, "out must"},
      {"backward: operands", ops::matmul_backward_check(meta({}), b, y, y, none), Errc::kShape,
       "one axis"},
      {"backward: another shape", back(y, meta({2, 4}), none), Errc::kShape, "dy must"},
      {"backward: another type", back(y, meta({4, 2}, b16), none), Errc::kDType, "dy must"},
      {"backward: elsewhere", back(y, elsewhere, none), Errc::kDevice, "dy must"},
      {"backward: no z", back(Tensor(), y, silu), Errc::kArgument, "needs z"},
      {"backward: z of another shape", back(meta({8}), y, silu), Errc::kShape, "z must"},
      {"backward: z of another type", back(meta({4, 2}, b16), y, silu), Errc::kDType, "z must"},
      {"backward: z elsewhere", back(elsewhere, y, silu), Errc::kDevice, "z must"},
  });
  EXPECT_FALSE(ops::matmul_check(meta({3}), meta({3})));
  EXPECT_FALSE(ops::matmul_check(meta({0, 5, 0}, b16), meta({0, 7}, b16)));
  EXPECT_FALSE(ops::matmul_check(meta({4, 3}, b16), meta({3, 2}, b16), {.out_dtype = DType::kF32}));
}

// How an operand lies in memory.
enum class Lie { kPlain, kTurned, kPitched, kTurnedPitched, kOffset, kCut, kStrided };
constexpr Lie kLies[] = {Lie::kPlain,  Lie::kTurned, Lie::kPitched, Lie::kTurnedPitched,
                         Lie::kOffset, Lie::kCut,    Lie::kStrided};

Tensor turned(const Tensor& t) {
  Shape shape = t.shape();
  Strides strides = t.strides();
  std::swap(shape[t.rank() - 2], shape[t.rank() - 1]);
  std::swap(strides[t.rank() - 2], strides[t.rank() - 1]);
  return {t.buffer(), t.dtype(), shape, strides, t.offset()};
}

class Matmul : public OnDevice {
 protected:
  struct Form {
    Activation activation = Activation::kNone;
    bool bias = false, residual = false, wide = false;
    Lie a = Lie::kPlain, b = Lie::kPlain;
    bool backward = true;
  };

  // Numbers whose sign and size are their row's or their column's, so that no sum cancels, every bound is
  // tight, and no two sums are alike.
  static Values signed_values(Noise& noise, std::int64_t n, std::int64_t cols, DType dtype,
                              bool by_row, bool by_col) {
    Values v = random_values(noise, n, dtype);
    for (std::size_t i = 0; i < v.size(); ++i) {
      const auto row = static_cast<std::int64_t>(i) / std::max<std::int64_t>(cols, 1);
      const auto col = static_cast<std::int64_t>(i) % std::max<std::int64_t>(cols, 1);
      const bool negative = (by_row && row % 7 == 3) != (by_col && col % 5 == 2);
      const auto size = static_cast<double>(1 + (by_row ? row % 4 : 0) + (by_col ? col % 4 : 0));
      v[i] = round_to(dtype, (negative ? -1 : 1) * (1 + std::abs(v[i])) * size / 8);
    }
    return v;
  }

  Tensor put(const Values& v, const Shape& shape, DType dtype, Lie lie) {
    if (shape.rank() == kMaxRank && lie == Lie::kStrided) lie = Lie::kTurned;
    if (shape.rank() < 2 && lie != Lie::kStrided) lie = lie == Lie::kOffset ? lie : Lie::kPlain;
    const std::int64_t cols = shape.back();
    const auto pitched = [&](const Values& x, Shape of) {
      const auto width = static_cast<std::size_t>(of.back());
      of[of.rank() - 1] += 3;
      Values wide(static_cast<std::size_t>(*element_count(of)), std::nan(""));
      for (std::size_t i = 0; i < x.size(); ++i) wide[i / width * (width + 3) + i % width] = x[i];
      return upload(wide, of, dtype).slice(-1, 0, of.back() - 3);
    };
    const auto turn = [&](Shape& of) {
      const std::int64_t rows = shape[shape.rank() - 2];
      std::swap(of[of.rank() - 2], of[of.rank() - 1]);
      Values x(v.size());
      for (std::int64_t i = 0; i < static_cast<std::int64_t>(v.size()); ++i) {
        const std::int64_t matrix = i / (rows * cols), r = i / cols % rows, c = i % cols;
        x[static_cast<std::size_t>((matrix * cols + c) * rows + r)] =
            v[static_cast<std::size_t>(i)];
      }
      return x;
    };
    Shape other = shape;
    switch (lie) {
      case Lie::kTurned: {
        const Values x = turn(other);
        return turned(upload(x, other, dtype));
      }
      case Lie::kTurnedPitched: {
        const Values x = turn(other);
        return turned(pitched(x, other));
      }
      case Lie::kPitched: return pitched(v, shape);
      case Lie::kCut: {  // matrices with rows between them
        const std::int64_t rows = shape[shape.rank() - 2];
        other[other.rank() - 2] += 2;
        Values x(static_cast<std::size_t>(*element_count(other)), std::nan(""));
        for (std::int64_t i = 0; i < static_cast<std::int64_t>(v.size()); ++i) {
          const std::int64_t row = i / cols;
          const std::int64_t to = (row + row / rows * 2) * cols + i % cols;
          x[static_cast<std::size_t>(to)] = v[static_cast<std::size_t>(i)];
        }
        return upload(x, other, dtype).slice(-2, 0, rows);
      }
      case Lie::kOffset: return upload(v, shape, dtype, 3);
      case Lie::kStrided: return upload_strided(v, shape, dtype);
      default: return upload(v, shape, dtype);
    }
  }

  // Of many cases an emulated device has one in so many.
  bool skips(std::size_t i, std::size_t every) const { return scaled(16) == 1 && i % every != 0; }

  void check(const Shape& a_shape, const Shape& b_shape, DType dtype, const Form& form) {
    const Layout at(a_shape, b_shape);
    Noise noise(static_cast<std::uint64_t>(at.m + 31 * at.n + 97 * at.k));
    const DType out = form.wide ? DType::kF32 : dtype;
    const Values a = signed_values(noise, at.a_size, at.k, dtype, true, false);
    const Values b = signed_values(noise, at.b_size, at.n, dtype, false, true);
    const Values bias = form.bias ? signed_values(noise, at.n, at.n, dtype, false, true) : Values();
    const Values residual = form.residual ? random_values(noise, at.size, out) : Values();
    const Values dy = signed_values(noise, at.size, at.n, out, true, true);
    const Tensor ta = put(a, a_shape, dtype, form.a), tb = put(b, b_shape, dtype, form.b);
    MatmulOptions options;
    options.activation = form.activation;
    if (form.bias) options.bias = upload(bias, {at.n}, dtype);
    if (form.residual) options.residual = upload(residual, at.y, out);
    if (form.wide) options.out_dtype = DType::kF32;

    const std::string name = to_string(a_shape) + " x " + to_string(b_shape) + " " +
                             name_of(dtype) + (form.wide ? " wide" : "") + " lies " +
                             std::to_string(static_cast<int>(form.a)) +
                             std::to_string(static_cast<int>(form.b)) + " act " +
                             std::to_string(static_cast<int>(form.activation));
    const Refs z = oracle_z(at, a, b, bias);
    const Refs want = oracle_y(z, form.activation, residual, out);
    const ops::MatmulWithZ got = ops::matmul_with_z(encoder(), ta, tb, options);
    ASSERT_TRUE(got.y.shape() == at.y) << name << " gave " << to_string(got.y.shape());
    ASSERT_EQ(got.y.dtype(), out) << name;
    expect_close("y " + name, download(got.y), want, out, at.k);
    const bool active = form.activation != Activation::kNone;
    ASSERT_EQ(got.z.defined(), active);
    if (active) {
      expect_close("z " + name, download(got.z), z, out, at.k);
      expect_close("y alone " + name, download(ops::matmul(encoder(), ta, tb, options)), want, out,
                   at.k);
    }
    if (!form.backward) return;
    const Values stored = active ? download(got.z) : Values();
    const bool rounded = active || form.wide;
    const Gradients g = oracle_gradients(at, a, b, stored, dy, form.activation, rounded, dtype);
    const ops::MatmulGrads grads = ops::matmul_backward(
        encoder(), ta, tb, got.z, upload(dy, at.y, out), form.activation, {true, true, form.bias});
    const auto count = static_cast<std::int64_t>(at.a_at.size());
    ASSERT_TRUE(grads.da.shape() == a_shape && grads.db.shape() == b_shape) << name;
    expect_close("da " + name, download(grads.da), g.da, dtype, at.n * count);
    expect_close("db " + name, download(grads.db), g.db, dtype, at.m * count);
    if (form.bias)
      expect_close("dbias " + name, download(grads.dbias), g.dbias, dtype, at.m * count);
  }
};

TEST_P(Matmul, MatchesOracleAroundTiles) {
  const std::int64_t sizes[] = {1,  2,  5,  6,  7,  8,  13, 14, 15, 16,  17,
                                28, 31, 32, 33, 47, 63, 64, 65, 97, 127, 131};
  std::size_t i = 0;
  for (const std::int64_t m : sizes) {
    for (const std::int64_t n : sizes) {
      const std::int64_t k = sizes[i * 7 % std::size(sizes)];
      if (skips(i, 3)) {
        ++i;
        continue;
      }
      Form form;
      form.a = kLies[i % 5];
      form.b = kLies[i / 5 % 5];
      form.backward = i % 3 == 0;
      check({m, k}, {k, n}, kTypes[i % 3], form);
      ++i;
    }
  }
}

TEST_P(Matmul, MatchesOracleForEveryLie) {
  std::size_t i = 0;
  for (const DType dtype : kTypes) {
    for (const Lie a : kLies) {
      for (const Lie b : kLies) {
        if (skips(i++, 5)) continue;
        check({33, 40}, {40, 37}, dtype, {.a = a, .b = b});
        check({2, 3, 19}, {19, 50}, dtype, {.a = a, .b = b});
        check({3, 70}, {70, 90}, dtype, {.a = a, .b = b});  // few rows
        check({90, 70}, {70, 3}, dtype, {.a = a, .b = b});  // few columns
      }
    }
  }
}

TEST_P(Matmul, MatchesOracleForLongSums) {
  std::size_t i = 0;
  for (const std::int64_t k : {255, 256, 257, 511, 513, 1031}) {
    for (const DType dtype : kTypes) {
      if (skips(i++, 5)) continue;
      check({30, k}, {k, 70}, dtype, {.b = k % 2 == 0 ? Lie::kPlain : Lie::kTurned});
      check({5, k}, {k, 70}, dtype, {.a = Lie::kTurned, .b = Lie::kTurned, .backward = false});
      check({5, k}, {k, 300}, dtype, {.backward = false});
    }
  }
  // Few tiles and much to add up: k is cut as well.
  for (const DType dtype : kTypes) {
    const std::int64_t k = 1007 + scaled(9000), more = 1000 + scaled(8001);
    check({17, k}, {k, 33}, dtype, {.bias = true, .backward = false});
    check({3, k}, {k, 40}, dtype, {.residual = true, .b = Lie::kTurned, .backward = false});
    check({40, more}, {more, 1}, dtype, {.backward = false});
    check({2, k}, {k, 2}, dtype, {.activation = Activation::kSilu, .backward = false});
    check({more, 2}, {2, 3}, dtype, {.bias = true});
  }
}

TEST_P(Matmul, MatchesOracleForManyTiles) {
  const std::int64_t m = 33 + scaled(500), n = 45 + scaled(500), many = 71 + scaled(1040);
  check({m, 300}, {300, n}, DType::kF32, {.bias = true, .backward = false});
  check({m, 40}, {40, n}, DType::kBF16, {.a = Lie::kTurned, .b = Lie::kTurned});
  check({40 + scaled(560), 257}, {257, 65}, DType::kF16, {.residual = true, .backward = false});
  check({1, 20}, {20, 1 + scaled(9000)}, DType::kF32, {});
  check({16, 50}, {50, many}, DType::kBF16, {.bias = true});
  check({many, 50}, {50, 12}, DType::kF16, {.bias = true});
  // Tiles of a batch, each with parts of tiles beside it.
  check({8, 65, 20}, {8, 20, 66}, DType::kF32, {.bias = true});
  check({8, 65, 20}, {8, 20, 66}, DType::kBF16, {.a = Lie::kTurned, .b = Lie::kTurned});
  check({8, 66, 24}, {8, 24, 72}, DType::kF16, {.residual = true});
}

TEST_P(Matmul, MatchesOracleForBatches) {
  const std::pair<Shape, Shape> shapes[] = {
      {{7}, {7}},
      {{7}, {7, 5}},
      {{5, 7}, {7}},
      {{7}, {3, 7, 5}},
      {{3, 5, 7}, {7}},
      {{3, 5, 7}, {7, 4}},
      {{3, 5, 7}, {3, 7, 4}},
      {{5, 7}, {3, 7, 4}},
      {{1, 5, 7}, {3, 7, 4}},
      {{3, 5, 7}, {1, 7, 4}},
      {{2, 3, 5, 7}, {7, 4}},
      {{2, 3, 5, 7}, {3, 7, 4}},
      {{2, 1, 5, 7}, {3, 7, 4}},
      {{2, 1, 5, 7}, {1, 3, 7, 4}},
      {{3, 5, 7}, {2, 1, 7, 4}},
      {{2, 3, 2, 5, 7}, {2, 1, 2, 7, 4}},
      {{2, 3, 2, 5, 7}, {1, 3, 1, 7, 4}},
      {{2, 1, 2, 1, 2, 1, 3, 4}, {1, 2, 1, 2, 1, 2, 4, 3}},
      {{6, 1, 30}, {30, 20}},
      {{40, 4, 4}, {40, 4, 4}},
      {{3, 20, 33}, {3, 33, 40}},
      {{6, 30, 20}, {1, 20, 30}},
  };
  std::size_t i = 0;
  for (const auto& [a, b] : shapes) {
    for (const DType dtype : kTypes) {
      if (skips(i++, 2)) continue;
      check(a, b, dtype, {.bias = true});
      check(a, b, dtype, {.a = Lie::kTurned, .b = Lie::kPitched});
      check(a, b, dtype, {.a = Lie::kStrided, .b = Lie::kTurned});
    }
  }
}

TEST_P(Matmul, MatchesOracleWithEveryFinish) {
  std::size_t turn = 0;
  for (const DType dtype : kTypes) {
    for (const Activation activation : kActivations) {
      for (int i = 0; i < 8; ++i) {
        if (skips(turn++, 3)) continue;
        const Form form{.activation = activation,
                        .bias = i % 2 == 1,
                        .residual = i / 2 % 2 == 1,
                        .wide = i / 4 == 1 && dtype != DType::kF32};
        check({37, 41}, {41, 45}, dtype, form);
        check({2, 19, 3}, {3, 32}, dtype, form);
        if (i % 3 == 0) check({4, 41}, {41, 45}, dtype, form);
        if (i % 3 == 1) check({45, 41}, {41, 4}, dtype, form);
        if (i % 3 == 2) check({30, 300}, {300, 40}, dtype, form);
      }
    }
  }
}

TEST_P(Matmul, ActivationsOfFarNumbers) {
  // One term each, so that z is exact: the activation alone is seen.
  Values z;
  for (double v = 0x1p-20; v < 200; v *= 1.09) z.push_back(round_to(DType::kF32, v));
  for (double v = 0x1p-20; v < 200; v *= 1.09) z.push_back(round_to(DType::kF32, -v));
  const auto n = static_cast<std::int64_t>(z.size());
  for (const Activation activation : kActivations) {
    const ops::MatmulWithZ got =
        ops::matmul_with_z(encoder(), upload({1}, {1, 1}, DType::kF32),
                           upload(z, {1, n}, DType::kF32), {.activation = activation});
    Refs y, dz;
    for (const double v : z) {
      y.push_back({act(activation, v), std::abs(v)});
      dz.push_back({slope(activation, v), 1.2});
    }
    expect_close("y", download(got.y), y, DType::kF32, 1);
    if (activation == Activation::kNone) continue;
    const Values ones(z.size(), 1);
    const ops::MatmulGrads grads = ops::matmul_backward(
        encoder(), upload({1}, {1, 1}, DType::kF32), upload(z, {1, n}, DType::kF32), got.z,
        upload(ones, {1, n}, DType::kF32), activation, {false, true, false});
    expect_close("dz", download(grads.db), dz, DType::kF32, 1);
  }
}

TEST_P(Matmul, EmptyTensors) {
  for (const DType dtype : kTypes) {
    const auto empty = [&](const Shape& shape) {
      return encoder().empty(shape, dtype);
    };
    EXPECT_TRUE(ops::matmul(encoder(), empty({0, 3}), empty({3, 5})).shape() == (Shape{0, 5}));
    EXPECT_TRUE(ops::matmul(encoder(), empty({0, 4, 3}), empty({3, 5})).shape() ==
                (Shape{0, 4, 5}));
    const Values bias = {1, -2, 0.5};
    for (const std::int64_t m : {2, 20, 40}) {
      const auto y = ops::matmul(encoder(), empty({m, 0}), empty({0, 3}));
      EXPECT_EQ(download(y), Values(static_cast<std::size_t>(3 * m), 0));
      const auto z =
          ops::matmul(encoder(), empty({m, 0}), empty({0, 3}), {.bias = upload(bias, {3}, dtype)});
      Values want;
      for (std::int64_t i = 0; i < m; ++i) want.insert(want.end(), bias.begin(), bias.end());
      EXPECT_EQ(download(z), want);
      const auto wide = ops::matmul(encoder(), empty({m, 0}), empty({0, 40}));
      EXPECT_EQ(download(wide), Values(static_cast<std::size_t>(40 * m), 0));
      // Nothing reaches y, so nothing comes back.
      const auto grads = ops::matmul_backward(encoder(), empty({m, 3}), empty({3, 0}), Tensor(),
                                              empty({m, 0}), Activation::kNone, {true, true, true});
      EXPECT_EQ(download(grads.da), Values(static_cast<std::size_t>(3 * m), 0));
      EXPECT_EQ(grads.db.size() + grads.dbias.size(), 0);
    }
    const auto grads = ops::matmul_backward(encoder(), empty({0, 3}), empty({3, 2}), Tensor(),
                                            empty({0, 2}), Activation::kNone, {true, true, true});
    EXPECT_EQ(download(grads.db), Values(6, 0));
    EXPECT_EQ(download(grads.dbias), Values(2, 0));
  }
}

TEST_P(Matmul, GoesIntoWhatIsThere) {
  Noise noise(8);
  std::size_t i = 0;
  for (const DType dtype : kTypes) {
    for (const DType out : {dtype, DType::kF32}) {
      for (const Shape& s :
           {Shape{37, 300, 40}, Shape{64, 20, 64}, Shape{3, 20, 50}, Shape{50, 20, 3},
            Shape{20, 1000 + scaled(8000), 20}, Shape{5, 0, 40}}) {
        for (const float beta : {0.0F, 1.0F, 0.5F}) {
          if (skips(i++, 5)) continue;
          const Layout at({s[0], s[1]}, {s[1], s[2]});
          const Values a = signed_values(noise, at.a_size, at.k, dtype, true, false);
          const Values b = signed_values(noise, at.b_size, at.n, dtype, false, true);
          Values before = random_values(noise, at.size, out);
          if (beta == 0) before.assign(before.size(), std::nan(""));
          const Tensor y = upload(before, at.y, out);
          ops::matmul_into(encoder(), upload(a, {s[0], s[1]}, dtype),
                           upload(b, {s[1], s[2]}, dtype), y, beta);
          Refs want = oracle_z(at, a, b, {});
          for (std::size_t i = 0; beta != 0 && i < want.size(); ++i) {
            const double more = beta * before[i];
            want[i] = {want[i].value + more, want[i].scale + std::abs(more)};
          }
          expect_close("into " + to_string(s) + name_of(dtype) + name_of(out), download(y), want,
                       out, at.k + 1);
        }
      }
    }
  }
}

// As adapters of low rank are: a perhaps some columns of a wider matrix, b perhaps turned.
TEST_P(Matmul, AShortInnerAxisIsAdded) {
  Noise noise(9);
  for (const DType dtype : kTypes) {
    for (const auto& [m, n] :
         std::vector<std::pair<std::int64_t, std::int64_t>>{{301, 264}, {70, 1040}}) {
      for (const std::int64_t k : {8, 16}) {
        for (const bool turned : {false, true}) {
          const Layout at({m, k}, {k, n});
          const Values a = signed_values(noise, at.a_size, at.k, dtype, true, false);
          const Values b = signed_values(noise, at.b_size, at.n, dtype, false, true);
          const Values before = random_values(noise, at.size, dtype);
          const Tensor wide = encoder().zeros({m, 48}, dtype), some = wide.slice(1, 8, 8 + k);
          encoder().copy(upload(a, {m, k}, dtype), some);
          Tensor right = upload(b, {k, n}, dtype);
          if (turned) right = encoder().contiguous(right.transpose({1, 0})).transpose({1, 0});
          const Tensor y = upload(before, at.y, dtype);
          const Tensor sum =
              ops::matmul(encoder(), upload(a, {m, k}, dtype), right, {.residual = y});
          ops::matmul_into(encoder(), some, right, y);
          Refs want = oracle_z(at, a, b, {});
          for (std::size_t i = 0; i < want.size(); ++i) {
            want[i] = {want[i].value + before[i], want[i].scale + std::abs(before[i])};
          }
          const std::string what = std::to_string(m) + "x" + std::to_string(n) + "x" +
                                   std::to_string(k) + " " + name_of(dtype) +
                                   (turned ? " turned" : "");
          expect_close("into " + what, download(y), want, dtype, k + 1);
          expect_close("residual " + what, download(sum), want, dtype, k + 1);
        }
      }
    }
  }
}

TEST_P(Matmul, GradientsThroughATape) {
  for (const DType dtype : kTypes) {
    for (const Activation activation : kActivations) {
      const Layout at({2, 5, 7}, {7, 40});
      Noise noise(9);
      const Values a = signed_values(noise, at.a_size, at.k, dtype, true, false);
      const Values b = signed_values(noise, at.b_size, at.n, dtype, false, true);
      const Values bias = random_values(noise, at.n, dtype);
      const Values dy = signed_values(noise, at.size, at.n, dtype, true, true);
      Tape tape(encoder());
      const Tensor ta = tape.watch(upload(a, {2, 5, 7}, dtype));
      const Tensor tb = tape.watch(upload(b, {7, 40}, dtype));
      const Tensor tbias = tape.watch(upload(bias, {40}, dtype));
      const Tensor other = upload(bias, {40}, dtype);
      const Tensor residual = tape.watch(upload(dy, at.y, dtype));
      const Tensor y = ops::matmul(tape, ta, tb,
                                   {.bias = tbias, .activation = activation, .residual = residual});
      tape.backward(y, upload(dy, at.y, dtype));
      const bool active = activation != Activation::kNone;
      Values z = values(oracle_z(at, a, b, bias));
      for (double& v : z) v = round_to(dtype, v);
      const Gradients g = oracle_gradients(at, a, b, z, dy, activation, active, dtype);
      const auto close = [&](const char* name, const Tensor& t, Refs want, std::int64_t n) {
        // z may be stored as either neighbour: dz then differs by less than its own rounding.
        for (Ref& r : want) r.scale *= active ? 1.5 : 1;
        expect_close(std::string(name) + name_of(dtype), download(tape.grad(t)), want, dtype, n);
      };
      close("da", ta, g.da, at.n);
      close("db", tb, g.db, 2 * at.m);
      close("dbias", tbias, g.dbias, 2 * at.m);
      EXPECT_EQ(download(tape.grad(residual)), dy);

      // What nobody watches is not asked for.
      Tape half(encoder());
      const Tensor hb = half.watch(upload(b, {7, 40}, dtype));
      const Tensor part = ops::matmul(half, ta.detach(), hb, {.bias = other});
      half.backward(part, upload(dy, at.y, dtype));
      const Gradients plain = oracle_gradients(at, a, b, {}, dy, Activation::kNone, false, dtype);
      expect_close("db alone", download(half.grad(hb)), plain.db, dtype, 2 * at.m);
    }
  }
}

// a @ b, mx.arange(12).reshape(2, 1, 2, 3) − 5 and mx.arange(18).reshape(3, 3, 2) − 7; mx.grad of
// ((a @ b)·c).sum().
TEST_P(Matmul, AsMlx) {
  const auto from = [](double first, int n) {
    Values v(static_cast<std::size_t>(n));
    std::iota(v.begin(), v.end(), first);
    return v;
  };
  Tape tape(encoder());
  const Tensor a = tape.watch(upload(from(-5, 12), {2, 1, 2, 3}, DType::kF32));
  const Tensor b = tape.watch(upload(from(-7, 18), {3, 3, 2}, DType::kF32));
  const Tensor y = ops::matmul(tape, a, b);
  EXPECT_EQ(y.shape(), (Shape{2, 3, 2, 2}));
  EXPECT_EQ(download(y), (Values{64,  52,  19,  16,  -8, -20, 1,  -2, -80, -92, -17, -20,
                                 -26, -20, -71, -56, 10, 16,  19, 34, 46,  52,  109, 124}));
  Values c = from(0, 24);
  for (double& v : c) v = std::fmod(v, 5) - 2;
  tape.backward(y, upload(c, y.shape(), DType::kF32));
  EXPECT_EQ(download(tape.grad(a)), (Values{35, 35, 35, -21, -27, -33, -21, -27, -33, 3, 11, 19}));
  EXPECT_EQ(download(tape.grad(b)),
            (Values{18, -4, 18, -5, 18, -6, -5, 18, -4, 18, -3, 18, -3, -5, -6, -4, -9, -3}));
  const Tensor row = upload({1, 2, 3}, {3}, DType::kF32);
  const Tensor col = upload({1, -1, 2}, {3}, DType::kF32);
  EXPECT_EQ(download(ops::matmul(encoder(), row, b)), (Values{-26, -20, 10, 16, 46, 52}));
  EXPECT_EQ(download(ops::matmul(encoder(), a, col)), (Values{-7, -1, 5, 11}));
  EXPECT_EQ(ops::matmul(encoder(), a, col).shape(), (Shape{2, 1, 2}));
  EXPECT_EQ(download(ops::matmul(encoder(), row, col)), (Values{5}));
}

TEST_P(Matmul, SameBitsOnEveryRun) {
  Noise noise(5);
  const std::int64_t side = 40 + scaled(260), k = 1000 + scaled(8000), n = 20 + scaled(680);
  for (const auto& [a, b] :
       std::vector<std::pair<Shape, Shape>>{{{side, side}, {side, 20 + scaled(180)}},
                                            {{20, k}, {k, 40}},
                                            {{4, k}, {k, n}},
                                            {{scaled(8), 60, 70}, {scaled(8), 70, 50}}}) {
    for (const DType dtype : kTypes) {
      const Tensor x = upload(random_values(noise, *element_count(a), dtype), a, dtype);
      const Tensor w = upload(random_values(noise, *element_count(b), dtype), b, dtype);
      expect_repeatable(encoder(), [&] {
        const auto [y, z] = ops::matmul_with_z(encoder(), x, w, {.activation = Activation::kSilu});
        const auto g =
            ops::matmul_backward(encoder(), x, w, z, y, Activation::kSilu, {true, true, true});
        return std::vector<Tensor>{y, z, g.da, g.db, g.dbias};
      });
    }
  }
}

TEST_P(Matmul, RandomShapes) {
  EXPECT_TRUE(rc::check("matmul matches its oracle", [this] {
    const auto size = [] {
      return std::int64_t{*rc::gen::inRange(1, 40)};
    };
    Shape a, b;
    for (int i = *rc::gen::inRange(0, 3); i > 0; --i) {
      const std::int64_t n = *rc::gen::inRange(1, 4);
      const int stretched = *rc::gen::inRange(0, 4);
      a.push_back(stretched == 1 ? 1 : n);
      if (stretched != 3 || b.rank() > 0) b.push_back(stretched == 2 ? 1 : n);
    }
    const std::int64_t k = size();
    a.push_back(size()), a.push_back(k);
    b.push_back(k), b.push_back(size());
    const auto any = [](const auto& list) {
      return list[*rc::gen::inRange<std::size_t>(0, std::size(list))];
    };
    check(a, b, any(kTypes),
          {any(kActivations), *rc::gen::arbitrary<bool>(), *rc::gen::arbitrary<bool>(),
           *rc::gen::arbitrary<bool>(), any(kLies), any(kLies)});
    RC_ASSERT(!HasFailure());
  }));
}

MT_ON_EVERY_BACKEND(Matmul);

}  // namespace
}  // namespace mlxtape::test
