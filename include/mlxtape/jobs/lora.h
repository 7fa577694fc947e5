// lora: trains LoRA adapters on a model; the weights, plain or quantised, stay as they are.
//
//   models::Model model = models::load_model("base", *encoder);
//   LoraJobOptions options;
//   options.train.fit.folder = "adapters";
//   lora(*encoder, model, read_data("data", tokenizer), options);
//
// Trained    the adapters (mlxtape/models/lora.h), in f32: new ones, or those that the model already has. Loss, validation and
//            best weights as in train.
// Files      in options.train.fit.folder, if given: fit's checkpoint and best; at every save adapters.safetensors and
//            adapter_config.json of that step, which mlx-lm can read, and every save_every steps 0000100_adapters.safetensors
//            and so on. At the end adapters.safetensors is what the model holds: the best if there was a validation.
// Checkpoint belongs to a run with the same settings and the same base: its config, and the first values of every weight.
//            Adapters that the model had before a run are replaced by the checkpoint's when it is resumed.
// Cost       on top of the base: 16 bytes per value of an adapter (itself, gradient, two moments), and activations, fewer with
//            train.checkpoint (activation checkpointing)
#pragma once

#include "mlxtape/jobs/train.h"
#include "mlxtape/models/lora.h"

namespace mlxtape::jobs {

// mlx-lm's defaults: Adam without bias correction, no clipping, the last 16 layers.
TrainOptions lora_training();

struct LoraJobOptions {
  TrainOptions train = lora_training();
  models::LoraOptions lora{.num_layers = 16};
  std::uint64_t seed = 0;  // of new adapters, and of dropout
  bool keep_saves = true;  // the numbered files
};

// kArgument if the model has adapters that options.lora does not select, or of another rank or scale.
TrainResult lora(CommandEncoder& encoder, models::Model& model, const DataSet& data,
                 const LoraJobOptions& options, const FitHooks& hooks = {});

}  // namespace mlxtape::jobs
