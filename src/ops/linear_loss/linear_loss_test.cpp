#include "mlxtape/ops/linear_loss.h"

#include <cmath>

#include "mlxtape/ops/matmul.h"
#include "support/nan.h"
#include "support/op_test.h"

namespace mlxtape::test {
namespace {

using ops::CrossEntropyOptions;
using ops::KlDivergenceOptions;
using ops::KlTeacher;
using ops::LinearLossOptions;
using ops::LinearTeacher;
using ops::Reduction;

// Numbers whose products and sums are exact in 16 bits: what is stored as logits is what they are.
std::vector<double> coarse_values(Noise& noise, std::int64_t n) {
  std::vector<double> values;
  for (std::int64_t i = 0; i < n; ++i) {
    values.push_back(static_cast<double>(noise.below(5) - 2) / 2);
  }
  return values;
}

// hidden [T, D], weight [V, D]; what rows count; the teacher's distribution or the targets as p [T, V].
struct Problem {
  std::int64_t rows, width, classes;
  std::vector<double> hidden, weight, counts, p;
  double epsilon = 0;

  std::vector<double> logits(const std::vector<double>& h, const std::vector<double>& w,
                             std::int64_t d) const {
    std::vector<double> z(static_cast<std::size_t>(rows * classes));
    for (std::int64_t t = 0; t < rows; ++t) {
      for (std::int64_t v = 0; v < classes; ++v) {
        double sum = 0;
        for (std::int64_t i = 0; i < d; ++i) {
          sum += h[static_cast<std::size_t>(t * d + i)] * w[static_cast<std::size_t>(v * d + i)];
        }
        z[static_cast<std::size_t>(t * classes + v)] = sum;
      }
    }
    return z;
  }
};

struct Expected {
  Ref loss{0, 0};
  Refs dhidden, dweight;
};

std::vector<double> softmax(const double* z, std::int64_t n) {
  double m = -INFINITY, sum = 0;
  for (std::int64_t v = 0; v < n; ++v) m = std::max(m, z[v]);
  std::vector<double> shares;
  for (std::int64_t v = 0; v < n; ++v) sum += shares.emplace_back(std::exp(z[v] - m));
  for (double& s : shares) s /= sum;
  return shares;
}

// loss = scale·Σ_t w·Σ_v p·(log p − log q), with log p left out where it is constant; both losses are this: a
// target is a p of one 1. dloss = factor.
Expected oracle(const Problem& x, double scale, double factor, bool entropy) {
  const auto at = [](std::int64_t i) {
    return static_cast<std::size_t>(i);
  };
  const std::vector<double> z = x.logits(x.hidden, x.weight, x.width);
  Expected e{{0, 0}, Refs(x.hidden.size(), {0, 0}), Refs(x.weight.size(), {0, 0})};
  for (std::int64_t t = 0; t < x.rows; ++t) {
    const double w = x.counts[at(t)];
    if (w == 0) continue;
    const auto q = softmax(z.data() + t * x.classes, x.classes);
    for (std::int64_t v = 0; v < x.classes; ++v) {
      const double p = x.p[at(t * x.classes + v)];
      const double log_q = std::log(q[at(v)]);
      const double log_p = entropy && p > 0 ? std::log(p) : 0;
      e.loss.value += scale * w * p * (log_p - log_q);
      e.loss.scale += scale * w * (p * (1 - log_q + std::abs(log_p)) + q[at(v)]);
      const double c = factor * scale * w;
      const double dz = c * (q[at(v)] - p);
      // dz is rounded to the stored type, and the sums once more, then dloss comes in.
      const double size = 4 * std::abs(c) * (q[at(v)] + p);
      for (std::int64_t i = 0; i < x.width; ++i) {
        const double h = x.hidden[at(t * x.width + i)], wt = x.weight[at(v * x.width + i)];
        e.dhidden[at(t * x.width + i)].value += dz * wt;
        e.dhidden[at(t * x.width + i)].scale += size * std::abs(wt);
        e.dweight[at(v * x.width + i)].value += dz * h;
        e.dweight[at(v * x.width + i)].scale += size * std::abs(h);
      }
    }
  }
  return e;
}

struct Targets {
  Problem problem;
  std::vector<double> target;
};

Targets random_targets(std::int64_t rows, std::int64_t width, std::int64_t classes,
                       double epsilon = 0) {
  Noise noise(static_cast<std::uint64_t>(rows + 31 * classes));
  Targets t{{rows, width, classes, coarse_values(noise, rows * width),
             coarse_values(noise, classes * width),
             std::vector<double>(static_cast<std::size_t>(rows), 1),
             std::vector<double>(static_cast<std::size_t>(rows * classes),
                                 epsilon / static_cast<double>(classes)),
             epsilon},
            {}};
  for (std::int64_t r = 0; r < rows; ++r) {
    const std::int64_t target = noise.below(classes);
    t.target.push_back(static_cast<double>(target));
    t.problem.p[static_cast<std::size_t>(r * classes + target)] += 1 - epsilon;
  }
  return t;
}

TEST(LinearLossOracle, GradientMatchesCentralDifference) {
  for (const bool entropy : {false, true}) {
    Problem x = random_targets(3, 4, 5, 0.25).problem;
    x.counts = {1, 0, 2};
    const auto loss = [&](const Arrays& at) {
      Problem moved = x;
      moved.hidden = at[0];
      moved.weight = at[1];
      return 3 * oracle(moved, 0.5, 1, entropy).loss.value;
    };
    const Expected e = oracle(x, 0.5, 3, entropy);
    std::vector<double> dhidden, dweight;
    for (const Ref& r : e.dhidden) dhidden.push_back(r.value);
    for (const Ref& r : e.dweight) dweight.push_back(r.value);
    expect_gradient(loss, {x.hidden, x.weight}, {dhidden, dweight});
  }
}

TEST(LinearLossCheck, SaysWhatIsWrong) {
  const auto h = Tensor::meta({4, 3}), w = Tensor::meta({9, 3});
  const auto t = Tensor::meta({4}, DType::kI32);
  CrossEntropyOptions mean;
  mean.reduction = Reduction::kMean;
  KlDivergenceOptions kl;
  kl.reduction = Reduction::kSum;
  const auto fwd = [&](const Tensor& hidden, const Tensor& weight) {
    return ops::linear_cross_entropy_check(hidden, weight, t, mean);
  };
  const auto how = [&](LinearLossOptions options) {
    return ops::linear_cross_entropy_check(h, w, t, mean, options);
  };
  const auto student = [&](const LinearTeacher& teacher) {
    return ops::linear_kl_divergence_check(h, w, teacher, kl);
  };
  expect_refused({
      {"rank 0", fwd(Tensor::meta({}), w), Errc::kShape, "got [] and [9, 3]"},
      {"weight of rank 1", fwd(h, Tensor::meta({3})), Errc::kShape, "got [4, 3] and [3]"},
      {"two widths", fwd(h, Tensor::meta({9, 4})), Errc::kShape, "got [4, 3] and [9, 4]"},
      {"no classes", fwd(h, Tensor::meta({0, 3})), Errc::kShape, "V of at least 1"},
      {"integers", fwd(Tensor::meta({4, 3}, DType::kI32), w), Errc::kDType, "got i32 and f32"},
      {"two types", fwd(h, Tensor::meta({9, 3}, DType::kF16)), Errc::kDType, "got f32 and f16"},
      {"two devices", fwd(h, Tensor::meta({9, 3}, DType::kF32, Backend::kMetal)), Errc::kDevice,
       "weight must be where hidden is (cpu), got metal"},
      {"a loss a row", ops::linear_cross_entropy_check(h, w, t, {}), Errc::kArgument,
       "sum or mean, got none"},
      {"a negative chunk", how({.chunk_rows = -1}), Errc::kArgument, "at least 0, got -1"},
      {"f32 of 16-bit sums", how({.f32_sums = false, .f32_dweight = true}), Errc::kArgument,
       "with f32_sums"},
      {"too few targets",
       ops::linear_cross_entropy_check(h, w, Tensor::meta({3}, DType::kI32), mean), Errc::kShape,
       "targets"},
      {"kl: two widths", ops::linear_kl_divergence_check(h, Tensor::meta({9, 4}), KlTeacher(h), kl),
       Errc::kShape, "got [4, 3] and [9, 4]"},
      {"kl: a loss a row", ops::linear_kl_divergence_check(h, w, KlTeacher(h), {}), Errc::kArgument,
       "sum or mean"},
      {"a teacher of other logits", student(KlTeacher(h)), Errc::kShape, "teacher must have"},
      {"a teacher of two widths", student({Tensor::meta({4, 5}), w}), Errc::kShape,
       "the teacher's hidden and weight"},
      {"a teacher of other classes", student({Tensor::meta({4, 5}), Tensor::meta({8, 5})}),
       Errc::kShape, "teacher must have the shape"},
  });
  EXPECT_FALSE(fwd(Tensor::meta({2, 2, 3}), w));
  EXPECT_FALSE(student({Tensor::meta({4, 5}, DType::kF16), Tensor::meta({9, 5}, DType::kF16)}));
}

class LinearLoss : public OnDevice {
 protected:
  // Loss and gradients, without and with a tape, by run(tape or encoder, hidden, weight).
  template <class Run, class WithGradient>
  void check(const Problem& x, DType dtype, double scale, bool entropy, LinearLossOptions how,
             const Run& run, const WithGradient& with_gradient) {
    const Tensor hidden = upload(x.hidden, {x.rows, x.width}, dtype);
    const Tensor weight = upload(x.weight, {x.classes, x.width}, dtype);
    const Expected want = oracle(x, scale, 1, entropy);
    const std::int64_t terms = x.classes + x.rows;
    const std::string at = to_string(Shape{x.rows, x.width, x.classes}) + " " + name_of(dtype);
    const auto close = [&](const char* what, const Tensor& got, const Refs& refs, DType type) {
      EXPECT_EQ(count_wrong(download(got), refs, type, terms), 0) << what << " " << at;
    };
    close("loss", run(encoder(), hidden, weight), {want.loss}, DType::kF32);

    const ops::LinearLoss out = with_gradient(hidden, weight, ops::LinearLossWanted{});
    EXPECT_EQ(out.loss.rank(), 0);
    close("loss with gradient", out.loss, {want.loss}, DType::kF32);
    close("dhidden", out.dhidden, want.dhidden, dtype);
    close("dweight", out.dweight, want.dweight, dtype);
    EXPECT_EQ(out.dweight.dtype(), how.f32_sums ? DType::kF32 : dtype);
    const ops::LinearLoss half = with_gradient(hidden, weight, {.dhidden = true, .dweight = false});
    EXPECT_EQ(bits_of(encoder(), half.dhidden), bits_of(encoder(), out.dhidden));
    EXPECT_FALSE(half.dweight.defined());
    const ops::LinearLoss rest = with_gradient(hidden, weight, {.dhidden = false, .dweight = true});
    EXPECT_EQ(bits_of(encoder(), rest.dweight), bits_of(encoder(), out.dweight));
    EXPECT_FALSE(rest.dhidden.defined());

    Tape tape(encoder());
    const Tensor h = tape.watch(hidden), w = tape.watch(weight, DType::kF32);
    const Tensor loss = run(tape, h, w);
    EXPECT_EQ(tape.nodes(), 1);
    tape.backward(loss, encoder().full({}, DType::kF32, -3));
    const Expected back = oracle(x, scale, -3, entropy);
    close("dhidden on a tape", tape.grad(h), back.dhidden, dtype);
    close("dweight on a tape", tape.grad(w), back.dweight, dtype);
  }

