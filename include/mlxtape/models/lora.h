// LoRA: a model whose weights stay as they are, plain or packed, with adapters beside them that are trained, by mlx-lm's
// names and in its files.
//
//   add_lora(*encoder, model, {.rank = 8}, seed);
//   Tape tape(*encoder);
//   const Model watched = watch_lora(tape, model);
//   tape.backward(loss(tape, watched, tokens, targets));
//   for (const Parameter& p : lora_parameters(watched)) tape.grad(p.tensor);
//
// Formula    y = x·wᵀ + scale·((x·a)·b) (mlxtape/nn/linear.h); a is drawn from ±1/√in, b is 0: at first nothing changes.
//            fused: w + scale·(a·b)ᵀ, of experts w + scale·b·a
// Names      <module>.lora_a, <module>.lora_b: "model.layers.3.self_attn.q_proj.lora_a". They are f32 whatever the model.
// Files      adapters.safetensors and adapter_config.json (fine_tune_type, num_layers, lora_parameters), as mlx-lm's.
//            Modules that the config chooses and the file does not hold are as they were.
#pragma once

#include "mlxtape/models/model.h"
#include "mlxtape/ops/quantize.h"

namespace mlxtape::models {

inline constexpr const char* kAdapterWeights = "adapters.safetensors";
inline constexpr const char* kAdapterConfig = "adapter_config.json";

struct LoraOptions {
  std::int64_t rank = 8;
  double scale = 20;  // of the product as it is: not divided by the rank
  double dropout = 0;
  std::int64_t num_layers = -1;  // the last so many; all if below 1
  // Ends of modules' paths: "self_attn.q_proj", "q_proj", "lm_head". None: every linear layer and every expert in the
  // layers, routers and the shared experts' gates among them.
  std::vector<std::string> keys = {};
};

// The modules that options choose, in the model's order; kArgument for a key that no module ends with.
std::vector<std::string> lora_modules(const Model& model, const LoraOptions& options);
Check lora_check(const Model& model, const LoraOptions& options);

void add_lora(CommandEncoder& encoder, Model& model, const LoraOptions& options,
              std::uint64_t seed);
void remove_lora(Model& model);
bool has_lora(const Model& model);

// Of every adapter a and b, in the model's order.
std::vector<Parameter> lora_parameters(const Model& model);

// What is left out of a batch's inputs to the adapters.
struct LoraDropout {
  double part = 0;
  Tensor key =
      {};  // [2] u32: read on the device, so that a captured step draws anew at each replay
};
// A key for a batch: a function of both numbers.
Tensor lora_dropout_key(CommandEncoder& encoder, std::uint64_t seed, std::int64_t batch);
// The model with its adapters watched, and nothing else.
Model watch_lora(Tape& tape, const Model& model, const LoraDropout& dropout = {});

// The model's adapters must be those that options choose, or some of them, of their rank and scale.
Check adapters_check(const Model& model, const LoraOptions& options);

// The file of adapters alone, whole or not at all.
void save_adapter_weights(const Model& model, const std::string& file);
// Both files; makes the folder where it is not there. The model's adapters must be as adapters_check has them.
void save_adapters(const Model& model, const std::string& folder, const LoraOptions& options);

// kIo, with file and tensor: a name that is no adapter of a module that the config chooses, another shape than it says,
// one of a and b without the other, another kind of tuning. The model must not have adapters yet.
LoraOptions load_adapters(CommandEncoder& encoder, Model& model, const std::string& folder);
// The same from a file of adapters alone, which options are to fit.
void load_adapter_weights(CommandEncoder& encoder, Model& model, const std::string& file,
                          const LoraOptions& options);

struct FuseOptions {
  bool dequantize = false;  // the whole model; else what was packed is packed again the same way
  ops::QuantizeRule rounding = ops::QuantizeRule::kGpu;
};
// The model with its adapters in its weights.
Model fuse_lora(CommandEncoder& encoder, const Model& model, const FuseOptions& options = {});

}  // namespace mlxtape::models
