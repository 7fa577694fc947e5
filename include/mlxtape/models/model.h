// Model: a decoder-only language model: embedding, layers of a mixer and a network, norm, head. Its tensors have the names that
// they have in files in MLX format.
//
//   Tape tape(*encoder);
//   const Model watched = watch(tape, model);
//   const Tensor l = loss(tape, watched, tokens, targets);     // l and every parameter's gradient
//   tape.backward(l);
//   tape.grad(watched.weights.norm);
//
// Formula    that of mlxtape/models/plan.h. mixer: self_attention or delta_net; network: swiglu_network or moe.
// Types      one float type for activations and weights; norms, A_log and dt_bias may be f32 beside 16 bits
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "mlxtape/models/config.h"
#include "mlxtape/nn/delta_net.h"
#include "mlxtape/nn/moe.h"
#include "mlxtape/nn/self_attention.h"

namespace mlxtape::models {

// One mixer and one network are defined, as the layer's plan says.
struct LayerWeights {
  Tensor mixer_norm, network_norm;            // before
  Tensor mixer_post_norm, network_post_norm;  // after
  nn::SelfAttentionWeights attention;
  nn::DeltaNetWeights delta;
  nn::SwigluWeights mlp;
  nn::MoeWeights moe;
};

struct Weights {
  nn::Weight embedding;
  std::vector<LayerWeights> layers;
  Tensor norm;
  nn::Weight head;  // undefined if tied to the embedding
};

struct Model {
  Config config;
  Weights weights;
  std::vector<nn::Rope> ropes;  // as in the plan

  DType dtype() const { return weights.embedding.dtype(); }
  Device& device() const { return *weights.norm.device(); }
  const nn::Weight& head() const { return config.plan.tied ? weights.embedding : weights.head; }
};

// What a part of a model is for. Whatever treats weights by kind uses this, never their names.
enum class Role : std::uint8_t {
  kEmbedding,
  kHead,
  kProjection,  // any other linear layer
  kValue,       // attention's values
  kDown,        // a network's projection back to the model's width
  kRouter,
  kSharedGate,  // gate of the shared expert
  kNorm,
  kGatedNorm,  // on a delta net's result
  kBias,
  kSinks,
  kConv,
  kDecay,     // A_log
  kStepBias,  // dt_bias
};

// A tensor or a weight of a model.
struct Part {
  std::string name;  // "model.norm.weight"; for a weight the module: "model.layers.3.mlp.down_proj"
  std::string path;  // the name within its layer: "mlp.down_proj"; outside of layers the name
  Role role = Role::kProjection;
  std::int64_t layer = -1;   // -1: none
  std::int64_t experts = 0;  // stacked in it
  bool is_weight = false;    // can be quantised, and have an adapter
  Shape shape;               // in memory
  Shape file_shape;          // in a file
};
// All parts, in the order of a file.
std::vector<Part> parts(const Config& config);

// A part and where it is in Weights: either tensor or weight is set.
struct Slot : Part {
  Tensor* tensor = nullptr;
  nn::Weight* weight = nullptr;
};
struct ConstSlot : Part {
  const Tensor* tensor = nullptr;
  const nn::Weight* weight = nullptr;
};
// The first resizes the layers as needed; for the second they must exist.
std::vector<Slot> slots(Weights& weights, const Config& config);
std::vector<ConstSlot> slots(const Weights& weights, const Config& config);
inline std::vector<ConstSlot> slots(const Model& model) {
  return slots(model.weights, model.config);
}
// Calls function(name in a file, tensor) with every tensor of a slot.
template <class S, class Function>
void each_tensor_of(const S& slot, const Function& function) {
  if (slot.tensor != nullptr) {
    function(slot.name, *slot.tensor);
  } else if (!slot.weight->is_quantized()) {
    function(slot.name + ".weight", slot.weight->plain);
  } else {
    function(slot.name + ".weight", slot.weight->quantized.codes);
    function(slot.name + ".scales", slot.weight->quantized.scales);
    function(slot.name + ".biases", slot.weight->quantized.biases);
  }
}

// Random initial weights for training from scratch; the same on every device.
Model random_model(const Config& config, CommandEncoder& encoder, DType dtype, std::uint64_t seed);

struct Parameter {
  std::string name;  // in a file
  Tensor tensor;
  Shape file_shape;  // the same number of elements
};
// Everything in a model file, including codes; adapters are in files of their own (models/lora.h).
std::vector<Parameter> parameters(const Model& model);

// The model with every float that `wanted` accepts watched: gradients belong to the tensors of the copy.
Model watch(Tape& tape, const Model& model,
            const std::function<bool(const std::string&)>& wanted = {});

struct HiddenOptions {
  bool checkpoint = false;  // activation checkpointing: recompute layers in the backward pass
  // Called with the output of each layer.
  std::function<void(std::int64_t layer, const Tensor& h)> seen = {};
  // Called for layers with experts with the number of tokens per expert: [experts] u32. Not with checkpoint: kArgument.
  std::function<void(std::int64_t layer, const Tensor& counts)> routed = {};
  // Replaces a layer's weights, called when it runs and, with checkpoint, again in the backward pass: weights that are
  // computed from others need not all be in memory at once.
  std::function<LayerWeights(Tape& tape, std::int64_t layer)> weights = {};
};
// tokens: [B, L] i32 → what the head takes, [B, L, width], logit_scale in it. They are on the device and not looked at: one outside the
// vocabulary embeds as zeros, a negative one counts from the end.
Tensor hidden(Tape& tape, const Model& model, const Tensor& tokens,
              const HiddenOptions& options = {});
// […, width] → […, vocabulary].
Tensor logits(Tape& tape, const Model& model, const Tensor& hidden);
// The mean cross-entropy of targets [B, L] i32; those of -1 do not count. If the head is plain and without an adapter, the
// logits of all tokens never exist at once. With checkpoint the model must live until the backward pass is done.
Tensor loss(Tape& tape, const Model& model, const Tensor& tokens, const Tensor& targets,
            const HiddenOptions& options = {});

}  // namespace mlxtape::models
