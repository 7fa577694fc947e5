// ModelPlan: what a decoder of language consists of, layer by layer. An architecture fills it from a config.json
// (mlxtape/models/architecture.h), a program may fill it by hand; everything else (weights, states, saving, quantising, LoRA,
// sizes) walks it and asks for no model's name.
//
// Formula    h = embedding[tokens];  of each layer: h ← h + mixer(rms_norm(h)), h ← h + network(rms_norm(h));
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
  std::int64_t dims = 0;  // channels of a head that are rotated
  // Yarn and llama3: how far periods are stretched, and between which wavelengths.
  double factor = 1;
  std::int64_t original_positions = 0;
  double beta_fast = 32, beta_slow = 1, mscale = 1, mscale_all_dim = 0;
  double low_freq_factor = 1, high_freq_factor = 4;
};

struct AttentionPlan {
  std::int64_t heads = 0, key_heads = 0, head_dim = 0;
  bool gated = false;       // a gate beside the queries, on the result
  bool bias = false;        // of all four projections
  bool qk_norm = true;      // queries and keys are normalised head by head
  double scale = 0;         // of scores; 0: head_dim^−½
  std::int64_t window = 0;  // the last so many tokens are seen; 0: all
  std::size_t rope = 0;     // which of the plan's
};

struct DeltaPlan {
  // How the projections' rows lie: those of each key head together (qkvz, ba), or those of each kind (qkv, z, b, a).
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
  std::int64_t shared_width = 0;  // of the expert that every token goes through; 0: none
  bool renormalise = true;        // the scores of a token add up to 1
};

struct LayerPlan {
  std::variant<AttentionPlan, DeltaPlan> mixer;
  std::variant<SwigluPlan, MoePlan> network;

  // Null where the layer has another.
  const AttentionPlan* attention() const { return std::get_if<AttentionPlan>(&mixer); }
  const DeltaPlan* delta() const { return std::get_if<DeltaPlan>(&mixer); }
  const SwigluPlan* swiglu() const { return std::get_if<SwigluPlan>(&network); }
  const MoePlan* moe() const { return std::get_if<MoePlan>(&network); }
};

struct ModelPlan {
  std::int64_t vocabulary = 0, width = 0, max_positions = 0;
  float eps = 1e-6F;
  bool tied = false;                // the head is the embedding
  double initial_deviation = 0.02;  // of random weights
  bool wide_decay = false;          // a delta net's A_log stays f32 when the model is cast
  std::vector<RopeConfig> ropes;
  std::vector<LayerPlan> layers;

  std::int64_t layer_count() const { return static_cast<std::int64_t>(layers.size()); }
  const LayerPlan& layer(std::int64_t i) const { return layers[static_cast<std::size_t>(i)]; }
  // Of the first layer that has experts; null where none has.
  const MoePlan* moe() const {
    for (const LayerPlan& one : layers) {
      if (one.moe() != nullptr) return one.moe();
    }
    return nullptr;
  }
};

// The first size that does not fit the others, or that no kernel takes.
Check plan_check(const ModelPlan& plan);

}  // namespace mlxtape::models
