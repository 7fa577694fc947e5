// Config: what a model's config.json says, of the architectures that this library runs.
//
//   qwen3                                      attention and SwiGLU in every layer
//   qwen3_next                                 delta nets, gated attention in every fourth layer, experts
//   qwen3_5, qwen3_5_moe, their *_text forms   the same with projections by kind, dense or with experts; flat or
//                                              under "text_config"
//
// Unknown keys are left alone. A missing or senseless value is an error that names the file and the key.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "mlxtape/formats/json.h"

namespace mlxtape::models {

// How weights are packed. bits 0: not at all.
struct Packing {
  int bits = 0, group_size = 0;
};

// The "quantization" of config.json: one packing for all, others for modules named by their paths.
struct Quantization {
  Packing usual;
  std::unordered_map<std::string, Packing> of;
  Packing of_module(const std::string& path) const;
};

struct RopeConfig {
  enum class Kind : std::uint8_t { kPlain, kYarn, kLlama3 };
  Kind kind = Kind::kPlain;
  double base = 10000;
  double scale = 1;       // of positions
  std::int64_t dims = 0;  // channels of a head that are turned
  // Yarn and llama3: how far periods are stretched, and between which wavelengths.
  double factor = 1;
  std::int64_t original_positions = 0;
  double beta_fast = 32, beta_slow = 1, mscale = 1, mscale_all_dim = 0;
  double low_freq_factor = 1, high_freq_factor = 4;
};

struct Config {
  enum class Family : std::uint8_t { kQwen3, kQwen3Next, kQwen35 };
  Family family = Family::kQwen3;
  std::string model_type;
  std::string prefix;  // of every tensor's name: "language_model." in qwen3_5

  std::int64_t vocabulary = 0, width = 0, layers = 0, intermediate = 0, max_positions = 0;
  float eps = 1e-6F;
  bool tied = false;                // the head is the embedding
  double initial_deviation = 0.02;  // of random weights: "initializer_range"

  std::int64_t heads = 0, key_heads = 0, head_dim = 0;
  bool attention_bias = false;
  RopeConfig rope;

  // Delta nets; 0 in qwen3. attention_interval n: layers n−1, 2n−1, … have attention.
  std::int64_t attention_interval = 1;
  std::int64_t linear_key_heads = 0, linear_value_heads = 0, linear_key_dim = 0;
  std::int64_t linear_value_dim = 0, linear_kernel = 0;

  // Experts; 0 where there are none.
  std::int64_t experts = 0, chosen = 0, expert_width = 0, shared_width = 0, sparse_step = 1;
  bool renormalise = false;
  std::vector<std::int64_t> dense_layers;  // without experts whatever sparse_step says

  Quantization quantization;
  formats::Json json;  // as it was read

  bool has_attention(std::int64_t layer) const { return (layer + 1) % attention_interval == 0; }
  bool has_experts(std::int64_t layer) const;

  static Config parse(const formats::Json& json, const std::string& source);
};

}  // namespace mlxtape::models