  void check_cross_entropy(const Targets& t, DType dtype, CrossEntropyOptions options,
                           LinearLossOptions how = {}) {
    options.label_smoothing = static_cast<float>(t.problem.epsilon);
    const Tensor targets = upload(t.target, {t.problem.rows}, DType::kI32);
    double counts = 0;
    for (const double w : t.problem.counts) counts += w;
    for (const Reduction reduction : {Reduction::kSum, Reduction::kMean}) {
      options.reduction = reduction;
      const double scale = reduction == Reduction::kSum ? 1 : counts == 0 ? 0 : 1 / counts;
      check(
          t.problem, dtype, scale, false, how,
          [&](auto& on, const Tensor& h, const Tensor& w) {
            return ops::linear_cross_entropy(on, h, w, targets, options, how);
          },
          [&](const Tensor& h, const Tensor& w, ops::LinearLossWanted wanted) {
            return ops::linear_cross_entropy_with_gradient(encoder(), h, w, targets, options, how,
                                                           wanted);
          });
    }
  }
};

constexpr DType kTypes[] = {DType::kF32, DType::kF16, DType::kBF16};

TEST_P(LinearLoss, CrossEntropyMatchesOracle) {
  for (const DType dtype : kTypes) {
    for (const std::int64_t chunk : {0, 1, 3, 7, 128}) {
      for (const std::int64_t rows : {1, 2, 7, 13}) {
        check_cross_entropy(random_targets(rows, 6, 40), dtype, {}, {.chunk_rows = chunk});
      }
    }
    check_cross_entropy(random_targets(9, 8, 333, 0.25), dtype, {}, {.chunk_rows = 4});
    check_cross_entropy(random_targets(9, 8, 1), dtype, {}, {.chunk_rows = 4});
    check_cross_entropy(random_targets(9, 7, 64), dtype, {}, {.f32_sums = false, .chunk_rows = 4});
    check_cross_entropy(random_targets(9, 7, 64), dtype, {},
                        {.f32_dweight = true, .chunk_rows = 4});
  }
  // Rows that do not fit one chunk of any device.
  check_cross_entropy(random_targets(scaled(300), 4, 5000), DType::kBF16, {});
}

TEST_P(LinearLoss, RowsThatDoNotCount) {
  for (const DType dtype : kTypes) {
    Targets t = random_targets(8, 6, 40);
    t.problem.counts = {1, 0, 0.5, 1, 0, 0, 2, 1};
    t.target[4] = t.target[5] = -100;
    CrossEntropyOptions options;
    options.ignore_index = -100;
    options.mask = upload({1, 0, 0.5, 1, 1, 1, 2, 1}, {8}, DType::kF32);
    check_cross_entropy(t, dtype, options, {.chunk_rows = 3});
    std::fill(t.problem.counts.begin(), t.problem.counts.end(), 0);
    options.mask = upload(std::vector<double>(8), {8}, DType::kBool);
    check_cross_entropy(t, dtype, options, {.chunk_rows = 3});
  }
  CrossEntropyOptions mean;
  mean.reduction = Reduction::kMean;
  const ops::LinearLoss none = ops::linear_cross_entropy_with_gradient(
      encoder(), upload({}, {0, 3}, DType::kF32), upload({1, 2, 3}, {1, 3}, DType::kF32),
      upload({}, {0}, DType::kI64), mean);
  EXPECT_EQ(download(none.loss), std::vector<double>{0});
  EXPECT_EQ(download(none.dweight), (std::vector<double>{0, 0, 0}));
  EXPECT_EQ(none.dhidden.shape(), (Shape{0, 3}));
}

TEST_P(LinearLoss, KlDivergenceMatchesOracle) {
  for (const DType dtype : kTypes) {
    for (const std::int64_t chunk : {0, 3}) {
      Problem x = random_targets(7, 6, 40).problem;
      x.counts = {1, 0, 0.5, 1, 2, 1, 1};
      Noise noise(11);
      const std::int64_t own = 5;  // the teacher's width
      const auto teacher_hidden = coarse_values(noise, x.rows * own);
      const auto teacher_weight = coarse_values(noise, x.classes * own);
      const auto z = x.logits(teacher_hidden, teacher_weight, own);
      std::vector<double> values, indices, top(x.p.size(), 0);
      for (std::int64_t r = 0; r < x.rows; ++r) {
        const double* row = z.data() + r * x.classes;
        const auto p = softmax(row, x.classes);
        std::copy(p.begin(), p.end(), x.p.begin() + r * x.classes);
        for (const std::int64_t v : {39, 0, 17}) {
          values.push_back(row[v]);
          indices.push_back(static_cast<double>(v));
        }
        const auto of_three = softmax(values.data() + 3 * r, 3);
        for (std::size_t j = 0; j < 3; ++j) {
          top[static_cast<std::size_t>(r * x.classes) +
              static_cast<std::size_t>(indices[static_cast<std::size_t>(3 * r) + j])] = of_three[j];
        }
      }
      Problem stored = x;
      stored.p = top;
      const LinearTeacher full(KlTeacher(upload(z, {7, 40}, dtype)));
      const LinearTeacher projected(upload(teacher_hidden, {7, own}, DType::kF32),
                                    upload(teacher_weight, {40, own}, DType::kF32));
      const LinearTeacher three(
          KlTeacher(upload(values, {7, 3}, dtype), upload(indices, {7, 3}, DType::kU32)));
      KlDivergenceOptions options;
      options.mask = upload(x.counts, {7}, DType::kF32);
      for (const auto& [problem, teacher] :
           {std::pair<const Problem*, const LinearTeacher*>{&x, &full},
            {&x, &projected},
            {&stored, &three}}) {
        for (const Reduction reduction : {Reduction::kSum, Reduction::kMean}) {
          options.reduction = reduction;
          const LinearLossOptions how{.chunk_rows = chunk};
          const LinearTeacher& from = *teacher;
          check(
              *problem, dtype, reduction == Reduction::kSum ? 1 : 1 / 6.5, true, how,
              [&](auto& on, const Tensor& h, const Tensor& w) {
                return ops::linear_kl_divergence(on, h, w, from, options, how);
              },
              [&](const Tensor& h, const Tensor& w, ops::LinearLossWanted wanted) {
                return ops::linear_kl_divergence_with_gradient(encoder(), h, w, from, options, how,
                                                               wanted);
              });
        }
      }
    }
  }
}

TEST_P(LinearLoss, ViewsAndLeadingAxes) {
  const Targets t = random_targets(6, 5, 30);
  const Expected want = oracle(t.problem, 1.0 / 6, 1, false);
  CrossEntropyOptions mean;
  mean.reduction = Reduction::kMean;
  const ops::LinearLoss out = ops::linear_cross_entropy_with_gradient(
      encoder(), upload_strided(t.problem.hidden, {2, 3, 5}, DType::kF32),
      upload_strided(t.problem.weight, {30, 5}, DType::kF32),
      upload_strided(t.target, {2, 3}, DType::kI64), mean, {.chunk_rows = 4});
  EXPECT_EQ(out.dhidden.shape(), (Shape{2, 3, 5}));
  expect_close("loss", download(out.loss), {want.loss}, DType::kF32, 36);
  expect_close("dhidden", download(out.dhidden), want.dhidden, DType::kF32, 36);
  expect_close("dweight", download(out.dweight), want.dweight, DType::kF32, 36);
}

TEST_P(LinearLoss, NothingTrackedNothingMade) {
  const Targets t = random_targets(6, 5, 30);
  CrossEntropyOptions mean;
  mean.reduction = Reduction::kMean;
  Tape tape(encoder());
  const Tensor h = upload(t.problem.hidden, {6, 5}, DType::kF32);
  const Tensor w = upload(t.problem.weight, {30, 5}, DType::kF32);
  const Tensor targets = upload(t.target, {6}, DType::kI32);
  ops::linear_cross_entropy(tape, h, w, targets, mean);
  EXPECT_EQ(tape.nodes(), 0);
  // One of the two alone.
  const Tensor watched = tape.watch(w);
  tape.backward(ops::linear_cross_entropy(tape, h, watched, targets, mean));
  const Expected want = oracle(t.problem, 1.0 / 6, 1, false);
  expect_close("dweight", download(tape.grad(watched)), want.dweight, DType::kF32, 36);
}

TEST_P(LinearLoss, SameBitsOnEveryRun) {
  const Targets t = random_targets(50, 24, 700);
  CrossEntropyOptions mean;
  mean.reduction = Reduction::kMean;
  const Tensor h = upload(t.problem.hidden, {50, 24}, DType::kBF16);
  const Tensor w = upload(t.problem.weight, {700, 24}, DType::kBF16);
  const Tensor targets = upload(t.target, {50}, DType::kI32);
  expect_repeatable(encoder(), [&] {
    const ops::LinearLoss out =
        ops::linear_cross_entropy_with_gradient(encoder(), h, w, targets, mean, {.chunk_rows = 20});
    return std::vector<Tensor>{out.loss, out.dhidden, out.dweight};
  });
}

TEST_P(LinearLoss, NaNReachesTheLossAndItsRow) {
  const Targets t = random_targets(5, 6, 40);
  std::vector<double> hidden = t.problem.hidden;
  hidden[2 * 6 + 1] = NAN;
  CrossEntropyOptions sum;
  sum.reduction = Reduction::kSum;
  for (const DType dtype : kTypes) {
    const ops::LinearLoss out = ops::linear_cross_entropy_with_gradient(
        encoder(), upload(hidden, {5, 6}, dtype), upload(t.problem.weight, {40, 6}, dtype),
        upload(t.target, {5}, DType::kI32), sum, {.chunk_rows = 2});
    EXPECT_EQ(nans_of(download(out.loss)), places(0, 1));
    EXPECT_EQ(nans_of(download(out.dhidden)), places(12, 6));
    EXPECT_EQ(nans_of(download(out.dweight)), places(0, 240));
  }
}

MT_ON_EVERY_BACKEND(LinearLoss);

}  // namespace
}  // namespace mlxtape::test
