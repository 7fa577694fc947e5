#include "mlxtape/ops/rms_norm.h"

#include <rapidcheck.h>

#include <bit>
#include <cmath>
#include <numeric>

#include "support/op_test.h"

namespace mlxtape::test {
namespace {

constexpr DType kTypes[] = {DType::kF32, DType::kF16, DType::kBF16};

enum class Form { kPlain, kResidual, kGated };
enum class Weight { kNone, kLikeX, kF32 };
constexpr Form kForms[] = {Form::kPlain, Form::kResidual, Form::kGated};
constexpr Weight kWeights[] = {Weight::kNone, Weight::kLikeX, Weight::kF32};

// What goes in. x is h in the residual form; an empty w is ones, an empty g no gate, an empty add
// no gradient from elsewhere.
struct Given {
  std::int64_t rows, cols;
  double eps;
  std::vector<double> x, w, g, dy, add;
  double divisor = static_cast<double>(cols);  // 1 for l2_norm
};

struct Expected {
  Refs y, r, dx, dw, dg;
};

// The formula block of rms_norm.h, in double. The gradients are made from the r given, which is
// what the device stored, or from the exact one.
Expected oracle(const Given& in, const std::vector<double>* stored_r = nullptr) {
  const auto cols = static_cast<std::size_t>(in.cols);
  const auto n = static_cast<std::size_t>(in.rows) * cols;
  Expected e{Refs(n), {}, Refs(n), Refs(in.w.size()), Refs(in.g.size())};
  for (std::size_t b = 0; b < static_cast<std::size_t>(in.rows); ++b) {
    double squares = 0, s = 0, s_abs = 0;
    for (std::size_t i = 0; i < cols; ++i) squares += in.x[b * cols + i] * in.x[b * cols + i];
    const double exact = 1 / std::sqrt(squares / in.divisor + in.eps);
    const double r = stored_r != nullptr ? (*stored_r)[b] : exact;
    e.r.push_back({exact, exact});
    const auto w = [&](std::size_t i) {
      return in.w.empty() ? 1 : in.w[i];
    };
    const auto sigma = [&](std::size_t at) {
      return 1 / (1 + std::exp(-in.g[at]));
    };
    const auto silu = [&](std::size_t at) {
      return in.g.empty() ? 1 : in.g[at] * sigma(at);
    };
    for (std::size_t i = 0; i < cols; ++i) {
      const std::size_t at = b * cols + i;
      const double term = in.dy[at] * silu(at) * in.x[at];
      s += term * w(i);
      s_abs += std::abs(term * w(i));
      const double y = in.x[at] * exact * w(i) * silu(at);
      e.y[at] = {y, std::abs(y)};
      if (!in.w.empty()) {
        e.dw[i].value += term * r;
        e.dw[i].scale += std::abs(term * r);
      }
      if (!in.g.empty()) {
        const double outer = in.dy[at] * in.x[at] * r * w(i) * sigma(at);
        e.dg[at] = {outer * (1 + in.g[at] * (1 - sigma(at))),
                    std::abs(outer) * (1 + std::abs(in.g[at]) * (1 + sigma(at)))};
      }
    }
    for (std::size_t i = 0; i < cols; ++i) {
      const std::size_t at = b * cols + i;
      const double through = in.dy[at] * silu(at) * w(i);
      const double back = r * r / in.divisor;
      const double add = in.add.empty() ? 0 : in.add[at];
      e.dx[at] = {add + r * (through - in.x[at] * s * back),
                  std::abs(add) + r * (std::abs(through) + std::abs(in.x[at]) * s_abs * back)};
    }
  }
  return e;
}

std::vector<double> values(const Refs& refs) {
  std::vector<double> v;
  for (const Ref& r : refs) v.push_back(r.value);
  return v;
}

double dot(const std::vector<double>& a, const std::vector<double>& b) {
  return std::inner_product(a.begin(), a.end(), b.begin(), 0.0);
}

// Numbers around 1/2, so that a sum over rows does not cancel to nothing: its bound stays tight.
std::vector<double> shifted_values(Noise& noise, std::int64_t n, DType dtype) {
  std::vector<double> v = random_values(noise, n, DType::kF64);
  for (double& value : v) value = round_to(dtype, value + 0.5);
  return v;
}

Given random_given(std::int64_t rows, std::int64_t cols, DType dtype, Form form, Weight weight) {
  Noise noise(static_cast<std::uint64_t>(rows + 31 * cols));
  // One column alone has hardly a gradient unless eps is large.
  Given in{rows,
           cols,
           cols == 1 ? 0.5 : 1e-6,
           shifted_values(noise, rows * cols, dtype),
           {},
           {},
           shifted_values(noise, rows * cols, dtype),
           {}};
  // Rows of different size, so that one r cannot pass for another however many columns there are.
  for (std::size_t i = 0; i < in.x.size(); ++i) {
    in.x[i] *= std::ldexp(1, static_cast<int>(i / static_cast<std::size_t>(cols) % 3));
  }
  if (weight == Weight::kLikeX) in.w = shifted_values(noise, cols, dtype);
  if (weight == Weight::kF32) in.w = shifted_values(noise, cols, DType::kF32);
  if (form == Form::kGated) in.g = random_values(noise, rows * cols, dtype, 6);
  if (form == Form::kResidual) in.add = random_values(noise, rows * cols, dtype);
  return in;
}

TEST(RmsNormOracle, GradientMatchesCentralDifference) {
  for (const Form form : kForms) {
    Given in = random_given(3, 7, DType::kF64, form, Weight::kF32);
    in.eps = 1e-2;
    const Arrays inputs = form == Form::kGated ? Arrays{in.x, in.w, in.g} : Arrays{in.x, in.w};
    const auto loss = [&](const Arrays& at) {
      Given moved = in;
      moved.x = at[0], moved.w = at[1];
      if (form == Form::kGated) moved.g = at[2];
      // y carries dy, h (which is x here) carries add.
      return dot(values(oracle(moved).y), in.dy) + dot(in.add, moved.x);
    };
    const Expected e = oracle(in);
    Arrays gradients{values(e.dx), values(e.dw)};
    if (form == Form::kGated) gradients.push_back(values(e.dg));
    expect_gradient(loss, inputs, gradients);
  }
}

TEST(RmsNormOracle, GradientOfL2NormMatchesCentralDifference) {
  Given in = random_given(3, 7, DType::kF64, Form::kPlain, Weight::kNone);
  in.divisor = 1;
  in.eps = 0.3;
  const auto loss = [&](const Arrays& at) {
    Given moved = in;
    moved.x = at[0];
    return dot(values(oracle(moved).y), in.dy);
  };
  expect_gradient(loss, {in.x}, {values(oracle(in).dx)});
}

TEST(RmsNormCheck, SaysWhatIsWrong) {
  const Tensor none;
  const auto f32 = [](Shape shape) {
    return Tensor::meta(shape);
  };
  const auto bf16 = [](Shape shape) {
    return Tensor::meta(shape, DType::kBF16);
  };
  const auto metal = [](Shape shape) {
    return Tensor::meta(shape, DType::kF32, Backend::kMetal);
  };
  const Tensor x = f32({2, 3, 4}), w = f32({4}), r = f32({2, 3});
  const auto fwd = [](const Tensor& a, const Tensor& b, float eps = 1e-6F) {
    return ops::rms_norm_check(a, b, eps);
  };
  const auto bwd = [&](const Tensor& root, const Tensor& dy) {
    return ops::rms_norm_backward_check(x, w, root, dy);
  };
  expect_refused({
      {"rank 0", fwd(f32({}), none), Errc::kShape, "at least one axis, got []"},
      {"no columns", fwd(f32({3, 0}), none), Errc::kShape, "must not be empty, got [3, 0]"},
      {"integers", fwd(Tensor::meta({4}, DType::kI32), none), Errc::kDType, "got i32"},
      {"double", fwd(Tensor::meta({4}, DType::kF64), none), Errc::kDType, "got f64"},
      {"w too long", fwd(x, f32({5})), Errc::kShape, "[D] = [4], got [5]"},
      {"w of rank 2", fwd(x, f32({1, 4})), Errc::kShape, "got [1, 4]"},
      {"w narrower than x", fwd(x, bf16({4})), Errc::kDType, "of x f32, or f32, got bf16"},
      {"w elsewhere", fwd(x, metal({4})), Errc::kDevice, "w must be where x is (cpu), got metal"},
      {"eps below 0", fwd(x, w, -1), Errc::kArgument, "at least 0, got -1"},
      {"eps infinite", fwd(x, w, INFINITY), Errc::kArgument, "finite and at least 0, got inf"},
      {"eps no number", fwd(x, w, NAN), Errc::kArgument, "got nan"},
      {"backward x", ops::rms_norm_backward_check(f32({}), w, r, x), Errc::kShape, "got []"},
      {"r with columns", bwd(x, x), Errc::kShape, "last axis, [2, 3], got [2, 3, 4]"},
      {"r in bf16", bwd(bf16({2, 3}), x), Errc::kDType, "r must be f32, got bf16"},
      {"r elsewhere", bwd(metal({2, 3}), x), Errc::kDevice, "r must be where x is"},
      {"dy of another shape", bwd(r, f32({6, 4})), Errc::kShape, "dy must have the shape of x [2"},
      {"dy of another type", bwd(r, bf16({2, 3, 4})), Errc::kDType, "type of x f32, got bf16"},
      {"dy elsewhere", bwd(r, metal({2, 3, 4})), Errc::kDevice, "dy must be where x is"},
      {"residual: x", ops::rms_norm_residual_check(x, x, w, -1), Errc::kArgument, "got -1"},
      {"residual", ops::rms_norm_residual_check(x, w, w, 0), Errc::kShape, "residual must have"},
      {"residual: dy", ops::rms_norm_residual_backward_check(x, w, r, w, x), Errc::kShape,
       "dy must"},
      {"dh_in", ops::rms_norm_residual_backward_check(x, w, r, x, w), Errc::kShape, "dh_in must"},
      {"gated: x", ops::rms_norm_gated_check(x, w, x, -1), Errc::kArgument, "got -1"},
      {"g", ops::rms_norm_gated_check(x, w, bf16({2, 3, 4}), 0), Errc::kDType, "g must have"},
      {"gated: dy", ops::rms_norm_gated_backward_check(x, w, x, r, w), Errc::kShape, "dy must"},
      {"gated: g", ops::rms_norm_gated_backward_check(x, w, w, r, x), Errc::kShape, "g must have"},
  });
  EXPECT_FALSE(fwd(bf16({0, 4}), w, 0));
  EXPECT_FALSE(fwd(bf16({4}), bf16({4})));
  EXPECT_FALSE(bwd(r, x));
  EXPECT_FALSE(ops::rms_norm_residual_backward_check(x, none, r, x, none));
}

class RmsNorm : public OnDevice {
 protected:
  // Forward and backward of one shape against the oracle.
  void check(Form form, const Shape& shape, DType dtype, Weight weight = Weight::kLikeX,
             bool strided = false, std::int64_t offset = 0) {
    const std::int64_t cols = shape.back();
    const Given given = random_given(*element_count(shape) / cols, cols, dtype, form, weight);
    const auto put = [&](const std::vector<double>& v) {
      return strided ? upload_strided(v, shape, dtype) : upload(v, shape, dtype, offset);
    };
    const DType w_type = weight == Weight::kF32 ? DType::kF32 : dtype;
    const Tensor w = weight == Weight::kNone ? Tensor()
                     : strided               ? upload_strided(given.w, {cols}, w_type)
                                             : upload(given.w, {cols}, w_type, offset);
    const std::string at = to_string(shape) + " " + name_of(dtype) + " form " +
                           std::to_string(static_cast<int>(form)) + " weight " +
                           std::to_string(static_cast<int>(weight));
    if (form == Form::kPlain) return check_plain(given, w, put, at);
    if (form == Form::kResidual) return check_residual(given, w, put, at);
    check_gated(given, w, put, at);
  }

