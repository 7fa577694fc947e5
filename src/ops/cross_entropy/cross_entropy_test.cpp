#include "mlxtape/ops/cross_entropy.h"

#include <rapidcheck.h>

#include <algorithm>
#include <cmath>

#include "support/op_test.h"

namespace mlxtape::test {
namespace {

using ops::CrossEntropyOptions;
using ops::Reduction;

// A loss in double: logits [R, V], targets, what each row counts, ε.
struct Problem {
  std::int64_t rows, cols;
  std::vector<double> z, target, weight;
  double epsilon = 0;

  std::size_t at(std::int64_t r, std::int64_t v) const {
    return static_cast<std::size_t>(r * cols + v);
  }
};

struct Expected {
  Refs loss;  // [R]
  Refs dz;    // [R, V], for the c given
};

// The formula block of cross_entropy.h. c: a number a row.
Expected oracle(const Problem& p, const std::vector<double>& c) {
  Expected e{Refs(p.weight.size()), Refs(p.z.size())};
  const double all = static_cast<double>(p.cols);
  for (std::int64_t r = 0; r < p.rows; ++r) {
    const auto row = static_cast<std::size_t>(r);
    const double w = p.weight[row];
    const auto t = static_cast<std::int64_t>(p.target[row]);
    if (w == 0) {
      e.loss[row] = {0, 0};
      for (std::int64_t v = 0; v < p.cols; ++v) e.dz[p.at(r, v)] = {0, 0};
      continue;
    }
    double m = -INFINITY, sum = 0, lost = 0, mean = 0, mean_abs = 0;
    for (std::int64_t v = 0; v < p.cols; ++v) m = std::max(m, p.z[p.at(r, v)]);
    for (std::int64_t v = 0; v < p.cols; ++v) {
      const double z = p.z[p.at(r, v)];
      sum += std::exp(z - m);
      if (z > -INFINITY) lost += std::exp(z - m) * (m - z) / 16;
      mean += z / all;
      mean_abs += std::abs(z) / all;
    }
    const double from_target = (1 - p.epsilon) * (m - p.z[p.at(r, t)]);
    const double from_mean = p.epsilon == 0 ? 0 : p.epsilon * (m - mean);
    // A relative error of the sum is an absolute one of its logarithm, and so is that of z − m.
    const double size = 1 + std::log(sum) + lost / sum + from_target +
                        (p.epsilon == 0 ? 0 : p.epsilon * (std::abs(m) + mean_abs));
    e.loss[row] = {w * (std::log(sum) + from_target + from_mean), std::abs(w) * size};
    for (std::int64_t v = 0; v < p.cols; ++v) {
      const double share = std::exp(p.z[p.at(r, v)] - m) / sum;
      const double below = share > 0 ? m - p.z[p.at(r, v)] : 0;
      const double hit = v == t ? 1 - p.epsilon : 0;
      e.dz[p.at(r, v)] = {c[row] * (share - hit - p.epsilon / all),
                          std::abs(c[row]) * (share * (1 + below / 16) + hit + p.epsilon / all)};
    }
  }
  return e;
}

// Sums are made of many short ones: no chain of additions is longer than this.
std::int64_t chain(std::int64_t n) { return std::min<std::int64_t>(n, 1024); }

Ref reduced(const Refs& rows, double scale) {
  Ref sum{0, 0};
  for (const Ref& r : rows) sum.value += r.value * scale, sum.scale += r.scale * scale;
  return sum;
}

std::vector<double> values(const Refs& refs) {
  std::vector<double> v;
  for (const Ref& r : refs) v.push_back(r.value);
  return v;
}

Problem random_problem(std::int64_t rows, std::int64_t cols, DType dtype, double size = 4,
                       double epsilon = 0) {
  Noise noise(static_cast<std::uint64_t>(rows + 31 * cols));
  Problem p{rows, cols, random_values(noise, rows * cols, dtype, size), {}, {}, epsilon};
  for (std::int64_t r = 0; r < rows; ++r) {
    p.target.push_back(static_cast<double>(r == 0 ? cols - 1 : noise.below(cols)));
    p.weight.push_back(1);
  }
  return p;
}

TEST(CrossEntropyOracle, GradientMatchesCentralDifference) {
  Problem p = random_problem(4, 7, DType::kF64, 3);
  p.weight = {1, 0.5, 0, 2};
  for (const double epsilon : {0.0, 0.1, 1.0}) {
    p.epsilon = epsilon;
    const std::vector<double> dloss{0.3, -1, 2, 0.7};
    std::vector<double> c(4);
    for (std::size_t r = 0; r < 4; ++r) c[r] = dloss[r] * p.weight[r];
    const auto loss = [&](const Arrays& at) {
      Problem moved = p;
      moved.z = at[0];
      double sum = 0;
      const auto rows = values(oracle(moved, c).loss);
      for (std::size_t r = 0; r < 4; ++r) sum += dloss[r] * rows[r];
      return sum;
    };
    expect_gradient(loss, {p.z}, {values(oracle(p, c).dz)});
  }
}

TEST(CrossEntropyCheck, SaysWhatIsWrong) {
  const auto z = Tensor::meta({4, 2});
  const auto t = Tensor::meta({4}, DType::kI32);
  const auto with = [](float epsilon) {
    CrossEntropyOptions options;
    options.label_smoothing = epsilon;
    return options;
  };
  CrossEntropyOptions short_mask;
  short_mask.mask = Tensor::meta({3});
  const auto fwd = [&](const Tensor& logits, const Tensor& targets,
                       const CrossEntropyOptions& options = {}) {
    return ops::cross_entropy_check(logits, targets, options);
  };
  const auto grad = [&](const Tensor& dlogits) {
    return ops::cross_entropy_with_gradient_check(z, t, {}, dlogits);
  };
  const ops::LossRows four{Tensor::meta({4}), Tensor::meta({4}, DType::kI64), Tensor::meta({})};
  const ops::LossRows three{Tensor::meta({3}), Tensor::meta({3}, DType::kI64), Tensor::meta({})};
  const ops::LossRows bare{Tensor::meta({4}), Tensor(), Tensor::meta({})};
  const auto rows = [&](const ops::LossRows& of, const Tensor& losses) {
    return ops::cross_entropy_rows_check(z, of, 0, losses, Tensor());
  };
  expect_refused({
      {"rank 0", fwd(Tensor::meta({}), t), Errc::kShape, "at least one axis, got []"},
      {"no columns", fwd(Tensor::meta({4, 0}), t), Errc::kShape, "not be empty, got [4, 0]"},
      {"integers", fwd(Tensor::meta({4, 2}, DType::kI32), t), Errc::kDType, "got i32"},
      {"negative smoothing", fwd(z, t, with(-0.1F)), Errc::kArgument, "[0, 1], got -0.1"},
      {"smoothing above 1", fwd(z, t, with(1.5F)), Errc::kArgument, "[0, 1], got 1.5"},
      {"smoothing NaN", fwd(z, t, with(NAN)), Errc::kArgument, "[0, 1], got"},
      {"no targets", fwd(z, {}), Errc::kArgument, "targets must be given"},
      {"too few targets", fwd(z, Tensor::meta({3}, DType::kI32)), Errc::kShape, "a row, 4, got"},
      {"a short mask", fwd(z, t, short_mask), Errc::kShape, "mask must have an element a row"},
      {"forward first", ops::cross_entropy_with_gradient_check(z, {}, {}, z), Errc::kArgument,
       "targets"},
      {"another shape", grad(Tensor::meta({2, 4})), Errc::kShape, "[4, 2], got [2, 4]"},
      {"another type", grad(Tensor::meta({4, 2}, DType::kBF16)), Errc::kDType, "got bf16"},
      {"elsewhere", grad(Tensor::meta({4, 2}, DType::kF32, Backend::kMetal)), Errc::kDevice,
       "got metal"},
      {"strided", grad(Tensor::meta({2, 4}).transpose({1, 0})), Errc::kShape, "contiguous"},
      {"rows: logits first",
       ops::cross_entropy_rows_check(Tensor::meta({}), four, 0, Tensor::meta({4}), {}),
       Errc::kShape, "at least one axis"},
      {"rows of another count", rows(three, Tensor::meta({4})), Errc::kShape, "[4], got [3]"},
      {"rows without targets", rows(bare, Tensor::meta({4})), Errc::kShape, "and an index"},
      {"losses of another count", rows(four, Tensor::meta({3})), Errc::kShape, "f32 [4], got f32"},
      {"losses of another type", rows(four, Tensor::meta({4}, DType::kF16)), Errc::kShape,
       "got f16"},
      {"rows: a gradient of another shape",
       ops::cross_entropy_rows_check(z, four, 0, Tensor::meta({4}), Tensor::meta({4, 3})),
       Errc::kShape, "dlogits"},
  });
  EXPECT_FALSE(fwd(Tensor::meta({0, 3}, DType::kF16), Tensor::meta({0}, DType::kU32)));
  EXPECT_FALSE(fwd(Tensor::meta({2, 2, 3}), Tensor::meta({2, 2}, DType::kI64)));
  EXPECT_FALSE(fwd(Tensor::meta({3}), Tensor::meta({}, DType::kI64)));
}

class CrossEntropy : public OnDevice {
 protected:
  struct How {
    DType dtype = DType::kF32;
    DType targets = DType::kI32;
    bool strided = false;
    std::int64_t offset = 0;
    bool brief = false;    // the mean alone
    bool extreme = false;  // results of 0 and ±1: nothing that planted mistakes would change
  };

