// train: every weight of a model learns from texts: from scratch (models::random_model) or on from a loaded one.
//
//   models::Model model = models::random_model(config, *encoder, DType::kBF16, seed);
//   const TrainResult result = train(*encoder, model, read_data("data", tokenizer), options);
//   models::save_model(model, "out");
//
// Trained    the floats of the model, written in place: weights, norms, of packed weights scales and biases; codes stay.
// Loss       mean cross entropy of a batch's targets (models::loss). The validation's is the mean over all counted targets of
//            its batches, whatever their sizes.
// Result     where there was a validation the model holds the weights of its lowest loss, the first one's before any step
//            among them, also after a stop; else those of the last step. The state on the disk is always that of the last.
#pragma once

#include "mlxtape/jobs/dataset.h"
#include "mlxtape/jobs/fit.h"
#include "mlxtape/models/model.h"

namespace mlxtape::jobs {

struct DeviceBatch {
  Tensor tokens, targets;  // [rows, length] i32
};
DeviceBatch to_device(CommandEncoder& encoder, const Batch& batch);

// Throws kIo for the first token that is not in a vocabulary of this size: the tokenizer is another model's.
void check_tokens(const std::vector<Sample>& samples, std::int64_t vocabulary);

// Every sample, but at most so many batches, evenly over all lengths; -1: all. None where nothing in them counts.
std::vector<Batch> validation_batches(const std::vector<Sample>& samples,
                                      const BatchOptions& options, std::int64_t most);

// The mean cross entropy over all counted targets; there must be one.
double mean_loss(CommandEncoder& encoder, const models::Model& model,
                 const std::vector<Batch>& batches);

// What train takes where nothing else is asked for: AdamW with bias correction and a decay of 0.01, gradients clipped to a norm
// of 1, mlx-lm's rate and numbers of steps. A model from scratch wants a higher rate.
inline constexpr double kRateFromScratch = 1e-3;
OptimiserNumbers train_usual();  // of any optimiser (make_optimiser)
FitOptions train_fit();

struct TrainOptions {
  FitOptions fit =
      train_fit();  // to its fingerprint are added the model's config, the data and checkpoint
  BatchOptions batches;
  bool checkpoint = false;  // layers are computed again on the way back instead of remembered
  std::int64_t validation_batches = 25;  // at most so many; -1: all, 0: no validation
  // The loss that counts, in place of the mean one over data.valid.
  std::function<double()> validate = {};
};

struct TrainResult {
  FitResult fit;  // the model holds the weights of fit.held_step
};

// The part of a model that is trained, and how it is watched on a tape.
struct TrainedPart {
  std::vector<Trainable> trainables;  // of the model: written in place
  // Uploads what else differs from batch to batch, besides tokens and targets (Objective::stage).
  std::function<void(std::int64_t batch)> stage = {};
  // The model with these watched, and the watched ones in the order of the trainables.
  std::function<models::Model(Tape& tape)> watch;
  std::function<std::vector<Tensor>(const models::Model& watched)> watched;
  std::function<void(std::int64_t step)> with_state = {};  // as FitTask's
};
// As train, of a part alone. Settings of the part's own belong into options.fit.fingerprint.
TrainResult train_part(CommandEncoder& encoder, const models::Model& model, const TrainedPart& part,
                       const DataSet& data, const TrainOptions& options,
                       const FitHooks& hooks = {});

TrainResult train(CommandEncoder& encoder, const models::Model& model, const DataSet& data,
                  const TrainOptions& options, const FitHooks& hooks = {});

}  // namespace mlxtape::jobs