 private:
  template <class Put>
  void check_plain(const Given& given, const Tensor& w, const Put& put, const std::string& at) {
    const Tensor x = put(given.x), dy = put(given.dy);
    const auto [y, r] = ops::rms_norm(encoder(), x, w, static_cast<float>(given.eps));
    const Expected want = expect_forward(given, y, r, at);
    const auto [dx, dw] = ops::rms_norm_backward(encoder(), x, w, r, dy);
    expect_gradients(given, want, dx, dw, at);
  }

  template <class Put>
  void check_residual(Given given, const Tensor& w, const Put& put, const std::string& at) {
    const Tensor x = put(given.x), residual = put(given.dy);
    const auto [y, h, r] =
        ops::rms_norm_residual(encoder(), x, residual, w, static_cast<float>(given.eps));
    for (std::size_t i = 0; i < given.x.size(); ++i) {
      given.x[i] = round_to(h.dtype(), given.x[i] + given.dy[i]);
    }
    EXPECT_EQ(download(h), given.x) << "h " << at;
    const Tensor dy = put(given.dy), add = put(given.add);
    Expected want = expect_forward(given, y, r, at);
    const auto [dh, dw] = ops::rms_norm_residual_backward(encoder(), h, w, r, dy, add);
    expect_gradients(given, want, dh, dw, at);
    given.add.clear();
    const auto stored = download(r);
    want = oracle(given, &stored);
    const auto alone = ops::rms_norm_residual_backward(encoder(), h, w, r, dy, Tensor());
    expect_gradients(given, want, alone.dh, alone.dw, at + " without dh_in");
  }

