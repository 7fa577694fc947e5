#include "mlxtape/jobs/evaluate.h"

#include <algorithm>
#include <chrono>
#include <cmath>

#include "head.h"
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

// A row's numbers, as they come from the device.
struct RowNumbers {
  std::vector<float> loss, reference_loss, kl;
  std::vector<std::uint32_t> best, reference_best;
};

template <class T>
std::vector<T> host_copy(CommandEncoder& encoder, const Tensor& t) {
  std::vector<T> values(static_cast<std::size_t>(t.size()));
  encoder.download(t, values.data(), t.bytes());
  return values;
}

class Evaluator {
 public:
  Evaluator(CommandEncoder& encoder, const models::Model& model, const models::Model* reference,
            std::int64_t chunk)
      : encoder_(encoder), model_(model), reference_(reference), chunk_(chunk) {}

  void add(const Batch& batch, std::int64_t number) {
    const Tensor tokens = upload_tokens(encoder_, batch);
    Tensor hidden_reference;
    if (reference_ != nullptr) hidden_reference = hidden_rows(encoder_, *reference_, tokens);
    const Tensor hidden = hidden_rows(encoder_, model_, tokens);
    const Tensor targets = upload_ints(encoder_, batch.targets);
    for (std::int64_t start = 0; start < hidden.dim(0); start += chunk_) {
      const std::int64_t stop = std::min(hidden.dim(0), start + chunk_);
      const auto some = [&](const Tensor& t) {
        return t.defined() ? t.slice(0, start, stop) : t;
      };
      const RowNumbers rows = numbers_of(some(hidden), some(hidden_reference), some(targets));
      for (std::int64_t r = start; r < stop; ++r) {
        if (batch.targets[static_cast<std::size_t>(r)] < 0) continue;
        add_row(rows, static_cast<std::size_t>(r - start),
                {number, r / batch.length, r % batch.length});
      }
    }
  }

  Evaluation result() const {
    if (loss_.count() == 0) wrong("there must be a target that counts, got none");
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
  RowNumbers numbers_of(const Tensor& hidden, const Tensor& hidden_reference,
                        const Tensor& targets) {
    ops::CrossEntropyOptions how;
    how.ignore_index = -1;
    RowNumbers rows;
    const Tensor logits = head_logits(encoder_, model_, hidden);
    rows.loss = host_copy<float>(encoder_, ops::cross_entropy(encoder_, logits, targets, how));
    if (reference_ == nullptr) return rows;
    const Tensor theirs = head_logits(encoder_, *reference_, hidden_reference);
    rows.reference_loss =
        host_copy<float>(encoder_, ops::cross_entropy(encoder_, theirs, targets, how));
    rows.kl = host_copy<float>(encoder_, ops::kl_divergence(encoder_, logits, theirs));
    rows.best = host_copy<std::uint32_t>(encoder_, ops::argmax(encoder_, logits, -1));
    rows.reference_best = host_copy<std::uint32_t>(encoder_, ops::argmax(encoder_, theirs, -1));
    return rows;
  }

  struct Place {
    std::int64_t batch, row, token;
  };

  void add_row(const RowNumbers& rows, std::size_t r, Place where) {
    add_finite(loss_, rows.loss[r], "the loss", where);
    if (reference_ == nullptr) return;
    add_finite(reference_loss_, rows.reference_loss[r], "the reference's loss", where);
    add_finite(kl_, rows.kl[r], "the divergence", where);
    agreement_.add(rows.best[r] == rows.reference_best[r] ? 1 : 0);
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
  const models::Model& model_;
  const models::Model* reference_;
  std::int64_t chunk_;
  Mean loss_, reference_loss_, kl_, agreement_;
};

void check(const models::Model& model, const models::Model* reference,
           const std::vector<Batch>& batches, const EvaluateOptions& options) {
  if (batches.empty()) wrong("there must be a batch");
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
  if (length < 2) wrong("rows must be of at least 2 tokens, got " + std::to_string(length));
  if (batch_size < 1) wrong("batch_size must be at least 1, got " + std::to_string(batch_size));
  std::vector<std::int32_t> all;
  for (const Sample& sample : samples) {
    all.insert(all.end(), sample.tokens.begin(), sample.tokens.end());
  }
  std::int64_t rows = static_cast<std::int64_t>(all.size()) / length;
  if (rows == 0) {
    wrong("the samples must have at least a row's " + std::to_string(length) + " tokens, got " +
          std::to_string(all.size()));
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
  Evaluator evaluator(encoder, model, reference, chunk_of(encoder, model, options.chunk_rows));
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
