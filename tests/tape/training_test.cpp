// Whole trainings: against the same one in double, to a loss that is known beforehand, on every backend alike,
// and as one captured step.
#include <cmath>
#include <random>

#include "cases/small_model.h"
#include "mlxtape/core/arena.h"
#include "mlxtape/ops/elementwise.h"
#include "mlxtape/ops/matmul.h"
#include "mlxtape/ops/optimiser.h"
#include "mlxtape/ops/reduce.h"
#include "support/op_test.h"

namespace mlxtape::test {
namespace {

using bench::SmallModel;
using bench::SmallModelConfig;
using Values = std::vector<double>;

class Training : public OnDevice {};

// ---- two layers, and the same in double ----

constexpr std::int64_t kBatch = 64, kInputs = 8, kHidden = 32;
constexpr float kRate = 0.05F, kMomentum = 0.9F;
constexpr int kSteps = 600;

struct Mlp {
  Values w1, b1, w2, b2;  // [inputs, hidden], [hidden], [hidden, 1], [1]
};

Mlp first_weights() {
  std::mt19937 bits(7);
  std::normal_distribution<double> normal;
  const auto some = [&](std::int64_t n, double spread) {
    Values v(static_cast<std::size_t>(n));
    for (double& x : v) x = static_cast<float>(spread * normal(bits));
    return v;
  };
  return {some(kInputs * kHidden, 0.35), some(kHidden, 0.1), some(kHidden, 0.18), some(1, 0)};
}

// What is to be learnt: y = sin(2·x₀) + x₁·x₂.
void examples(Values& x, Values& y) {
  std::mt19937 bits(8);
  std::normal_distribution<double> normal;
  x.resize(kBatch * kInputs);
  y.resize(kBatch);
  for (double& v : x) v = static_cast<float>(normal(bits));
  for (std::size_t i = 0; i < y.size(); ++i) {
    const double* row = &x[i * kInputs];
    y[i] = static_cast<float>(std::sin(2 * row[0]) + row[1] * row[2]);
  }
}

// The curve in double. round: every number that a kernel would store is rounded to f32; how far that curve is
// from the exact one is what roundings do to this training.
Values curve_in_double(bool round) {
  const auto kept = [&](double v) {
    return round ? static_cast<float>(v) : v;
  };
  Values x, y;
  examples(x, y);
  Mlp w = first_weights();
  Mlp v{Values(w.w1.size()), Values(w.b1.size()), Values(w.w2.size()), Values(1)};
  Values losses;
  for (int step = 0; step < kSteps; ++step) {
    Mlp g{Values(w.w1.size()), Values(w.b1.size()), Values(w.w2.size()), Values(1)};
    double loss = 0;
    for (std::size_t i = 0; i < kBatch; ++i) {
      Values z(kHidden), h(kHidden);
      double out = w.b2[0];
      for (std::size_t j = 0; j < kHidden; ++j) {
        z[j] = w.b1[j];
        for (std::size_t k = 0; k < kInputs; ++k) {
          z[j] += x[i * kInputs + k] * w.w1[k * kHidden + j];
        }
        z[j] = kept(z[j]);
        h[j] = kept(z[j] / (1 + std::exp(-z[j])));
        out += h[j] * w.w2[j];
      }
      const double off = kept(kept(out) - y[i]);
      loss += kept(off * off) / kBatch;
      const double dout = kept(2 * off / kBatch);
      g.b2[0] += dout;
      for (std::size_t j = 0; j < kHidden; ++j) {
        const double s = 1 / (1 + std::exp(-z[j]));
        const double dz = kept(kept(dout * w.w2[j]) * s * (1 + z[j] * (1 - s)));
        g.w2[j] += dout * h[j];
        g.b1[j] += dz;
        for (std::size_t k = 0; k < kInputs; ++k) {
          g.w1[k * kHidden + j] += dz * x[i * kInputs + k];
        }
      }
    }
    losses.push_back(kept(loss));
    const auto update = [&](Values& p, Values& speed, const Values& grad) {
      for (std::size_t i = 0; i < p.size(); ++i) {
        speed[i] = kept(kMomentum * speed[i] + kept(grad[i]));
        p[i] = kept(p[i] - kRate * speed[i]);
      }
    };
    update(w.w1, v.w1, g.w1);
    update(w.b1, v.b1, g.b1);
    update(w.w2, v.w2, g.w2);
    update(w.b2, v.b2, g.b2);
  }
  return losses;
}

TEST_P(Training, TwoLayersFollowTheSameTrainingInDouble) {
  const Values exact = curve_in_double(false);
  const Values rounded = curve_in_double(true);
  Values x, y;
  examples(x, y);
  const Mlp first = first_weights();
  const Tensor inputs = upload(x, {kBatch, kInputs}, DType::kF32);
  const Tensor targets = upload(y, {kBatch, 1}, DType::kF32);
  const std::vector<Tensor> weights = {
      upload(first.w1, {kInputs, kHidden}, DType::kF32), upload(first.b1, {kHidden}, DType::kF32),
      upload(first.w2, {kHidden, 1}, DType::kF32), upload(first.b2, {1}, DType::kF32)};
  std::vector<Tensor> speeds;
  for (const Tensor& w : weights) speeds.push_back(encoder().zeros(w.shape(), DType::kF32));
  const Tensor rate = encoder().full({1}, DType::kF32, kRate);
  const Tensor t = encoder().zeros({1}, DType::kI32);

  double apart = 0, limit = 0;
  for (int step = 0; step < kSteps; ++step) {
    Tape tape(encoder());
    std::vector<Tensor> w;
    for (const Tensor& each : weights) w.push_back(tape.watch(each));
    const Tensor h =
        ops::matmul(tape, inputs, w[0], {.bias = w[1], .activation = ops::Activation::kSilu});
    const Tensor out = ops::matmul(tape, h, w[2], {.bias = w[3]});
    const Tensor loss = ops::mean(tape, ops::square(tape, ops::subtract(tape, out, targets)));
    tape.backward(loss);
    std::vector<ops::SgdSlot> slots;
    for (std::size_t i = 0; i < w.size(); ++i) {
      slots.push_back({weights[i], tape.grad(w[i]), speeds[i]});
    }
    ops::advance(encoder(), t);
    ops::sgd_step(encoder(), slots, {rate, t}, {.momentum = kMomentum});

    const auto at = static_cast<std::size_t>(step);
    // Roundings of another order: 16 times what the largest difference so far was, or 16 of its own.
    limit = std::max(limit, 16 * std::max(std::abs(rounded[at] - exact[at]), exact[at] * 0x1p-24));
    apart = std::abs(download(loss)[0] - exact[at]);
    ASSERT_LE(apart, limit) << "step " << step << ", loss " << exact[at];
  }
  EXPECT_GT(exact.front(), 1);
  EXPECT_LT(exact.back(), 0.02);
}

// ---- a language model ----

// Each pair of tokens has a favourite to follow, with 7 of 10, and three others with 1 of 10 each: no model can
// have a lower loss than the entropy of that.
class Source {
 public:
  static constexpr std::uint32_t kVocab = 16;
  static double entropy() { return -(0.7 * std::log(0.7) + 0.3 * std::log(0.1)); }

