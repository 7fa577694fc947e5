// What the tests of fit share: something small to train.
#pragma once

#include <map>
#include <memory>
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

  // How many tokens a batch has: so many shapes come in turns.
  std::int64_t shapes = 1;

  jobs::Staged stage(std::int64_t batch) const {
    const std::int64_t tokens = kTokens + batch % shapes;
    std::mt19937 bits(static_cast<unsigned>(batch));
    std::vector<std::int32_t> ids(static_cast<std::size_t>(tokens)), next(ids.size());
    for (std::size_t i = 0; i < ids.size(); ++i) {
      ids[i] = static_cast<std::int32_t>(bits() % 10);  // the last two are never there
      next[i] = (ids[i] * 7 + 3) % 12;
    }
    given_->ids = upload_to("ids", ids);
    given_->next = upload_to("next", next);
    return {std::to_string(tokens), tokens};
  }
  Recorded record(Tape& tape) const {
    Recorded result;
    for (const Trainable& t : trainables) result.watched.push_back(tape.watch(t.tensor));
    const Tensor h = ops::embedding(tape, result.watched[0], given_->ids);
    const Tensor mixed = ops::add(tape, h, ops::matmul(tape, h, result.watched[1]));
    result.loss = ops::cross_entropy(tape, ops::matmul(tape, mixed, result.watched[2]),
                                     given_->next, {.reduction = ops::Reduction::kMean});
    return result;
  }
  Recorded record_batch(Tape& tape, std::int64_t batch) const {
    stage(batch);
    return record(tape);
  }
  jobs::Objective objective() const {
    return {[this](std::int64_t batch) { return stage(batch); },
            [this](Tape& tape) {
              return record(tape);
            }};
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
    encoder_.download(record_batch(tape, 1000).loss, &loss, sizeof loss);
    return static_cast<double>(loss);
  }
  std::vector<std::vector<unsigned char>> bits() const {
    std::vector<std::vector<unsigned char>> all;
    for (const Trainable& t : trainables) all.push_back(bits_of(encoder_, t.tensor));
    return all;
  }

  std::vector<Trainable> trainables;

 private:
  struct Given {
    Tensor ids, next;
  };
  // Batches of one shape share a tensor, as a captured step asks for.
  Tensor upload_to(const std::string& name, const std::vector<std::int32_t>& values) const {
    Tensor& t = (*tensors_)[name + " " + std::to_string(values.size())];
    if (!t.defined()) t = encoder_.empty({std::ssize(values)}, DType::kI32);
    encoder_.upload(values.data(), values.size() * 4, t);
    return t;
  }
  CommandEncoder& encoder_;
  std::shared_ptr<Given> given_ = std::make_shared<Given>();  // the batch staged last
  std::shared_ptr<std::map<std::string, Tensor>> tensors_ =
      std::make_shared<std::map<std::string, Tensor>>();
};

// An objective whose record uploads what it needs, and so cannot be captured.
inline jobs::Objective uncaptured(std::function<Recorded(Tape& tape, std::int64_t batch)> record) {
  const auto staged = std::make_shared<std::int64_t>();
  return {[staged](std::int64_t batch) {
            *staged = batch;
            return jobs::Staged{"", 1};
          },
          [staged, record = std::move(record)](Tape& tape) {
            return record(tape, *staged);
          }};
}

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
    o.capture = false;
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