  // Every form of the op on one problem: each reduction, gradient apart and in place, from saved parts.
  // options holds what gave the problem its weights.
  void check(const Problem& p, const How& how, CrossEntropyOptions options = {}) {
    options.label_smoothing = static_cast<float>(p.epsilon);
    const Shape shape{p.rows, p.cols};
    const auto put = [&] {
      return how.strided ? upload_strided(p.z, shape, how.dtype)
                         : upload(p.z, shape, how.dtype, how.offset);
    };
    const Tensor targets = upload(p.target, {p.rows}, how.targets);
    const std::string at = to_string(shape) + " " + name_of(how.dtype);
    double counts = 0;
    for (const double w : p.weight) counts += w;
    const auto close = [&](const std::string& what, const std::vector<double>& got,
                           const Refs& want, DType stored, std::int64_t n) {
      if (!how.extreme) return expect_close(what, got, want, stored, n);
      EXPECT_EQ(count_wrong(got, want, stored, n), 0) << what;
    };
    Noise noise(3);
    for (const Reduction reduction : {Reduction::kNone, Reduction::kSum, Reduction::kMean}) {
      if (how.brief && reduction != Reduction::kMean) continue;
      options.reduction = reduction;
      const bool one = reduction != Reduction::kNone;
      const double scale = reduction != Reduction::kMean ? 1 : counts == 0 ? 0 : 1 / counts;
      std::vector<double> c, c_upstream;
      const auto dloss = random_values(noise, one ? 1 : p.rows, DType::kF32);
      for (std::int64_t r = 0; r < p.rows; ++r) {
        const auto row = static_cast<std::size_t>(r);
        c.push_back(p.weight[row] * scale);
        c_upstream.push_back(c.back() * dloss[one ? 0 : row]);
      }
      const Expected want = oracle(p, c);
      const Refs loss = one ? Refs{reduced(want.loss, scale)} : want.loss;
      const std::int64_t terms = chain(p.cols) + (one ? p.rows : 0);

      const Tensor logits = put();
      const ops::CrossEntropyParts parts =
          ops::cross_entropy_parts(encoder(), logits, targets, options);
      EXPECT_EQ(parts.loss.shape(), one ? Shape{} : Shape{p.rows});
      close("loss " + at, download(parts.loss), loss, DType::kF32, terms);
      const Tensor dz = ops::cross_entropy_backward(encoder(), logits, parts,
                                                    upload(dloss, parts.loss.shape(), DType::kF32),
                                                    options.label_smoothing);
      close("dz from parts " + at, download(dz), oracle(p, c_upstream).dz, how.dtype,
            chain(p.cols));

      const Tensor apart = encoder().empty(shape, how.dtype);
      const Tensor fused =
          ops::cross_entropy_with_gradient(encoder(), logits, targets, options, apart);
      close("loss with gradient " + at, download(fused), loss, DType::kF32, terms);
      close("dz " + at, download(apart), want.dz, how.dtype, chain(p.cols));
      EXPECT_EQ(download(logits), p.z) << "the logits are as they were";
      if (how.strided) continue;
      EXPECT_EQ(bits_of(encoder(), ops::cross_entropy_with_gradient(encoder(), logits, targets,
                                                                    options, logits)),
                bits_of(encoder(), fused))
          << "in place " << at;
      EXPECT_EQ(bits_of(encoder(), logits), bits_of(encoder(), apart)) << "in place " << at;
    }
  }
};

constexpr DType kTypes[] = {DType::kF32, DType::kF16, DType::kBF16};

TEST_P(CrossEntropy, MatchesOracleForEveryShape) {
  for (const DType dtype : kTypes) {
    for (const std::int64_t rows :
         {std::int64_t{0}, std::int64_t{1}, std::int64_t{2}, 2 * scaled(3) - 1}) {
      for (const std::int64_t cols : {1, 2, 7, 31, 32, 33, 255, 256, 257, 2048, 2049, 4097}) {
        check(random_problem(rows, cols, dtype), {.dtype = dtype});
      }
    }
  }
}

// Lengths at which a GPU changes from one form to the next, and rows cut over a CPU's threads.
TEST_P(CrossEntropy, MatchesOracleForEveryForm) {
  for (const std::int64_t cols : {512, 1024, 4096, 8192, 16384, 32768, 65536, 151936}) {
    check(random_problem(2, cols, DType::kF32), {.dtype = DType::kF32, .brief = true});
    check(random_problem(3, cols, DType::kBF16), {.dtype = DType::kBF16, .brief = true});
  }
  check(random_problem(1, 151936, DType::kF16), {.dtype = DType::kF16, .brief = true});
  check(random_problem(2, 151937, DType::kBF16), {.dtype = DType::kBF16, .brief = true});
  check(random_problem(2, 250000, DType::kBF16), {.dtype = DType::kBF16, .brief = true});
  check(random_problem(1, 250001, DType::kF32), {.dtype = DType::kF32, .brief = true});
  check(random_problem(1, scaled(600000), DType::kF32), {.dtype = DType::kF32, .brief = true});
  check(random_problem(scaled(40), 33000, DType::kBF16), {.dtype = DType::kBF16, .brief = true});
}

TEST_P(CrossEntropy, MatchesOracleForViewsAndTargetTypes) {
  for (const DType dtype : kTypes) {
    for (const DType targets : {DType::kI32, DType::kU32, DType::kI64}) {
      check(random_problem(5, 33, dtype), {.dtype = dtype, .targets = targets, .strided = true});
      for (const std::int64_t offset : {1, 3, 17}) {
        check(random_problem(5, 257, dtype),
              {.dtype = dtype, .targets = targets, .offset = offset});
      }
    }
    check(random_problem(scaled(1100), 2047, dtype),
          {.dtype = dtype, .offset = 3, .brief = true});  // past the cache
  }
  // Leading axes count rows; one row alone.
  Problem p = random_problem(6, 9, DType::kF32);
  const auto want = oracle(p, p.weight);
  const Tensor loss = ops::cross_entropy(encoder(), upload(p.z, {2, 3, 9}, DType::kF32),
                                         upload_strided(p.target, {2, 3}, DType::kI64));
  EXPECT_EQ(loss.shape(), (Shape{2, 3}));
  expect_close("leading axes", download(loss), want.loss, DType::kF32, 9);
  p = random_problem(1, 9, DType::kF32);
  const Tensor one = ops::cross_entropy(encoder(), upload(p.z, {9}, DType::kF32),
                                        upload(p.target, {}, DType::kI64));
  EXPECT_EQ(one.rank(), 0);
  expect_close("one row", download(one), oracle(p, p.weight).loss, DType::kF32, 9);
}

TEST_P(CrossEntropy, Smoothing) {
  for (const DType dtype : kTypes) {
    for (const double epsilon : {0.125, 1.0}) {
      for (const std::int64_t cols : {1, 5, 100, 2049, 5000, 40000}) {
        check(random_problem(3, cols, dtype, 4, epsilon), {.dtype = dtype, .brief = cols > 5000});
      }
    }
  }
  check(random_problem(3, 300, DType::kF32, 1e4, 0.25), {.extreme = true});
}

TEST_P(CrossEntropy, MasksAndIgnoredRows) {
  const std::int64_t rows = std::max<std::int64_t>(12, scaled(40));
  for (const DType dtype : kTypes) {
    for (const std::int64_t cols : {33, 256, 5000, 40000}) {
      if (cols == 40000 && dtype != DType::kBF16) continue;
      Problem p = random_problem(rows, cols, dtype);
      CrossEntropyOptions options;
      options.ignore_index = cols + 7;
      std::vector<double> mask;
      for (std::int64_t r = 0; r < rows; ++r) {
        const auto row = static_cast<std::size_t>(r);
        mask.push_back(static_cast<double>(r % 3) / 2);
        if (r % 4 == 1) p.target[row] = static_cast<double>(cols + 7);
        p.weight[row] = r % 4 == 1 ? 0 : mask.back();
        if (p.weight[row] == 0) {  // what does not count is not looked at
          const auto target = static_cast<std::int64_t>(p.target[row]);
          p.z[p.at(r, target < cols ? target : r % cols)] = r % 2 == 0 ? std::nan("") : INFINITY;
        }
      }
      options.mask = upload(mask, {rows}, dtype);
      // The problem's NaN cannot be compared with itself.
      Problem clean = p;
      for (double& v : clean.z) v = std::isfinite(v) ? v : 0;
      const Expected want = oracle(clean, p.weight);
      const Tensor logits = upload(p.z, {rows, cols}, dtype);
      const Tensor targets = upload(p.target, {rows}, DType::kI64);
      const Tensor loss =
          ops::cross_entropy_with_gradient(encoder(), logits, targets, options, logits);
      expect_close("masked loss", download(loss), want.loss, DType::kF32, chain(cols));
      expect_close("masked dz", download(logits), want.dz, dtype, chain(cols));
      check(clean, {.dtype = dtype, .targets = DType::kI64, .brief = cols > 300}, options);
    }
  }
  Problem p = random_problem(rows, 300, DType::kF32);
  CrossEntropyOptions options;
  std::vector<double> flags;
  for (std::int64_t r = 0; r < rows; ++r) {
    flags.push_back(static_cast<double>(r % 2));
    p.weight[static_cast<std::size_t>(r)] = flags.back();
  }
  options.mask = upload(flags, {rows}, DType::kBool);
  check(p, {}, options);
}

TEST_P(CrossEntropy, NoRowCounts) {
  Problem p = random_problem(6, 300, DType::kBF16);
  std::fill(p.weight.begin(), p.weight.end(), 0);
  CrossEntropyOptions masked;
  masked.mask = upload(std::vector<double>(6, 0), {6}, DType::kBool);
  check(p, {.dtype = DType::kBF16}, masked);
  std::fill(p.target.begin(), p.target.end(), -100);
  CrossEntropyOptions ignored;
  ignored.ignore_index = -100;
  check(p, {.dtype = DType::kBF16}, ignored);
}

TEST_P(CrossEntropy, SpreadLogits) {
  for (const DType dtype : kTypes) {
    for (const std::int64_t cols : {300, 5000, 40000}) {
      check(random_problem(4, cols, dtype, 1e4),
            {.dtype = dtype, .brief = cols > 5000, .extreme = true});
      check(random_problem(4, cols, dtype, 90), {.dtype = dtype, .brief = cols > 5000});
      // Far from zero, close to each other: nothing may be lost to the offset.
      Problem p = random_problem(3, cols, dtype);
      for (double& v : p.z) v = round_to(dtype, v + 3000);
      check(p, {.dtype = dtype, .brief = cols > 5000});
      // Blocks of their own, and −inf in all but the target's.
      p = random_problem(3, cols, dtype);
      for (std::int64_t r = 0; r < 3; ++r) {
        for (std::int64_t v = 0; v < cols; ++v) {
          double& z = p.z[p.at(r, v)];
          const std::int64_t block = v / 2048;
          if (r == 0) z = round_to(dtype, z + 200.0 * static_cast<double>(block));
          if (r == 1 && v < 100) z = -INFINITY;
          if (r == 2 && v != static_cast<std::int64_t>(p.target[2])) z = -INFINITY;
        }
      }
      p.target[1] = static_cast<double>(cols - 3);
      check(p, {.dtype = dtype, .brief = cols > 5000, .extreme = true});
    }
  }
}

TEST_P(CrossEntropy, WhatIsNoNumber) {
  const double inf = INFINITY, nan = std::nan("");
  const auto run = [&](const std::vector<double>& z, double target, float epsilon = 0) {
    CrossEntropyOptions options;
    options.label_smoothing = epsilon;
    const auto n = static_cast<std::int64_t>(z.size());
    const Tensor dz = encoder().empty({1, n}, DType::kF32);
    const Tensor loss = ops::cross_entropy_with_gradient(
        encoder(), upload(z, {1, n}, DType::kF32), upload({target}, {1}, DType::kI32), options, dz);
    auto all = download(dz);
    all.push_back(download(loss)[0]);
    return all;
  };
  EXPECT_EQ(run({-inf, 3, -inf}, 1), (std::vector<double>{0, 0, 0, 0}));
  EXPECT_EQ(run({-inf, 3}, 0), (std::vector<double>{-1, 1, inf}));
  EXPECT_EQ(run({-inf, 3}, 1, 0.5F).back(), inf);
  for (const std::size_t length : {std::size_t{3}, std::size_t{5000}}) {
    for (std::vector<double> bad : {std::vector<double>{-inf, -inf}, {inf, 1}, {1, nan, 2}}) {
      bad.resize(length, -inf);
      for (const double v : run(bad, 1)) EXPECT_TRUE(std::isnan(v)) << v;
    }
    for (const double outside : {-1.0, static_cast<double>(length), 2e9}) {
      for (const double v : run(std::vector<double>(length, 1), outside)) {
        EXPECT_TRUE(std::isnan(v)) << v;
      }
    }
  }
  // A target outside is its row's matter: the other rows' gradients are as ever.
  Problem p = random_problem(3, 40, DType::kF32);
  const auto want = oracle(p, p.weight);
  p.target[1] = 40;
  const Tensor dz = encoder().empty({3, 40}, DType::kF32);
  const auto loss = download(ops::cross_entropy_with_gradient(
      encoder(), upload(p.z, {3, 40}, DType::kF32), upload(p.target, {3}, DType::kU32), {}, dz));
  EXPECT_TRUE(std::isnan(loss[1]));
  EXPECT_TRUE(std::isfinite(loss[0]) && std::isfinite(loss[2]));
  const auto got = download(dz);
  for (std::size_t i = 0; i < 120; ++i) EXPECT_EQ(std::isnan(got[i]), i / 40 == 1) << i;
}

TEST_P(CrossEntropy, GradientThroughTheTape) {
  Problem p = random_problem(4, 33, DType::kBF16);
  p.epsilon = 0.25;
  p.target[2] = -1;
  p.weight[2] = 0;
  CrossEntropyOptions options;
  options.label_smoothing = 0.25F;
  options.ignore_index = -1;
  const Tensor targets = upload(p.target, {4}, DType::kI32);
  for (const Reduction reduction : {Reduction::kNone, Reduction::kSum, Reduction::kMean}) {
    options.reduction = reduction;
    Tape tape(encoder());
    const Tensor logits = tape.watch(upload(p.z, {4, 33}, DType::kBF16));
    const Tensor loss = ops::cross_entropy(tape, logits, targets, options);
    EXPECT_EQ(tape.nodes(), 1);
    std::vector<double> c = p.weight;
    if (reduction == Reduction::kNone) {
      const std::vector<double> dloss{0.5, -1, 3, 2};
      tape.backward(loss, upload(dloss, {4}, DType::kF32));
      for (std::size_t r = 0; r < 4; ++r) c[r] *= dloss[r];
    } else {
      tape.backward(loss);
      if (reduction == Reduction::kMean) {
        for (double& v : c) v /= 3;
      }
    }
    expect_close("dz", download(tape.grad(logits)), oracle(p, c).dz, DType::kBF16, 33);
  }
  Tape tape(encoder());
  ops::cross_entropy(tape, upload(p.z, {4, 33}, DType::kBF16), targets, options);
  EXPECT_EQ(tape.nodes(), 0) << "nothing tracked, nothing recorded";
}

// mlx.nn.losses.cross_entropy(logits, targets, weights=…, label_smoothing=…, reduction=…), and mx.grad of it. With
// weights its mean divides by the number of rows, ours by the sum of the weights.
TEST_P(CrossEntropy, AsMlx) {
  const std::vector<double> weights{1, 0.5, 2};
  const auto run = [&](bool weighted, float smoothing, Reduction reduction,
                       const std::vector<double>& loss, const std::vector<double>& dz) {
    CrossEntropyOptions o{.label_smoothing = smoothing, .reduction = reduction};
    if (weighted) o.mask = upload(weights, {3}, DType::kF32);
    Tape tape(encoder());
    const Tensor z =
        tape.watch(upload({1, 2, 3, -1, 0, 0, 0, 5, -2, 0.5, 0.25, 1}, {3, 4}, DType::kF32));
    const Tensor y = ops::cross_entropy(tape, z, upload({2, 3, 0}, {3}, DType::kI32), o);
    expect_close("loss", download(y), refs_of(loss, 1), DType::kF32, 4);
    if (dz.empty()) return;
    tape.backward(y);
    expect_close("dz", download(tape.grad(z)), refs_of(dz, 1), DType::kF32, 4);
  };
  run(false, 0, Reduction::kNone, {0.419716656, 0.0200122558, 3.75550413}, {});
  run(false, 0.1F, Reduction::kNone, {0.594716668, 0.395012259, 3.56175399}, {});
  run(true, 0, Reduction::kNone, {0.419716656, 0.0100061279, 7.51100826}, {});
  run(true, 0.2F, Reduction::kNone, {0.76971662, 0.38500613, 6.73600864}, {});
  run(false, 0.1F, Reduction::kMean, {1.51716113},
      {0.0213156044, 0.0722608417, -0.0892556608, -0.00432078633, -0.00613185205, -0.00613185205,
       -0.00613185205, 0.0183955431, -0.300537109, 0.0866440609, 0.0656351373, 0.148257911});
  run(true, 0.2F, Reduction::kSum, {7.89073133},
      {0.0389468111, 0.191782519, -0.192767024, -0.0379623584, -0.0216977783, -0.0216977783,
       -0.0216977783, 0.0650933087, -1.65322268, 0.469864339, 0.343810827, 0.839547455});
  run(true, 0, Reduction::kMean, {2.64691043 * 3 / 3.5}, {});
}

TEST_P(CrossEntropy, RowsOfALoss) {
  const Problem p = random_problem(7, 40, DType::kF32);
  ops::LossRowsOptions options;
  options.targets = upload(p.target, {7}, DType::kI32);
  options.classes = 40;
  options.reduction = Reduction::kMean;
  const ops::LossRows rows = ops::loss_rows(encoder(), 7, options);
  const Tensor losses = encoder().zeros({7}, DType::kF32);
  const Tensor logits = upload(p.z, {7, 40}, DType::kF32);
  const Tensor dz = encoder().zeros({7, 40}, DType::kF32);
  for (const auto& [start, stop] : {std::pair{0, 3}, std::pair{3, 7}}) {
    ops::cross_entropy_rows(encoder(), logits.slice(0, start, stop), rows.slice(start, stop), 0,
                            losses.slice(0, start, stop), dz.slice(0, start, stop));
  }
  const Expected want = oracle(p, std::vector<double>(7, 1.0 / 7));
  expect_close("losses", download(losses), want.loss, DType::kF32, 40);
  expect_close("dz", download(dz), want.dz, DType::kF32, 40);
  EXPECT_THROW(ops::cross_entropy_backward(encoder(), logits, {{}, {}, rows},
                                           upload({1, 2}, {2}, DType::kF32), 0),
               Error);
}

TEST_P(CrossEntropy, SameBitsOnEveryRun) {
  for (const auto& [rows, cols] : {std::pair{scaled(300), 512}, std::pair{std::int64_t{3}, 40000},
                                   std::pair{scaled(40), 9000}}) {
    for (const DType dtype : kTypes) {
      const Problem p = random_problem(rows, cols, dtype);
      const Tensor logits = upload(p.z, {rows, cols}, dtype);
      const Tensor targets = upload(p.target, {rows}, DType::kI32);
      CrossEntropyOptions options;
      options.label_smoothing = 0.1F;
      options.reduction = Reduction::kMean;
      expect_repeatable(encoder(), [&] {
        const Tensor dz = encoder().empty_like(logits);
        const Tensor loss =
            ops::cross_entropy_with_gradient(encoder(), logits, targets, options, dz);
        return std::vector<Tensor>{loss, dz};
      });
    }
  }
}

TEST_P(CrossEntropy, RandomShapes) {
  EXPECT_TRUE(rc::check("cross_entropy matches its oracle", [this] {
    const DType dtype =
        *rc::gen::elementOf(std::vector<DType>(std::begin(kTypes), std::end(kTypes)));
    const std::int64_t rows = *rc::gen::inRange(1, 9), cols = *rc::gen::inRange(1, 400);
    const double epsilon = *rc::gen::elementOf(std::vector<double>{0, 0, 0.5});
    check(random_problem(rows, cols, dtype, 4, epsilon),
          {.dtype = dtype, .strided = *rc::gen::arbitrary<bool>()});
    RC_ASSERT(!HasFailure());
  }));
}

MT_ON_EVERY_BACKEND(CrossEntropy);

}  // namespace
}  // namespace mlxtape::test
