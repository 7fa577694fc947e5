// Model: a decoder of language: embedding, layers of a mixer and a network, norm, head. Its tensors have the names that
// files in MLX format give them.
//
//   Tape tape(*encoder);
//   const Model watched = watch(tape, model);
//   const Tensor l = loss(tape, watched, tokens, targets);     // l and every parameter's gradient
//   tape.backward(l);
//   tape.grad(watched.weights.norm);
//
// Formula    h = embedding[tokens];  of each layer: h ← h + mixer(rms_norm(h)), h ← h + network(rms_norm(h));
//            logits = rms_norm(h)·headᵀ. mixer: self_attention or delta_net; network: swiglu_network or moe.
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

// Of the mixers and of the networks one is there, as the layer's plan says.
struct LayerWeights {
  Tensor input_norm, post_norm;
  nn::SelfAttentionWeights attention;
  nn::DeltaNetWeights delta;
  nn::SwigluWeights mlp;
  nn::MoeWeights moe;
};

struct Weights {
  nn::Weight embedding;
  std::vector<LayerWeights> layers;
  Tensor norm;
  nn::Weight head;  // not defined where it is the embedding
};

struct Model {
  Config config;
  Weights weights;
  std::vector<nn::Rope> ropes;  // as the plan's

  DType dtype() const { return weights.embedding.dtype(); }
  Device& device() const { return *weights.norm.device(); }
  const nn::Weight& head() const { return config.plan.tied ? weights.embedding : weights.head; }
};

// What a part of a model is for. What is done with weights by kind asks this, never their names.
enum class Role : std::uint8_t {
  kEmbedding,
  kHead,
  kProjection,  // any linear layer that is none of the following
  kValue,       // attention's values
  kDown,        // of a network back to the model's width
  kRouter,
  kSharedGate,  // of the expert that every token goes through
  kNorm,
  kGatedNorm,  // of a delta net's result
  kBias,
  kConv,
  kDecay,     // A_log
  kStepBias,  // dt_bias
};

// A tensor or a weight of a model.
struct Part {
  std::string
      name;  // "model.norm.weight"; of a weight the module's: "model.layers.3.mlp.down_proj"
  std::string path;  // the same within its layer: "mlp.down_proj"; without a layer the name
  Role role = Role::kProjection;
  std::int64_t layer = -1;   // -1: in none
  std::int64_t experts = 0;  // that are stacked in it
  bool is_weight = false;    // may be packed, and have an adapter
  Shape shape;               // in memory
  Shape file_shape;          // in a file
};
// All of them, in the order of a file.
std::vector<Part> parts(const Config& config);

// A part and where it is in Weights: one of tensor and weight.
struct Slot : Part {
  Tensor* tensor = nullptr;
  nn::Weight* weight = nullptr;
};
struct ConstSlot : Part {
  const Tensor* tensor = nullptr;
  const nn::Weight* weight = nullptr;
};
// The first makes room for the layers; for the second they must be there.
std::vector<Slot> slots(Weights& weights, const Config& config);
std::vector<ConstSlot> slots(const Weights& weights, const Config& config);
inline std::vector<ConstSlot> slots(const Model& model) {
  return slots(model.weights, model.config);
}

// Weights drawn at random as training from scratch begins with; the same on every device.
Model random_model(const Config& config, CommandEncoder& encoder, DType dtype, std::uint64_t seed);

struct Parameter {
  std::string name;  // in a file
  Tensor tensor;
  Shape file_shape;  // as many elements
};
// Everything a file holds, codes among it; adapters are in files of their own (models/lora.h).
std::vector<Parameter> parameters(const Model& model);

// The model with every float that wanted says yes to watched: gradients are those of the copies' tensors.
Model watch(Tape& tape, const Model& model,
            const std::function<bool(const std::string&)>& wanted = {});

struct HiddenOptions {
  bool checkpoint = false;  // layers are computed again on the way back instead of remembered
  std::function<void(std::int64_t layer, const Tensor& h)>
      seen;  // called with what each layer gives
  // Called, of layers with experts, with how many tokens went to each: [experts] u32. Not with checkpoint: kArgument.
  std::function<void(std::int64_t layer, const Tensor& counts)> routed = {};
  // A layer's weights in place of the model's own, made when it runs and, with checkpoint, once more on the way back: those
  // that are computed from others need not be there all at once.
  std::function<LayerWeights(Tape& tape, std::int64_t layer)> weights = {};
};
// tokens: [B, L] i32 → what the head takes, [B, L, width]. They are on the device and not looked at: one outside the
// vocabulary embeds as zeros, a negative one counts from the end.
Tensor hidden(Tape& tape, const Model& model, const Tensor& tokens,
              const HiddenOptions& options = {});
// […, width] → […, vocabulary].
Tensor logits(Tape& tape, const Model& model, const Tensor& hidden);
// The mean cross entropy of targets [B, L] i32, those of -1 not counted. Where the head is plain and without an adapter the
// logits of all tokens never exist. With checkpoint the model must live until the tape has been walked.
Tensor loss(Tape& tape, const Model& model, const Tensor& tokens, const Tensor& targets,
            const HiddenOptions& options = {});

}  // namespace mlxtape::models