  // [batch, length] tokens and what follows each.
  void batch(CommandEncoder& encoder, std::int64_t rows, std::int64_t length, Tensor& ids,
             Tensor& targets) {
    std::vector<std::int32_t> now, next;
    for (std::int64_t r = 0; r < rows; ++r) {
      std::uint32_t before = bits_() % kVocab, last = bits_() % kVocab;
      for (std::int64_t t = 0; t < length; ++t) {
        const std::uint32_t roll = bits_() % 10;
        const std::uint32_t follows = (before * 5 + last * 3 + (roll < 7 ? 0 : roll - 6)) % kVocab;
        now.push_back(static_cast<std::int32_t>(last));
        next.push_back(static_cast<std::int32_t>(follows));
        before = last;
        last = follows;
      }
    }
    const Shape shape{rows, length};
    if (!ids.defined()) ids = encoder.empty(shape, DType::kI32);
    if (!targets.defined()) targets = encoder.empty(shape, DType::kI32);
    encoder.upload(now.data(), now.size() * 4, ids);
    encoder.upload(next.data(), next.size() * 4, targets);
  }

 private:
  std::mt19937 bits_{99};
};

Values train(CommandEncoder& encoder, int steps, const SmallModelConfig& config) {
  SmallModel model(encoder, config, 1);
  Source source;
  Values losses;
  Tensor ids, targets;
  for (int i = 0; i < steps; ++i) {
    source.batch(encoder, 16, 32, ids, targets);
    float loss = 0;
    encoder.download(model.step(ids, targets), &loss, sizeof loss);
    losses.push_back(loss);
  }
  return losses;
}

double mean_of_last(const Values& v, std::size_t n) {
  double sum = 0;
  for (std::size_t i = v.size() - n; i < v.size(); ++i) sum += v[i];
  return sum / static_cast<double>(n);
}

TEST_P(Training, ALanguageModelComesNearTheEntropyOfItsSource) {
  const int steps = 300;
  const SmallModelConfig config{.rate = 3e-3F};
  const Values losses = train(encoder(), steps, config);
  EXPECT_GT(losses[0], std::log(Source::kVocab));
  const double reached = mean_of_last(losses, 20);
  EXPECT_GT(reached, 0.97 * Source::entropy());  // less would have seen what follows
  EXPECT_LT(reached, 1.15 * Source::entropy());
  if (GetParam() == Backend::kCpu) return;

  // The CPU's curve, and one that starts a rounding away: how much a rounding matters.
  const auto cpu = Device::find(Backend::kCpu).make_encoder();
  const Values want = train(*cpu, steps, config);
  SmallModelConfig nudged = config;
  nudged.nudge = 0x1p-23;
  const Values beside = train(*cpu, steps, nudged);
  double limit = 0;
  for (std::size_t i = 0; i < want.size(); ++i) {
    limit = std::max(limit, 16 * std::max(std::abs(beside[i] - want[i]), want[i] * 0x1p-23));
    ASSERT_LE(std::abs(losses[i] - want[i]), limit) << "step " << i;
  }
}

TEST_P(Training, SixteenBitsWithMastersLearnAsWell) {
  const Values losses = train(encoder(), 250, {.dtype = DType::kBF16, .rate = 3e-3F});
  EXPECT_LT(mean_of_last(losses, 20), 1.2 * Source::entropy());
}

// Along its gradient g, the loss must rise by g·g: by less where any part of g is lost on the way.
TEST_P(Training, TheGradientOfTheModelIsItsSlope) {
  const SmallModel model(encoder(), {}, 1);
  Source source;
  Tensor ids, targets;
  source.batch(encoder(), 4, 8, ids, targets);
  Tape tape(encoder());
  std::vector<Tensor> watched;
  for (const Tensor& w : model.weights()) watched.push_back(tape.watch(w));
  const Tensor loss = model.loss(tape, watched, ids, targets);
  tape.backward(loss);
  std::vector<Values> gradients;
  double slope = 0;
  for (const Tensor& w : watched) {
    gradients.push_back(download(tape.grad(w)));
    for (const double g : gradients.back()) slope += g * g;
  }
  const auto loss_at = [&](double step) {
    std::vector<Tensor> moved;
    for (std::size_t i = 0; i < watched.size(); ++i) {
      Values w = download(watched[i]);
      for (std::size_t k = 0; k < w.size(); ++k) w[k] += step * gradients[i][k];
      moved.push_back(upload(w, watched[i].shape(), DType::kF32));
    }
    Tape other(encoder());
    return download(model.loss(other, moved, ids, targets))[0];
  };
  const double h = 0.02 / slope;  // the loss moves by about 0.02
  const double coarse = (loss_at(h) - loss_at(-h)) / (2 * h);
  const double fine = (loss_at(h / 2) - loss_at(-h / 2)) / h;
  const double roundings = 64 * 0x1p-24 * download(loss)[0] / h;
  EXPECT_NEAR(fine, slope, 2 * std::abs(coarse - fine) + roundings);
}

// ---- the step as a whole ----

TEST_P(Training, AStepIsCapturedOnceAndReplayed) {
  encoder().device().memory().set_guarded(false);  // guarded memory is never planned
  const SmallModelConfig config{.layers = 3, .rate = 3e-3F};
  const int noted = 2, replayed = 5;
  SmallModel eager(encoder(), config, 1), captured(encoder(), config, 1);
  Source source, same_source;
  Tensor ids, targets;
  Values losses;
  for (int i = 0; i < noted + replayed; ++i) {
    source.batch(encoder(), 8, 16, ids, targets);
    losses.push_back(download(eager.step(ids, targets))[0]);
  }

  Arena arena(encoder().device().memory());
  Tensor my_ids, my_targets;
  for (int i = 0; i < noted; ++i) {
    same_source.batch(encoder(), 8, 16, my_ids, my_targets);
    const Arena::Step step(arena);
    EXPECT_EQ(download(captured.step(my_ids, my_targets))[0], losses[static_cast<std::size_t>(i)]);
  }
  EXPECT_EQ(arena.stats().misses, 0U);
  const Tensor loss = encoder().empty({}, DType::kF32);
  std::unique_ptr<Graph> graph;
  {
    const Arena::Step step(arena);
    encoder().begin_capture();
    encoder().copy(captured.step(my_ids, my_targets), loss);
    graph = encoder().end_capture();
  }
  EXPECT_EQ(arena.stats().misses, 0U);
  const auto before = encoder().device().memory().stats();
  for (int i = noted; i < noted + replayed; ++i) {
    same_source.batch(encoder(), 8, 16, my_ids, my_targets);
    encoder().replay(*graph);
    EXPECT_EQ(download(loss)[0], losses[static_cast<std::size_t>(i)]) << "step " << i;
  }
  EXPECT_EQ(encoder().device().memory().stats().allocations, before.allocations);
  for (std::size_t i = 0; i < eager.weights().size(); ++i) {
    EXPECT_EQ(bits_of(encoder(), captured.weights()[i]), bits_of(encoder(), eager.weights()[i]))
        << "weight " << i;
  }
}

MT_ON_EVERY_BACKEND(Training);

}  // namespace
}  // namespace mlxtape::test
