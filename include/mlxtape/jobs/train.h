// train: trains every weight of a model on text data, from scratch (models::random_model) or from a loaded model.
//
//   models::Model model = models::random_model(config, *encoder, DType::kBF16, seed);
//   const TrainResult result = train(*encoder, model, read_data("data", tokenizer), options);
//   models::save_model(model, "out");
//
// Trained    all floats of the model, updated in place: weights, norms, and the scales and biases of quantised weights; codes
//            stay as they are.
// Loss       mean cross-entropy of a batch's targets (models::loss). The validation loss is the mean over all counted targets
//            of its batches, whatever their sizes.
// Result     with a validation, the model holds the weights with the lowest validation loss, possibly the initial ones, also
//            after a stop; otherwise those of the last step. The checkpoint on disk is always that of the last step.
#pragma once

#include "mlxtape/jobs/dataset.h"
#include "mlxtape/jobs/fit.h"
#include "mlxtape/models/model.h"

namespace mlxtape::jobs {

struct DeviceBatch {
  Tensor tokens, targets;  // [rows, length] i32
};
DeviceBatch to_device(CommandEncoder& encoder, const Batch& batch);

// Throws kIo for the first token outside a vocabulary of this size: the tokenizer belongs to another model.
void check_tokens(const std::vector<Sample>& samples, std::int64_t vocabulary);

// Every sample, but at most this many batches, spread over all lengths; -1: all. None if no target counts.
std::vector<Batch> validation_batches(const std::vector<Sample>& samples,
                                      const BatchOptions& options, std::int64_t most);

// The mean cross-entropy over all counted targets; there must be at least one.
double mean_loss(CommandEncoder& encoder, const models::Model& model,
                 const std::vector<Batch>& batches);

// The defaults of train: AdamW with bias correction and a weight decay of 0.01, gradients clipped to a norm of 1, mlx-lm's
// learning rate and numbers of steps. A model from scratch needs a higher rate.
inline constexpr double kRateFromScratch = 1e-3;
OptimiserNumbers train_usual();  // for any optimiser (make_optimiser)
FitOptions train_fit();

struct TrainOptions {
  FitOptions fit =
      train_fit();  // the model's config, the data and checkpoint are added to its fingerprint
  BatchOptions batches;
  bool checkpoint = false;  // activation checkpointing: recompute layers in the backward pass
  std::int64_t validation_batches = 25;  // at most; -1: all, 0: no validation
  // The validation loss, instead of the mean loss over data.valid.
  std::function<double()> validate = {};
};

struct TrainResult {
  FitResult fit;  // the model holds the weights of fit.held_step
};

// The trained part of a model, and how it is watched on a tape.
struct TrainedPart {
  std::vector<Trainable> trainables;  // of the model: updated in place
  // Uploads whatever else differs between batches, besides tokens and targets (Objective::stage).
  std::function<void(std::int64_t batch)> stage = {};
  // The model with these watched, and the watched tensors in the order of the trainables.
  std::function<models::Model(Tape& tape)> watch;
  std::function<std::vector<Tensor>(const models::Model& watched)> watched;
  std::function<void(std::int64_t step)> with_state = {};  // as FitTask's
};
// As train, but for one part. Settings of the part belong in options.fit.fingerprint.
TrainResult train_part(CommandEncoder& encoder, const models::Model& model, const TrainedPart& part,
                       const DataSet& data, const TrainOptions& options,
                       const FitHooks& hooks = {});

TrainResult train(CommandEncoder& encoder, const models::Model& model, const DataSet& data,
                  const TrainOptions& options, const FitHooks& hooks = {});

}  // namespace mlxtape::jobs
