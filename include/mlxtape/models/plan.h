// ModelPlan: the structure of a decoder-only language model, layer by layer. An architecture makes it from a config.json
// (mlxtape/models/architecture.h), or a program by hand; everything else (weights, caches, saving, quantising, LoRA, sizes)
// follows the plan and never asks for a model's name.
//
// Formula    h = e·embedding[tokens];  of each layer: h ← h + r·post(mixer(pre(h))), h ← h + r·post(network(pre(h)));
//            logits = l·rms_norm(h)·headᵀ. pre and post are each an rms_norm or nothing; e, r and l are scales, of 1 unless
//            said.
// A field that no op can do yet is there all the same, so that an architecture can say what it is: plan_check refuses it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <variant>
#include <vector>

#include "mlxtape/base/error.h"

namespace mlxtape::models {

struct RopeConfig {
  enum class Kind : std::uint8_t { kPlain, kYarn, kLlama3 };
  Kind kind = Kind::kPlain;
  double base = 10000;
  double scale = 1;          // of positions
  bool traditional = false;  // channels 2j and 2j + 1 are rotated together, not j and j + dims/2
  std::int64_t dims = 0;     // channels of a head that are rotated
  // Yarn and llama3: how far periods are stretched, and between which wavelengths.
  double factor = 1;
  std::int64_t original_positions = 0;
  double beta_fast = 32, beta_slow = 1, mscale = 1, mscale_all_dim = 0;
  double low_freq_factor = 1, high_freq_factor = 4;
};

// Which of attention's projections have a bias.
struct AttentionBiases {
  bool q = false, k = false, v = false, o = false;
};

struct AttentionPlan {
  std::int64_t heads = 0, key_heads = 0, head_dim = 0;
  bool gated = false;  // a gate beside the queries, on the result
  AttentionBiases bias = {};
  bool qk_norm = true;      // queries and keys are normalised head by head
  double scale = 0;         // of scores; 0: head_dim^−½
  double softcap = 0;       // c: scores are c·tanh(score/c); 0: none. Not supported yet
  std::int64_t window = 0;  // the last so many tokens are seen; 0: all
  bool sinks = false;       // a number of each head that the softmax counts beside the scores
  std::size_t rope = 0;     // which of the plan's
};

struct DeltaPlan {
  // How the rows of the projections are ordered: by key head (qkvz, ba) or by kind (qkv, z, b, a).
  enum class Rows : std::uint8_t { kByHead, kByKind };
  std::int64_t key_heads = 0, value_heads = 0, key_dim = 0, value_dim = 0, kernel = 0;
  Rows rows = Rows::kByHead;

  std::int64_t keys() const { return key_heads * key_dim; }
  std::int64_t values() const { return value_heads * value_dim; }
  std::int64_t channels() const { return 2 * keys() + values(); }  // of the convolution
};

// Of a gated network: y = (activation(x·gate)∘(x·up))·down.
enum class Activation : std::uint8_t {
  kSilu,
  kGelu,
  kGeluTanh,
  kClampedSilu,  // min(g, 7)·σ(1.702·min(g, 7))∘(clamp(u, −7, 7) + 1). Not supported yet
};

struct NetworkBiases {
  bool gate = false, up = false, down = false;
};

struct SwigluPlan {
  std::int64_t width = 0;
  Activation activation = Activation::kSilu;
  NetworkBiases bias = {};
};

struct MoePlan {
  std::int64_t experts = 0, chosen = 0, width = 0;
  std::int64_t shared_width = 0;  // of the shared expert; 0: none
  bool renormalise = true;        // a token's scores are scaled to sum to 1
};

// Which of a layer's parts are normalised before, and which after.
struct NormsPlan {
  bool mixer_pre = true, mixer_post = false, network_pre = true, network_post = false;
};

struct LayerPlan {
  std::variant<AttentionPlan, DeltaPlan> mixer;
  std::variant<SwigluPlan, MoePlan> network;
  NormsPlan norms = {};
  double residual = 1;  // r

  // Null if the layer has the other kind.
  const AttentionPlan* attention() const { return std::get_if<AttentionPlan>(&mixer); }
  const DeltaPlan* delta() const { return std::get_if<DeltaPlan>(&mixer); }
  const SwigluPlan* swiglu() const { return std::get_if<SwigluPlan>(&network); }
  const MoePlan* moe() const { return std::get_if<MoePlan>(&network); }
};

struct ModelPlan {
  std::int64_t vocabulary = 0, width = 0, max_positions = 0;
  float eps = 1e-6F;
  bool tied = false;  // the head is the embedding
  // Norms multiply by 1 + w, in f32; weights are what files have. Those of a delta net's result multiply by w all the same.
  bool norms_from_0 = false;
  double embedding_scale = 1, logit_scale = 1;  // e and l
  double logit_softcap = 0;         // c: logits are c·tanh(logit/c); 0: none. Not supported yet
  double initial_deviation = 0.02;  // of random weights
  bool wide_decay = false;          // a delta net's A_log stays f32 when the model is cast
  std::vector<RopeConfig> ropes;
  std::vector<LayerPlan> layers;

  std::int64_t layer_count() const { return static_cast<std::int64_t>(layers.size()); }
  const LayerPlan& layer(std::int64_t i) const { return layers[static_cast<std::size_t>(i)]; }
  // Of the first layer with experts; null if there is none.
  const MoePlan* moe() const {
    for (const LayerPlan& one : layers) {
      if (one.moe() != nullptr) return one.moe();
    }
    return nullptr;
  }
};

// The first size that does not match the others, or that no kernel supports.
Check plan_check(const ModelPlan& plan);

}  // namespace mlxtape::models
