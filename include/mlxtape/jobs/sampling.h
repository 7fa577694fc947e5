// How a token is chosen from a row of logits: the op's settings for one row (mlxtape/ops/sample.h), and a bias for some tokens.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "mlxtape/ops/sample.h"

namespace mlxtape::jobs {

struct SamplingOptions : ops::SampleRow {
  std::vector<std::pair<std::int32_t, float>> logit_bias = {};  // of tokens; added to their logits
};

Check sampling_check(const SamplingOptions& options);

}  // namespace mlxtape::jobs
