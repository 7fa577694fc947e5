// evaluate: how well a model predicts text data, and how close it is to a reference model.
//
//   const auto rows = rows_of_length(read_samples(file, tokenizer), 512);
//   const Evaluation e = evaluate(*encoder, quantised, &model, rows); // or every_batch (jobs/dataset.h): samples, padded
//
// Formula    over the N targets that count, z a model's logits, p = softmax(z):
//            l = −log p[target];  perplexity = exp(mean l), its error perplexity·std(l)/√N, as mlx-lm has it
//            kl = Σ_v p_ref[v]·(log p_ref[v] − log p[v]);  agreement: how often both have the same largest logit, of equal
//            ones the first. Errors of means: std/√N. std has N − 1 in its denominator; of one target it is 0.
// Types      logits are of the model's type, each target's numbers f32, the sums over targets double
// How        each batch is scored by an Engine (jobs/engine.h): its rows are prompts that generate nothing, side by side in one
//            step. A reference has an engine of its own, which stops at the hidden states; its logits are made piece by piece
//            beside the model's, because the divergence needs whole rows of both at once.
// Memory     hidden states of one batch; logits of some of its targets at a time, the reference's beside them
// Errors     kArgument: no target that counts, another vocabulary than the reference's; kIo: a token outside the vocabulary;
//            NotFinite: a loss that is not finite (says where)
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "mlxtape/jobs/dataset.h"
#include "mlxtape/jobs/not_finite.h"
#include "mlxtape/models/model.h"

namespace mlxtape::jobs {

// All samples joined and cut into rows of length tokens, as in mlx-lm's perplexity; a remainder is dropped.
// A row predicts length − 1 tokens. most: maximum number of rows; 0: all. Throws kArgument if there is no full row.
std::vector<Batch> rows_of_length(const std::vector<Sample>& samples, std::int64_t length = 512,
                                  std::int64_t batch_size = 8, std::int64_t most = 0);

struct Estimate {
  double value = 0, error = 0;
};

struct Evaluation {
  std::int64_t tokens = 0;  // N
  double loss = 0;          // mean l
  Estimate perplexity;
  // With a reference:
  Estimate reference_perplexity, kl, agreement;
  bool stopped = false;  // the numbers cover only the batches so far
  double seconds = 0;
  std::size_t peak_bytes = 0;
};

struct EvaluateOptions {
  std::int64_t chunk_rows = 0;  // logits of so many targets at a time; 0: as many as are quick
  std::function<void(std::int64_t done, std::int64_t all)> progress;  // batches
  std::function<bool()> stop;  // called after each batch: true stops
};

// reference: null, or a model on the same device.
Evaluation evaluate(CommandEncoder& encoder, const models::Model& model,
                    const models::Model* reference, const std::vector<Batch>& batches,
                    const EvaluateOptions& options = {});

}  // namespace mlxtape::jobs
