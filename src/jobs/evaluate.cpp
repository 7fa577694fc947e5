#include "mlxtape/jobs/evaluate.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <memory>

#include "head.h"
#include "mlxtape/jobs/engine.h"
#include "mlxtape/ops/cross_entropy.h"
#include "mlxtape/ops/kl_divergence.h"
#include "mlxtape/ops/sort.h"

namespace mlxtape::jobs {

namespace {

[[noreturn]] void wrong(const std::string& what) {
  throw Error(Errc::kArgument, "evaluate: " + what);
}

// Mean and deviation of numbers that come one by one, by Welford's recurrence: the sum of squares is that of small
// differences, whatever the mean.
class Mean {
 public:
  void add(double x) {
    ++count_;
    const double before = x - mean_;
    mean_ += before / static_cast<double>(count_);
    squares_ += before * (x - mean_);
  }
  std::int64_t count() const { return count_; }
  double value() const { return mean_; }
  Estimate estimate() const {
    if (count_ < 2) return {mean_, 0};
    const auto n = static_cast<double>(count_);
    return {mean_, std::sqrt(squares_ / (n - 1) / n)};
  }
  Estimate perplexity() const {
    const double p = std::exp(mean_);
    return {p, p * estimate().error};
  }

 private:
  std::int64_t count_ = 0;
  double mean_ = 0, squares_ = 0;
};

// What a comparison adds to each target's log-probability.
struct Compared {
  std::vector<float> reference_loss, kl;
  std::vector<std::uint32_t> best, reference_best;
};

template <class T>
void append(CommandEncoder& encoder, const Tensor& t, std::vector<T>& values) {
  const std::size_t before = values.size();
  values.resize(before + static_cast<std::size_t>(t.size()));
  encoder.download(t, values.data() + before, t.bytes());
}

// The sequences of a batch: requests that generate nothing. Rows without a target are left out.
std::vector<Request> requests_of(const Batch& batch) {
  std::vector<Request> requests;
  for (std::int64_t r = 0; r < batch.rows; ++r) {
    Request request;
    request.generate = false;
    const auto row = [&](const std::vector<std::int32_t>& of) {
      const auto first = of.begin() + r * batch.length;
      return std::vector<std::int32_t>(first, first + batch.length);
    };
    request.prompt = row(batch.tokens);
    request.targets = row(batch.targets);
    requests.push_back(std::move(request));
  }
  return requests;
}

class Evaluator {
 public:
  Evaluator(CommandEncoder& encoder, const models::Model& model, const models::Model* reference,
            const std::vector<Batch>& batches, std::int64_t score_rows)
      : encoder_(encoder), reference_(reference) {
    EngineOptions how;
    how.score_rows = score_rows;
    for (const Batch& batch : batches) {
      how.slots = std::max(how.slots, batch.rows);
      how.context = std::max(how.context, batch.length);
      how.prefill_chunk = std::max(how.prefill_chunk, batch.rows * batch.length);  // in one step
    }
    if (reference != nullptr) {
      how.on_logits = [this](std::int64_t start, std::int64_t stop, const Tensor& logits) {
        compare(start, stop, logits);
      };
    }
    engine_ = std::make_unique<Engine>(encoder, model, how);
    if (reference == nullptr) return;
    how.on_logits = {};
    how.on_hidden = [this](const Tensor& hidden) {
      hidden_reference_ = hidden;
      return false;
    };
    reference_engine_ = std::make_unique<Engine>(encoder, *reference, how);
  }

  void add(const Batch& batch, std::int64_t number) {
    std::vector<Request> requests = requests_of(batch);
    targets_.clear();
    for (const std::int32_t target : batch.targets) {
      if (target >= 0) targets_.push_back(target);
    }
    compared_ = {};
    hidden_reference_ = {};
    if (reference_ != nullptr) run(*reference_engine_, requests);
    const std::vector<std::vector<Score>> scores = run(*engine_, requests);
    std::size_t at = 0;
    for (std::size_t r = 0; r < scores.size(); ++r) {
      for (const Score& score : scores[r]) {
        add_target(score, at++, {number, static_cast<std::int64_t>(r), score.at});
      }
    }
  }

  Evaluation result() const {
    if (loss_.count() == 0) wrong("there must be a token to score, got none");
    Evaluation e;
    e.tokens = loss_.count();
    e.loss = loss_.value();
    e.perplexity = loss_.perplexity();
    if (reference_ == nullptr) return e;
    e.reference_perplexity = reference_loss_.perplexity();
    e.kl = kl_.estimate();
    e.agreement = agreement_.estimate();
    return e;
  }

 private:
  // All of a batch at once; the scores of each row.
  static std::vector<std::vector<Score>> run(Engine& engine, const std::vector<Request>& requests) {
    std::vector<std::int64_t> slots;
    for (const Request& request : requests) {
      const bool scored = std::any_of(request.targets.begin(), request.targets.end(),
                                      [](std::int32_t target) { return target >= 0; });
      slots.push_back(scored ? engine.admit(request) : -1);
    }
    while (engine.is_busy()) engine.step();
    std::vector<std::vector<Score>> scores;
    for (const std::int64_t slot : slots) {
      scores.push_back(slot < 0 ? std::vector<Score>() : engine.take_scores(slot));
      if (slot >= 0) engine.cancel(slot);
    }
    return scores;
  }