  template <class Put>
  void check_gated(const Given& given, const Tensor& w, const Put& put, const std::string& at) {
    const Tensor x = put(given.x), g = put(given.g), dy = put(given.dy);
    const auto [y, r] = ops::rms_norm_gated(encoder(), x, w, g, static_cast<float>(given.eps));
    const Expected want = expect_forward(given, y, r, at);
    const auto [dx, dw, dg] = ops::rms_norm_gated_backward(encoder(), x, w, g, r, dy);
    expect_gradients(given, want, dx, dw, at);
    expect_close("dg " + at, download(dg), want.dg, x.dtype(), given.cols);
  }

  Expected expect_forward(const Given& given, const Tensor& y, const Tensor& r,
                          const std::string& at) {
    const auto stored = download(r);
    Expected want = oracle(given, &stored);
    expect_close("r " + at, stored, want.r, DType::kF32, given.cols);
    expect_close("y " + at, download(y), want.y, y.dtype(), given.cols);
    return want;
  }

  void expect_gradients(const Given& given, const Expected& want, const Tensor& dx,
                        const Tensor& dw, const std::string& at) {
    expect_close("dx " + at, download(dx), want.dx, dx.dtype(), given.cols);
    EXPECT_EQ(dw.defined(), !given.w.empty()) << at;
    if (dw.defined()) expect_close("dw " + at, download(dw), want.dw, dw.dtype(), given.rows);
  }
};

TEST_P(RmsNorm, MatchesOracleForEveryShape) {
  for (const Form form : kForms) {
    for (const DType dtype : kTypes) {
      for (const std::int64_t rows : {0, 1, 2, 5}) {
        for (const std::int64_t cols : {1, 2, 7, 31, 32, 33, 128, 255, 256, 257, 2048}) {
          check(form, {rows, cols}, dtype);
        }
      }
    }
  }
}

TEST_P(RmsNorm, MatchesOracleForEveryWeight) {
  for (const Form form : kForms) {
    for (const DType dtype : kTypes) {
      for (const Weight weight : kWeights) {
        check(form, {0, 33}, dtype, weight);
        check(form, {3, 5, 33}, dtype, weight);
        check(form, {67, 1027}, dtype, weight);
        check(form, {35, 96}, dtype, weight);
        check(form, {9}, dtype, weight);
      }
    }
  }
}

// Several blocks of rows: full ones, and a last one that is no multiple of a group.
TEST_P(RmsNorm, MatchesOracleForManyRows) {
  for (const Form form : kForms) {
    for (const DType dtype : kTypes) {
      check(form, {1031, 128}, dtype);
      check(form, {9000, 3}, dtype);
      check(form, {255, 256}, dtype);
    }
  }
}

// Rows enough that a GPU's blocks come back to the memory of their first ones, for each of the lengths at
// which it cuts rows in another way. A CPU, for which a row is like another, gets an eighth of them.
TEST_P(RmsNorm, MatchesOracleForEveryForm) {
  const auto many = [&](Form form, std::int64_t rows, std::int64_t cols, DType dtype) {
    check(form, {GetParam() == Backend::kCpu ? rows / 8 : scaled(rows), cols}, dtype);
  };
  for (const Form form : kForms) {
    many(form, 20011, 64, DType::kF32);
    many(form, 9001, 128, DType::kF32);
    many(form, 9001, 256, DType::kF32);
    many(form, 4301, 512, DType::kF32);
    many(form, 20011, 64, DType::kBF16);
    many(form, 4301, 1024, DType::kBF16);
    for (const DType dtype : {DType::kF32, DType::kBF16}) {
      many(form, 2203, 2048, dtype);
      many(form, 1101, 4096, dtype);
      many(form, 501, 8192, dtype);
      many(form, 131, 16384, dtype);
      many(form, 131, 32768, dtype);
      check(form, {3, 1024}, dtype);
    }
    check(form, {3, 512}, DType::kF16);
    check(form, {3, 4096}, DType::kF16);
    check(form, {3, 65536}, DType::kF16);
    check(form, {5, 256}, DType::kF32, Weight::kLikeX, false, 1);
  }
}

TEST_P(RmsNorm, MatchesOracleForLongRows) {
  for (const Form form : kForms) {
    for (const DType dtype : kTypes) {
      check(form, {5, 8192}, dtype);
      check(form, {3, 32768}, dtype, Weight::kF32);
      check(form, {9, 8224}, dtype);  // several rows of a block, one at a time
    }
    check(form, {2, 300007}, DType::kF32);
  }
}

TEST_P(RmsNorm, MatchesOracleForViews) {
  for (const Form form : kForms) {
    for (const DType dtype : kTypes) {
      check(form, {2, 3, 33}, dtype, Weight::kLikeX, true);
      check(form, {2, 3, 33}, dtype, Weight::kF32, true);
      for (const std::int64_t offset : {1, 3, 17}) {
        check(form, {5, 257}, dtype, Weight::kLikeX, false, offset);
      }
    }
  }
}

// Large enough to be written past the cache, with rows that start in the middle of a line or each
// with a line.
TEST_P(RmsNorm, MatchesOracleWhenStreamed) {
  for (const Form form : kForms) {
    check(form, {scaled(530), 2047}, DType::kF32, Weight::kLikeX, false, 3);
    check(form, {scaled(1030), 2047}, DType::kBF16, Weight::kLikeX, false, 3);
    check(form, {scaled(1030), 2048}, DType::kBF16, Weight::kF32);
  }
  check(Form::kPlain, {scaled(1030), 2047}, DType::kF16, Weight::kLikeX, false, 3);
}

TEST_P(RmsNorm, L2NormMatchesOracle) {
  for (const DType dtype : kTypes) {
    for (const std::int64_t rows : {0, 1, 5, 67}) {
      for (const std::int64_t cols : {1, 2, 15, 16, 33, 64, 96, 128, 257, 1024, 8200}) {
        Given in = random_given(rows, cols, dtype, Form::kPlain, Weight::kNone);
        in.divisor = 1;
        const bool strided = rows == 5;
        const Shape shape{rows, cols};
        Tape tape(encoder());
        const Tensor x =
            tape.watch(strided ? upload_strided(in.x, shape, dtype) : upload(in.x, shape, dtype));
        const Tensor y = ops::l2_norm(tape, x, static_cast<float>(in.eps));
        const std::string at = "l2_norm " + to_string(shape) + " " + name_of(dtype);
        expect_close("y of " + at, download(y), oracle(in).y, dtype, cols);
        const Tensor root = ops::l2_norm(encoder(), x.detach(), static_cast<float>(in.eps)).r;
        const auto r = download(root);
        expect_close("r of " + at, r, oracle(in).r, DType::kF32, cols);
        tape.backward(y,
                      strided ? upload_strided(in.dy, shape, dtype) : upload(in.dy, shape, dtype));
        expect_close("dx of " + at, download(tape.grad(x)), oracle(in, &r).dx, dtype, cols);
      }
    }
  }
}

// mx.fast.rms_norm(x, None, 1e-6), and for l2_norm x / mx.linalg.norm(x, axis=-1, keepdims=True).
TEST_P(RmsNorm, AsMlx) {
  const Tensor x = upload({3, 4, 1, -2}, {2, 2}, DType::kF32);
  expect_close("rms_norm", download(ops::rms_norm(encoder(), x, Tensor(), 1e-6F).y),
               refs_of({0.848528087, 1.13137078, 0.632455409, -1.26491082}), DType::kF32, 2);
  expect_close("l2_norm", download(ops::l2_norm(encoder(), x, 0).y),
               refs_of({0.600000024, 0.800000012, 0.44721359, -0.89442718}), DType::kF32, 2);
}

TEST_P(RmsNorm, BackwardOfNoRowsClearsDw) {
  for (const DType dtype : kTypes) {
    const Tensor x = encoder().empty({0, 5}, dtype), r = encoder().empty({0}, DType::kF32);
    const Tensor w = upload({1, 2, 3, 4, 5}, {5}, dtype);
    const std::vector<double> zeros(5);
    EXPECT_EQ(download(ops::rms_norm_backward(encoder(), x, w, r, x).dw), zeros);
    EXPECT_EQ(download(ops::rms_norm_gated_backward(encoder(), x, w, x, r, x).dw), zeros);
  }
}

TEST_P(RmsNorm, ExtremeNumbers) {
  const double inf = INFINITY, nan = std::nan("");
  for (const DType dtype : kTypes) {
    // A row each: NaN, an infinity, zeros, ordinary numbers.
    const Tensor x = upload({1, nan, 3, inf, 2, -1, 0, 0, 0, 3, 0, 4}, {4, 3}, dtype);
    const Tensor ones = upload(std::vector<double>(12, 1), {4, 3}, dtype);
    const auto [y, r] = ops::rms_norm(encoder(), x, Tensor(), 0.25F);
    const auto got = download(y);
    for (std::size_t i = 0; i < 4; ++i) EXPECT_TRUE(std::isnan(got[i])) << i;
    for (std::size_t i = 4; i < 9; ++i) EXPECT_EQ(got[i], 0) << i;
    EXPECT_NEAR(got[9], 3 / std::sqrt(25.0 / 3 + 0.25), 1e-2);
    const auto roots = download(r);
    EXPECT_TRUE(std::isnan(roots[0]));
    EXPECT_EQ(roots[1], 0);
    EXPECT_EQ(roots[2], 2);
    const auto dx = download(ops::rms_norm_backward(encoder(), x, Tensor(), r, ones).dx);
    for (std::size_t i = 0; i < 3; ++i) EXPECT_TRUE(std::isnan(dx[i])) << i;
    for (std::size_t i = 6; i < 9; ++i) EXPECT_EQ(dx[i], 2) << i;
    // NaN in w reaches its column alone; a shut gate closes, an open one passes.
    const Tensor w = upload({1, nan, 1}, {3}, DType::kF32);
    const auto column = download(ops::rms_norm(encoder(), ones, w, 0).y);
    EXPECT_TRUE(std::isnan(column[1]));
    EXPECT_EQ(column[2], 1);
    const Tensor gate = upload({-200, 0, 200, -200, 0, 200}, {2, 3}, dtype);
    const Tensor two = upload(std::vector<double>(6, 1), {2, 3}, dtype);
    const auto gated = ops::rms_norm_gated(encoder(), two, Tensor(), gate, 0);
    EXPECT_EQ(download(gated.y), (std::vector<double>{0, 0, 200, 0, 0, 200}));
    const auto dg = ops::rms_norm_gated_backward(encoder(), two, Tensor(), gate, gated.r, two).dg;
    EXPECT_EQ(download(dg), (std::vector<double>{0, 0.5, 1, 0, 0.5, 1}));
  }
  // Σ x² passes the largest f32.
  const auto large = ops::rms_norm(encoder(), upload({1e25, 1}, {1, 2}, DType::kF32), Tensor(), 0);
  EXPECT_EQ(download(large.r), std::vector<double>{0});
  EXPECT_EQ(download(large.y), (std::vector<double>{0, 0}));
  const auto zero = ops::rms_norm(encoder(), upload({0, 0}, {2}, DType::kF32), Tensor(), 0);
  EXPECT_EQ(download(zero.r), std::vector<double>{inf});
  EXPECT_TRUE(std::isnan(download(zero.y)[0]));
}

// Where no sum rounds, a power of two in x comes out as one in r and dx, also where r² overflows: unless x² is subnormal
// then, which some GPUs take for 0.
TEST_P(RmsNorm, SmallRowsScaleExactly) {
  const int down = GetParam() == Backend::kMetal ? 59 : 64;
  Noise noise(7);
  std::vector<double> x, dy, small;
  for (int i = 0; i < 64; ++i) {
    x.push_back(static_cast<double>(noise.below(15) - 7) / 8);
    dy.push_back(static_cast<double>(noise.below(15) - 7) / 8);
  }
  for (const double v : x) small.push_back(std::ldexp(v, -down));
  const auto run = [&](const std::vector<double>& rows) {
    const Tensor t = upload(rows, {2, 32}, DType::kF32), up = upload(dy, {2, 32}, DType::kF32);
    const auto [y, r] = ops::rms_norm(encoder(), t, Tensor(), 0);
    return Arrays{download(y), download(r),
                  download(ops::rms_norm_backward(encoder(), t, Tensor(), r, up).dx)};
  };
  Arrays want = run(x);
  for (const std::size_t scaled : {1U, 2U}) {
    for (double& v : want[scaled]) v = std::ldexp(v, down);
  }
  EXPECT_EQ(run(small), want);
}

// Also one whose bits would carry into the sign if they were rounded like a number's.
TEST_P(RmsNorm, NanOfAnyBitsStaysNan) {
  const std::vector<float> nans(64, std::bit_cast<float>(0x7fffffffU));
  const auto raw = [&](std::int64_t n) {
    const Tensor t = encoder().empty({n}, DType::kF32);
    encoder().upload(nans.data(), t.bytes(), t);
    return t;
  };
  const Tensor w = raw(64), r = raw(2);
  const auto expect_nan = [&](const char* what, const Tensor& t) {
    for (const double v : download(t)) EXPECT_TRUE(std::isnan(v)) << what << " " << v;
  };
  for (const DType dtype : kTypes) {
    const Tensor x = upload(std::vector<double>(128, 1), {2, 64}, dtype);
    expect_nan("y", ops::rms_norm(encoder(), x, w, 0).y);
    expect_nan("gated y", ops::rms_norm_gated(encoder(), x, w, x, 0).y);
    expect_nan("dx", ops::rms_norm_backward(encoder(), x, Tensor(), r, x).dx);
    const auto gated = ops::rms_norm_gated_backward(encoder(), x, w, x, r, x);
    for (const Tensor& t : {gated.dx, gated.dw, gated.dg}) expect_nan("gated gradient", t);
  }
}

TEST_P(RmsNorm, SameBitsOnEveryRun) {
  Noise noise(5);
  for (const Shape& shape : {Shape{1031, 128}, Shape{300, 2047}, Shape{7, 20000}}) {
    for (const DType dtype : kTypes) {
      const std::int64_t n = *element_count(shape);
      const Tensor x = upload(random_values(noise, n, dtype), shape, dtype);
      const Tensor g = upload(random_values(noise, n, dtype), shape, dtype);
      const Tensor dy = upload(random_values(noise, n, dtype), shape, dtype);
      const Tensor w = upload(random_values(noise, shape[1], dtype), {shape[1]}, dtype);
      expect_repeatable(encoder(), [&] {
        const auto plain = ops::rms_norm(encoder(), x, w, 1e-6F);
        const auto back = ops::rms_norm_backward(encoder(), x, w, plain.r, dy);
        const auto sum = ops::rms_norm_residual(encoder(), x, g, w, 1e-6F);
        const auto both = ops::rms_norm_residual_backward(encoder(), sum.h, w, sum.r, dy, g);
        const auto gated = ops::rms_norm_gated(encoder(), x, w, g, 1e-6F);
        const auto gates = ops::rms_norm_gated_backward(encoder(), x, w, g, gated.r, dy);
        return std::vector<Tensor>{plain.y, plain.r,  back.dx,  back.dw, sum.y,
                                   sum.h,   sum.r,    both.dh,  both.dw, gated.y,
                                   gated.r, gates.dx, gates.dw, gates.dg};
      });
    }
  }
}

TEST_P(RmsNorm, RandomShapesFormsAndWeights) {
  EXPECT_TRUE(rc::check("rms_norm matches its oracle", [this] {
    Shape shape;
    const int rank = *rc::gen::inRange(0, 4);
    for (int i = 0; i < rank; ++i) shape.push_back(*rc::gen::inRange(1, 9));
    shape.push_back(*rc::gen::inRange(1, 200));
    check(*rc::gen::elementOf(std::vector<Form>(std::begin(kForms), std::end(kForms))), shape,
          *rc::gen::elementOf(std::vector<DType>(std::begin(kTypes), std::end(kTypes))),
          *rc::gen::elementOf(std::vector<Weight>(std::begin(kWeights), std::end(kWeights))),
          *rc::gen::arbitrary<bool>());
    RC_ASSERT(!HasFailure());
  }));
}

// ---- the tolerances this op has always been held to ----

void expect_within(const char* what, const std::vector<double>& got, const Refs& want,
                   double relative, double absolute) {
  ASSERT_EQ(got.size(), want.size()) << what;
  for (std::size_t i = 0; i < got.size(); ++i) {
    const double diff = std::abs(got[i] - want[i].value);
    const double size = std::max({got[i], want[i].value, 1.0});
    EXPECT_TRUE(diff <= absolute || diff / size <= relative) << what << " at " << i << ": " << diff;
  }
}

class RmsNormTolerance : public OnDevice {
 protected:
  static Given waves(std::int64_t rows, std::int64_t cols, bool unit_weight) {
    Given in{rows, cols, 1e-6, {}, {}, {}, {}, {}};
    for (std::int64_t i = 0; i < rows * cols; ++i) {
      const auto t = static_cast<double>(i);
      in.x.push_back(round_to(DType::kF32, std::sin(0.137 * t - 0.4) * 0.7));
      in.dy.push_back(round_to(DType::kF32, std::sin(0.231 * t + 0.1) * 0.6));
    }
    for (std::int64_t i = 0; i < cols; ++i) {
      const double wave = 1 + 0.1 * std::sin(0.053 * static_cast<double>(i));
      in.w.push_back(unit_weight ? 1 : round_to(DType::kF32, wave));
    }
    return in;
  }

