// lora: adapters beside a model's weights learn from texts; the weights, plain or packed, stay as they are.
//
//   models::Model model = models::load_model("base", *encoder);
//   LoraJobOptions options;
//   options.train.fit.folder = "adapters";
//   lora(*encoder, model, read_data("data", tokenizer), options);
//
// Trained    the adapters (mlxtape/models/lora.h), in f32: new ones, or those that the model has already, on from where they
//            are. Loss, validation and the best are train's.
// Files      in options.train.fit.folder, if given: fit's state and best; at every save adapters.safetensors and
//            adapter_config.json of that step, which mlx-lm reads, and every save_every steps 0000100_adapters.safetensors and
//            so on. At the end adapters.safetensors is what the model holds: the best where there was a validation.
// State      belongs to a run with the same settings and the same base: its config, and the first numbers of every
//            weight. Adapters that the model had before a run count as new where the run is resumed: the state's are taken.
// Cost       beside the base: 16 bytes for each number of an adapter (itself, gradient, two moments), and activations, less with
//            train.checkpoint
#pragma once

#include "mlxtape/jobs/train.h"
#include "mlxtape/models/lora.h"

namespace mlxtape::jobs {

// mlx-lm's: Adam without bias correction, nothing clipped, the last 16 layers.
TrainOptions lora_training();

struct LoraJobOptions {
  TrainOptions train = lora_training();
  models::LoraOptions lora{.num_layers = 16};
  std::uint64_t seed = 0;  // of new adapters, and of dropout
  bool keep_saves = true;  // the files with a step's number
};

// kArgument where the model has adapters that options.lora does not choose, of its rank and scale.
TrainResult lora(CommandEncoder& encoder, models::Model& model, const DataSet& data,
                 const LoraJobOptions& options, const FitHooks& hooks = {});

}  // namespace mlxtape::jobs