  // Targets [start, stop) of the batch, whose logits are there.
  void compare(std::int64_t start, std::int64_t stop, const Tensor& logits) {
    const std::vector<std::int32_t> some(targets_.begin() + start, targets_.begin() + stop);
    const Tensor theirs =
        head_logits(encoder_, *reference_, hidden_reference_.slice(0, start, stop));
    const Tensor targets = upload_ints(encoder_, some);
    append(encoder_, ops::cross_entropy(encoder_, theirs, targets), compared_.reference_loss);
    append(encoder_, ops::kl_divergence(encoder_, logits, theirs), compared_.kl);
    append(encoder_, ops::argmax(encoder_, logits, -1), compared_.best);
    append(encoder_, ops::argmax(encoder_, theirs, -1), compared_.reference_best);
  }

  struct Place {
    std::int64_t batch, row, token;
  };

  // The batch's target of this number.
  void add_target(const Score& score, std::size_t number, Place where) {
    add_finite(loss_, -score.logprob, "the loss", where);
    if (reference_ == nullptr) return;
    add_finite(reference_loss_, compared_.reference_loss[number], "the reference's loss", where);
    add_finite(kl_, compared_.kl[number], "the divergence", where);
    agreement_.add(compared_.best[number] == compared_.reference_best[number] ? 1 : 0);
  }

  static void add_finite(Mean& mean, float value, const char* what, Place where) {
    if (!std::isfinite(value)) {
      throw NotFinite("evaluate: " + std::string(what) + " must be finite, got " +
                      text_of_nonfinite(static_cast<double>(value)) + " in batch " +
                      std::to_string(where.batch) + ", row " + std::to_string(where.row) +
                      ", token " + std::to_string(where.token));
    }
    mean.add(static_cast<double>(value));
  }

  CommandEncoder& encoder_;
  const models::Model* reference_;
  std::unique_ptr<Engine> engine_, reference_engine_;
  std::vector<std::int32_t> targets_;  // of the batch, those that count
  Tensor hidden_reference_;            // at them
  Compared compared_;
  Mean loss_, reference_loss_, kl_, agreement_;
};

void check(const models::Model& model, const models::Model* reference,
           const std::vector<Batch>& batches, const EvaluateOptions& options) {
  if (batches.empty()) wrong("there must be at least one batch, got none");
  if (options.chunk_rows < 0) {
    wrong("chunk_rows must be at least 0, got " + std::to_string(options.chunk_rows));
  }
  if (reference != nullptr && reference->config.plan.vocabulary != model.config.plan.vocabulary) {
    wrong("the reference must have the model's vocabulary of " +
          std::to_string(model.config.plan.vocabulary) + ", got " +
          std::to_string(reference->config.plan.vocabulary));
  }
  for (const Batch& batch : batches) check_batch("evaluate", model, batch);
}

}  // namespace

std::vector<Batch> rows_of_length(const std::vector<Sample>& samples, std::int64_t length,
                                  std::int64_t batch_size, std::int64_t most) {
  if (length < 2) wrong("rows must have at least 2 tokens, got " + std::to_string(length));
  if (batch_size < 1) wrong("batch_size must be at least 1, got " + std::to_string(batch_size));
  std::vector<std::int32_t> all;
  for (const Sample& sample : samples) {
    all.insert(all.end(), sample.tokens.begin(), sample.tokens.end());
  }
  std::int64_t rows = static_cast<std::int64_t>(all.size()) / length;
  if (rows == 0) {
    wrong("the samples must have at least the " + std::to_string(length) +
          " tokens of one row, got " + std::to_string(all.size()));
  }
  if (most > 0) rows = std::min(rows, most);
  std::vector<Batch> batches;
  for (std::int64_t first = 0; first < rows; first += batch_size) {
    Batch batch;
    batch.rows = std::min(batch_size, rows - first);
    batch.length = length - 1;
    batch.counted = batch.rows * batch.length;
    for (std::int64_t r = first; r < first + batch.rows; ++r) {
      const auto row = all.begin() + r * length;
      batch.tokens.insert(batch.tokens.end(), row, row + length - 1);
      batch.targets.insert(batch.targets.end(), row + 1, row + length);
    }
    batches.push_back(std::move(batch));
  }
  return batches;
}

Evaluation evaluate(CommandEncoder& encoder, const models::Model& model,
                    const models::Model* reference, const std::vector<Batch>& batches,
                    const EvaluateOptions& options) {
  check(model, reference, batches, options);
  const auto start = std::chrono::steady_clock::now();
  MemoryPool& memory = encoder.device().memory();
  memory.reset_peak();
  Evaluator evaluator(encoder, model, reference, batches, options.chunk_rows);
  bool stopped = false;
  for (std::size_t b = 0; b < batches.size() && !stopped; ++b) {
    evaluator.add(batches[b], static_cast<std::int64_t>(b));
    if (options.progress) {
      options.progress(static_cast<std::int64_t>(b) + 1, static_cast<std::int64_t>(batches.size()));
    }
    stopped = b + 1 < batches.size() && options.stop && options.stop();
  }
  Evaluation result = evaluator.result();
  result.stopped = stopped;
  result.peak_bytes = memory.stats().peak;
  result.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  return result;
}

}  // namespace mlxtape::jobs
