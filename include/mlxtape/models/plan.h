// ModelPlan: the structure of a decoder-only language model, layer by layer. An architecture makes it from a config.json
// (mlxtape/models/architecture.h), or a program by hand; everything else (weights, caches, saving, quantising, LoRA, sizes)
// follows the plan and never asks for a model's name.
//
// Formula    h = embedding[tokens];  for each layer: h ← h + mixer(rms_norm(h)), h ← h + network(rms_norm(h));
//            logits = rms_norm(h)·headᵀ
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
  double scale = 1;       // of positions
  std::int64_t dims = 0;  // channels per head that are rotated
  // For yarn and llama3: how far periods are stretched, and between which wavelengths.
  double factor = 1;
  std::int64_t original_positions = 0;
  double beta_fast = 32, beta_slow = 1, mscale = 1, mscale_all_dim = 0;
  double low_freq_factor = 1, high_freq_factor = 4;
};

struct AttentionPlan {
  std::int64_t heads = 0, key_heads = 0, head_dim = 0;
  bool gated = false;       // a gate, projected with the queries, on the result
  bool bias = false;        // on all four projections
  bool qk_norm = true;      // queries and keys are normalised head by head
  double scale = 0;         // of scores; 0: head_dim^−½
  std::int64_t window = 0;  // attend to the last `window` tokens only; 0: all
  std::size_t rope = 0;     // index into the plan's ropes
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

struct SwigluPlan {
  std::int64_t width = 0;
};

struct MoePlan {
  std::int64_t experts = 0, chosen = 0, width = 0;
  std::int64_t shared_width = 0;  // of the shared expert; 0: none
  bool renormalise = true;        // a token's scores are scaled to sum to 1
};

struct LayerPlan {
  std::variant<AttentionPlan, DeltaPlan> mixer;
  std::variant<SwigluPlan, MoePlan> network;

  // Null if the layer has the other kind.
  const AttentionPlan* attention() const { return std::get_if<AttentionPlan>(&mixer); }
  const DeltaPlan* delta() const { return std::get_if<DeltaPlan>(&mixer); }
  const SwigluPlan* swiglu() const { return std::get_if<SwigluPlan>(&network); }
  const MoePlan* moe() const { return std::get_if<MoePlan>(&network); }
};

struct ModelPlan {
  std::int64_t vocabulary = 0, width = 0, max_positions = 0;
  float eps = 1e-6F;
  bool tied = false;                // tied embeddings: the head is the embedding
  double initial_deviation = 0.02;  // standard deviation of random initial weights
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
