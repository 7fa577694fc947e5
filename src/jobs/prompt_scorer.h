// PromptScorer: log-probabilities of given tokens after each position of some prompts, from what the head takes. Some rows
// of logits exist at a time, on the device; the host gets one number per position, and the most likely tokens where wanted.
#pragma once

#include <vector>

#include "mlxtape/jobs/engine.h"

namespace mlxtape::jobs {

// One position to score.
struct ScoredRow {
  std::int64_t slot = 0;
  std::int64_t row = 0;  // of the hidden states
  std::int64_t at = 0;   // position in the slot's prompt
  std::int32_t token = 0;
};

class PromptScorer {
 public:
  PromptScorer(CommandEncoder& encoder, const models::Model& model, const EngineOptions& options);
  // hidden: [rows, width]. The scores in the order of `wanted`; none if options.on_hidden said so.
  std::vector<Score> score(const Tensor& hidden, const std::vector<ScoredRow>& wanted) const;

 private:
  Tensor rows_of(const Tensor& hidden, const std::vector<ScoredRow>& wanted) const;

  CommandEncoder& encoder_;
  const models::Model& model_;
  const EngineOptions& options_;
};

}  // namespace mlxtape::jobs
