// Sampler: the next token from a row of logits, as mlx-lm's samplers choose it.
//
// Formula    of every token among the last repetition_context: z ← z·penalty where z < 0, else z/penalty
//            p = softmax(z); then, each where it is on, tokens are left out:
//            top_p: those whose more likely ones have at least top_p together; min_p: p < min_p·max p;
//            top_k: all but the k most likely
//            temperature 0: the most likely; else drawn with weights p^(1/temperature). Equal ones: the lower id first.
// Random     one number in [0, 1) for each draw, from the seed, the sequence's number and the draw's alone, on any device.
//            The logits have the same bits on any number of threads, but not on other devices or instruction sets: there a
//            draw near the border of two tokens may go the other way, and the text with it.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "mlxtape/base/error.h"

namespace mlxtape::jobs {

struct SamplingOptions {
  double temperature = 0;
  double top_p = 1;        // above 0; off at 1
  double min_p = 0;        // off at 0
  std::int64_t top_k = 0;  // off at 0
  double repetition_penalty = 1;
  std::int64_t repetition_context = 20;
  std::uint64_t seed = 0;
};

Check sampling_check(const SamplingOptions& options);

class Sampler {
 public:
  explicit Sampler(const SamplingOptions& options, std::uint64_t sequence = 0);

  // logits may be changed. before: the tokens so far, for the penalty. Logits that are all NaN or -inf, or any +inf:
  // NotFinite.
  std::int32_t operator()(std::span<float> logits, std::span<const std::int32_t> before);

 private:
  struct Candidate {
    float z;
    std::int32_t token;
  };
  void penalise(std::span<float> logits, std::span<const std::int32_t> before) const;
  void gather(std::span<const float> logits, float most);
  std::int32_t draw();

  SamplingOptions options_;
  std::uint64_t sequence_, draws_ = 0;
  std::vector<Candidate> candidates_;  // most likely first
};

}  // namespace mlxtape::jobs
