// LoRA: a model whose weights, plain or quantised, stay as they are, with low-rank adapters that are trained. Names and files
// are mlx-lm's.
//
//   add_lora(*encoder, model, {.rank = 8}, seed);
//   Tape tape(*encoder);
//   const Model watched = watch_lora(tape, model);
//   tape.backward(loss(tape, watched, tokens, targets));
//   for (const Parameter& p : lora_parameters(watched)) tape.grad(p.tensor);
//
// Formula    y = x·wᵀ + scale·((x·a)·b) (mlxtape/nn/linear.h); a is drawn from ±1/√in, b is 0: initially nothing changes.
//            fused: w + scale·(a·b)ᵀ, for experts w + scale·b·a
// Names      <module>.lora_a, <module>.lora_b: "model.layers.3.self_attn.q_proj.lora_a". Always f32.
// Files      adapters.safetensors and adapter_config.json (fine_tune_type, num_layers, lora_parameters), as in mlx-lm.
//            Modules that the config selects but the file does not contain are unchanged.
#pragma once

#include "mlxtape/models/model.h"
#include "mlxtape/ops/quantize.h"

namespace mlxtape::models {

inline constexpr const char* kAdapterWeights = "adapters.safetensors";
inline constexpr const char* kAdapterConfig = "adapter_config.json";

struct LoraOptions {
  std::int64_t rank = 8;
  double scale = 20;  // multiplies the product; not divided by the rank
  double dropout = 0;
  std::int64_t num_layers = -1;  // number of layers, counted from the last; below 1: all
  // Ends of module paths: "self_attn.q_proj", "q_proj", "lm_head". Empty: every linear layer and every expert in the
  // layers, including routers and shared-expert gates.
  std::vector<std::string> keys = {};
};

// The modules that options select, in the model's order; kArgument for a key that no module path ends with.
std::vector<std::string> lora_modules(const Model& model, const LoraOptions& options);
Check lora_check(const Model& model, const LoraOptions& options);

void add_lora(CommandEncoder& encoder, Model& model, const LoraOptions& options,
              std::uint64_t seed);
void remove_lora(Model& model);
bool has_lora(const Model& model);

// a and b of every adapter, in the model's order.
std::vector<Parameter> lora_parameters(const Model& model);

// Dropout of the adapters' inputs, for one batch.
struct LoraDropout {
  double part = 0;
  Tensor key =
      {};  // [2] u32: read on the device, so that a captured step draws a new mask at each replay
};
// The key of a batch: a function of both numbers.
Tensor lora_dropout_key(CommandEncoder& encoder, std::uint64_t seed, std::int64_t batch);
// The model with only its adapters watched.
Model watch_lora(Tape& tape, const Model& model, const LoraDropout& dropout = {});

// The model's adapters must be among those that options select, with their rank and scale.
Check adapters_check(const Model& model, const LoraOptions& options);

// Writes the adapter file only, atomically.
void save_adapter_weights(const Model& model, const std::string& file);
// Writes both files; creates the folder if necessary. The model's adapters must pass adapters_check.
void save_adapters(const Model& model, const std::string& folder, const LoraOptions& options);

// kIo, with file and tensor: a name that is not an adapter of a module that the config selects, another shape than it says,
// one of a and b without the other, another kind of tuning. The model must not already have adapters.
LoraOptions load_adapters(CommandEncoder& encoder, Model& model, const std::string& folder);
// The same from an adapter file without a config; options must match it.
void load_adapter_weights(CommandEncoder& encoder, Model& model, const std::string& file,
                          const LoraOptions& options);

struct FuseOptions {
  bool dequantize =
      false;  // the whole model; otherwise quantised weights are requantised the same way
  ops::QuantizeRule rounding = ops::QuantizeRule::kGpu;
};
// The model with its adapters fused into its weights.
Model fuse_lora(CommandEncoder& encoder, const Model& model, const FuseOptions& options = {});

}  // namespace mlxtape::models
