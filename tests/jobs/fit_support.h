// What the tests of fit share: something small to train.
#pragma once

#include <random>

#include "formats/support.h"
#include "mlxtape/jobs/fit.h"
#include "mlxtape/ops/cross_entropy.h"
#include "mlxtape/ops/elementwise.h"
#include "mlxtape/ops/embedding.h"
#include "mlxtape/ops/matmul.h"
#include "support/op_test.h"

namespace mlxtape::test {

using formats::TempFolder;
using jobs::FitHooks;
using jobs::FitOptions;
using jobs::FitPoint;
using jobs::FitResult;
using jobs::Recorded;
using jobs::Trainable;
using Values = std::vector<double>;

// An embedding, whose gradient is one of rows, and two products; what follows each token is drawn from the number of the
// batch.
class Toy {
 public:
  static constexpr std::int64_t kVocabulary = 12, kWidth = 8, kTokens = 6;

  Toy(CommandEncoder& encoder, DType dtype) : encoder_(encoder) {
    std::mt19937 bits(3);
    const auto add = [&](const char* name, Shape shape) {
      std::vector<float> values(static_cast<std::size_t>(*element_count(shape)));
      for (float& v : values) v = static_cast<float>(bits() % 2001) / 1000 - 1;
      const Tensor t = encoder.empty(shape, dtype);
      std::vector<std::byte> stored(t.bytes());
      convert(values.data(), DType::kF32, stored.data(), dtype, values.size());
      encoder.upload(stored.data(), stored.size(), t);
      trainables.push_back({name, t});
    };
    add("embedding", {kVocabulary, kWidth});
    trainables[0].is_matrix = false;
    add("mix", {kWidth, kWidth});
    add("head", {kWidth, kVocabulary});
  }

  Recorded record(Tape& tape, std::int64_t batch) const {
    std::mt19937 bits(static_cast<unsigned>(batch));
    std::vector<std::int32_t> ids(kTokens), next(kTokens);
    for (std::size_t i = 0; i < ids.size(); ++i) {
      ids[i] = static_cast<std::int32_t>(bits() % 10);  // the last two are never there
      next[i] = (ids[i] * 7 + 3) % 12;
    }
    Recorded result;
    result.tokens = kTokens;
    for (const Trainable& t : trainables) result.watched.push_back(tape.watch(t.tensor));
    const Tensor h = ops::embedding(tape, result.watched[0], on_device(ids));
    const Tensor mixed = ops::add(tape, h, ops::matmul(tape, h, result.watched[1]));
    result.loss = ops::cross_entropy(tape, ops::matmul(tape, mixed, result.watched[2]),
                                     on_device(next), {.reduction = ops::Reduction::kMean});
    return result;
  }
  jobs::Objective objective() const {
    return [this](Tape& tape, std::int64_t batch) {
      return record(tape, batch);
    };
  }
  jobs::FitTask task() const {
    jobs::FitTask task{trainables, objective()};
    task.validate = [this] {
      return validation();
    };
    return task;
  }
  // The loss of one batch that is never trained on.
  double validation() const {
    Tape tape(encoder_);
    float loss = 0;
    encoder_.download(record(tape, 1000).loss, &loss, sizeof loss);
    return static_cast<double>(loss);
  }
  std::vector<std::vector<unsigned char>> bits() const {
    std::vector<std::vector<unsigned char>> all;
    for (const Trainable& t : trainables) all.push_back(bits_of(encoder_, t.tensor));
    return all;
  }

  std::vector<Trainable> trainables;

 private:
  Tensor on_device(const std::vector<std::int32_t>& values) const {
    const Tensor t = encoder_.empty({kTokens}, DType::kI32);
    encoder_.upload(values.data(), values.size() * 4, t);
    return t;
  }
  CommandEncoder& encoder_;
};

// AdamW as the tests of fit have it, but for what is given.
inline jobs::OptimiserPtr adamw(const jobs::OptimiserNumbers& given) {
  return jobs::make_optimiser("adamw", given, {{"bias_correction", 1}});
}

inline void expect_same(const FitResult& a, const FitResult& b) {
  EXPECT_EQ(a.steps, b.steps);
  EXPECT_EQ(a.best_step, b.best_step);
  EXPECT_EQ(a.best_loss, b.best_loss);
  const auto expect_points = [](const std::vector<FitPoint>& x, const std::vector<FitPoint>& y) {
    ASSERT_EQ(x.size(), y.size());
    for (std::size_t i = 0; i < x.size(); ++i) {
      EXPECT_EQ(x[i].step, y[i].step);
      EXPECT_EQ(x[i].loss, y[i].loss);
      EXPECT_EQ(x[i].rate, y[i].rate);
      EXPECT_EQ(x[i].norm, y[i].norm);
    }
  };
  expect_points(a.reports, b.reports);
  expect_points(a.validations, b.validations);
}

class FitTest : public OnDevice {
 protected:
  FitOptions options(std::int64_t iterations = 8) const {
    FitOptions o;
    o.iterations = iterations;
    o.learning_rate = 0.05;
    o.warmup = 2;
    o.cosine = true;
    o.clip = 0.7;
    o.optimiser = adamw({});
    o.report_every = 3;
    o.validate_every = 2;
    o.save_every = 2;
    o.fingerprint = {{"data", "toy"}};
    return o;
  }
  FitOptions in_folder(const std::string& name, std::int64_t iterations = 8) const {
    FitOptions o = options(iterations);
    o.folder = folder_ / name;
    o.resume = true;
    return o;
  }
  FitResult run(const Toy& toy, const FitOptions& o, const FitHooks& hooks = {}) {
    return jobs::fit(encoder(), toy.task(), o, hooks);
  }
  // Stopped after k of its steps and resumed: as `want` and `whole`, which were not.
  void expect_resumable(DType dtype, const FitOptions& parts, std::int64_t k, const Toy& whole,
                        const FitResult& want);
  // Killed so many times at moments that are drawn, and resumed: as one that was not. On the CPU alone.
  void expect_survives_kills(FitOptions o, int kills);
  TempFolder folder_;
};

}  // namespace mlxtape::test
