// How a token is sampled from a row of logits: the op's settings for a row (mlxtape/ops/sample.h), and biases for tokens.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "mlxtape/ops/sample.h"

namespace mlxtape::jobs {

struct SamplingOptions : ops::SampleRow {
  std::vector<std::pair<std::int32_t, float>> logit_bias = {};  // by token; added to its logit
};

Check sampling_check(const SamplingOptions& options);

}  // namespace mlxtape::jobs