  void check(const Given& in, double relative, double absolute) {
    const Tensor x = upload(in.x, {in.rows, in.cols}, DType::kF32);
    const Tensor w = upload(in.w, {in.cols}, DType::kF32);
    const Tensor dy = upload(in.dy, {in.rows, in.cols}, DType::kF32);
    const auto [y, r] = ops::rms_norm(encoder(), x, w, 1e-6F);
    const auto [dx, dw] = ops::rms_norm_backward(encoder(), x, w, r, dy);
    const Expected want = oracle(in);
    expect_within("r", download(r), want.r, 1e-5, 1e-6);
    expect_within("dx", download(dx), want.dx, relative, absolute);
    expect_within("dw", download(dw), want.dw, relative, absolute);
  }
};

TEST_P(RmsNormTolerance, SmallRows) { check(waves(4, 32, false), 1e-4, 1e-6); }
TEST_P(RmsNormTolerance, RealisticRows) { check(waves(8, 1024, false), 1e-3, 1e-5); }
TEST_P(RmsNormTolerance, UnitWeights) { check(waves(4, 64, true), 1e-4, 1e-6); }

TEST_P(RmsNormTolerance, KernelMatchesFiniteDifference) {
  const Given in = waves(2, 32, false);
  const auto loss = [&](const std::vector<double>& x, const std::vector<double>& w) {
    const Tensor device_x = upload(x, {2, 32}, DType::kF32);
    const Tensor device_w = upload(w, {32}, DType::kF32);
    return dot(download(ops::rms_norm(encoder(), device_x, device_w, 1e-6F).y), in.dy);
  };
  const Tensor x = upload(in.x, {2, 32}, DType::kF32), w = upload(in.w, {32}, DType::kF32);
  const Tensor r = ops::rms_norm(encoder(), x, w, 1e-6F).r;
  const auto [dx, dw] =
      ops::rms_norm_backward(encoder(), x, w, r, upload(in.dy, {2, 32}, DType::kF32));
  const auto probe = [&](bool of_w, std::size_t i, double got) {
    auto up = in, down = in;
    (of_w ? up.w : up.x)[i] += 1e-3;
    (of_w ? down.w : down.x)[i] -= 1e-3;
    const double slope = (loss(up.x, up.w) - loss(down.x, down.w)) / 2e-3;
    const double diff = std::abs(slope - got);
    EXPECT_TRUE(diff <= 1e-3 || diff <= 5e-3 * std::abs(slope)) << i << ": " << got << " " << slope;
  };
  for (const std::size_t i : {0, 7, 31, 32, 47, 63}) probe(false, i, download(dx)[i]);
  for (const std::size_t i : {0, 5, 15, 31}) probe(true, i, download(dw)[i]);
}

MT_ON_EVERY_BACKEND(RmsNorm);
MT_ON_EVERY_BACKEND(RmsNormTolerance);

}  // namespace
}  // namespace mlxtape::test
