#include "mlxtape/jobs/sampling.h"

#include <cmath>
#include <string>

namespace mlxtape::jobs {

Check sampling_check(const SamplingOptions& options) {
  if (const Check check = ops::sample_row_check(options)) return check;
  if (std::ssize(options.logit_bias) > ops::kSampleMostBiases) {
    return Error(Errc::kArgument, "sampling: logit_bias must be of at most " +
                                      std::to_string(ops::kSampleMostBiases) + " tokens, got " +
                                      std::to_string(options.logit_bias.size()));
  }
  for (const auto& [token, bias] : options.logit_bias) {
    if (token < 0 || std::isnan(bias)) {
      return Error(Errc::kArgument, "sampling: logit_bias must be numbers by tokens, got " +
                                        std::to_string(bias) + " of token " +
                                        std::to_string(token));
    }
  }
  return std::nullopt;
}

}  // namespace mlxtape::jobs
