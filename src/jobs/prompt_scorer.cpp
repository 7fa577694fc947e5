#include "prompt_scorer.h"

#include <algorithm>
#include <array>

#include "head.h"
#include "mlxtape/ops/cross_entropy.h"
#include "mlxtape/ops/take.h"
#include "slot_sampler.h"

namespace mlxtape::jobs {

namespace {

// Settings of `count` rows that only want to know what is most likely.
ops::SampleRows plain_rows(CommandEncoder& encoder, std::int64_t count) {
  std::array<float, ops::kSampleNumbers> numbers{};
  std::array<std::int32_t, ops::kSampleWhole> whole{};
  ops::put_sample_row({}, numbers, whole);
  std::vector<float> all_numbers;
  std::vector<std::int32_t> all_whole;
  for (std::int64_t r = 0; r < count; ++r) {
    all_numbers.insert(all_numbers.end(), numbers.begin(), numbers.end());
    all_whole.insert(all_whole.end(), whole.begin(), whole.end());
  }
  ops::SampleRows rows;
  rows.numbers = encoder.empty({count, ops::kSampleNumbers}, DType::kF32);
  encoder.upload(all_numbers.data(), rows.numbers.bytes(), rows.numbers);
  rows.whole = encoder.empty({count, ops::kSampleWhole}, DType::kI32);
  encoder.upload(all_whole.data(), rows.whole.bytes(), rows.whole);
  rows.history = encoder.zeros({count, 1}, DType::kI32);
  rows.lengths = encoder.zeros({count}, DType::kI32);
  return rows;
}

// Of one chunk of rows, on their way to the host.
struct Pending {
  Fetched<float> losses;
  Fetched<std::int32_t> top_ids;
  Fetched<float> top_logprobs;
};

}  // namespace

PromptScorer::PromptScorer(CommandEncoder& encoder, const models::Model& model,
                           const EngineOptions& options)
    : encoder_(encoder), model_(model), options_(options) {}

// The wanted rows alone: the head is the largest matrix of many models, and a row that nobody asked for costs as much.
Tensor PromptScorer::rows_of(const Tensor& hidden, const std::vector<ScoredRow>& wanted) const {
  if (std::ssize(wanted) == hidden.dim(0)) return hidden;
  std::vector<std::int32_t> rows;
  for (const ScoredRow& one : wanted) rows.push_back(static_cast<std::int32_t>(one.row));
  return ops::take(encoder_, hidden, upload_ints(encoder_, rows), 0);
}

std::vector<Score> PromptScorer::score(const Tensor& hidden,
                                       const std::vector<ScoredRow>& wanted) const {
  const auto count = std::ssize(wanted);
  if (count == 0) return {};
  const Tensor rows = rows_of(hidden, wanted);
  if (options_.on_hidden && !options_.on_hidden(rows)) return {};
  std::vector<std::int32_t> tokens;
  for (const ScoredRow& one : wanted) tokens.push_back(one.token);
  const Tensor targets = upload_ints(encoder_, tokens);
  const std::int64_t each = chunk_of(encoder_, model_, options_.score_rows);
  std::vector<Pending> chunks;
  for (std::int64_t start = 0; start < count; start += each) {
    const std::int64_t stop = std::min(count, start + each);
    const Tensor logits = head_logits(encoder_, model_, rows.slice(0, start, stop));
    const Tensor losses = ops::cross_entropy(encoder_, logits, targets.slice(0, start, stop));
    ops::Sampled best;
    if (options_.logprobs) {
      best = ops::sample(encoder_, logits, plain_rows(encoder_, stop - start), {true, true, false});
    }
    chunks.push_back({{encoder_, losses}, {encoder_, best.top_ids}, {encoder_, best.top_logprobs}});
    if (options_.on_logits) options_.on_logits(start, stop, logits);
  }
  std::vector<Score> scores;
  for (Pending& chunk : chunks) {
    const std::vector<float> losses = chunk.losses.wait(), top = chunk.top_logprobs.wait();
    const std::vector<std::int32_t> ids = chunk.top_ids.wait();
    for (std::size_t r = 0; r < losses.size(); ++r) {
      const ScoredRow& of = wanted[scores.size()];
      scores.push_back({of.at, of.token, -losses[r], top_of(ids, top, r)});
    }
  }
  return scores;
}

}  // namespace mlxtape::jobs
