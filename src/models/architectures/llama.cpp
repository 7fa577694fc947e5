// Llama, and those that are built as it is: Mistral, and SmolLM3, whose every fourth layer has no positions.
#include "mlxtape/base/quote.h"
#include "read.h"

namespace mlxtape::models {

namespace {

using formats::Json;

// The layers that "layer_types" calls sliding; none without it, whatever "sliding_window" says, as in mlx-lm.
std::vector<bool> sliding_layers(const Fields& f, std::size_t layers) {
  std::vector<bool> sliding(layers, false);
  const Json* types = f.find("layer_types");
  if (types == nullptr) return sliding;
  if (!types->is_array() || types->array().size() != layers) {
    f.fail("layer_types", "an array with a word for each layer", *types);
  }
  for (std::size_t l = 0; l < layers; ++l) {
    const Json& type = types->array()[l];
    const std::string word = type.is_string() ? type.string() : "";
    if (word != "full_attention" && word != "sliding_attention") {
      f.fail("layer_types", "\"full_attention\" or \"sliding_attention\" for each layer", type);
    }
    sliding[l] = word == "sliding_attention";
  }
  return sliding;
}

// The layers that turn queries and keys by their positions.
std::vector<bool> rotated_layers(const Fields& f, std::size_t layers) {
  std::vector<bool> rotated(layers, true);
  if (f.text("model_type") != "smollm3") return rotated;
  const auto interval = static_cast<std::size_t>(f.whole("no_rope_layer_interval", 4));
  for (std::size_t l = 0; l < layers; ++l) rotated[l] = (l + 1) % interval != 0;
  const Json* given = f.find("no_rope_layers");
  if (given == nullptr) return rotated;
  if (!given->is_array() || given->array().size() != layers) {
    f.fail("no_rope_layers", "an array with a number for each layer", *given);
  }
  for (std::size_t l = 0; l < layers; ++l) {
    const Json& turns = given->array()[l];
    if (!turns.is_integer()) f.fail("no_rope_layers", "0 or 1 for each layer", turns);
    rotated[l] = turns.integer() != 0;
  }
  return rotated;
}

void read(const Fields& f, ModelPlan& plan) {
  AttentionPlan attention = read_sizes(f, plan, {.key_heads = f.whole("num_attention_heads")});
  attention.qk_norm = false;
  plan.tied = f.truth("tie_word_embeddings", true);
  RopeKeys keys;
  keys.base = 10000;
  plan.ropes = {read_rope(f, attention.head_dim, keys)};
  plan.ropes[0].traditional = f.truth("rope_traditional", false);
  const std::size_t layers = plan.layers.size();
  const std::vector<bool> sliding = sliding_layers(f, layers), rotated = rotated_layers(f, layers);
  const bool bias = f.truth("mlp_bias", false);
  const SwigluPlan network{f.whole("intermediate_size"), Activation::kSilu, {bias, bias, bias}};
  for (std::size_t l = 0; l < layers; ++l) {
    AttentionPlan own = attention;
    if (sliding[l]) own.window = f.whole("sliding_window");
    if (!rotated[l]) {
      if (plan.ropes.size() == 1) plan.ropes.emplace_back();  // which rotates no channel
      own.rope = 1;
    }
    plan.layers[l] = {own, network};
  }
  expect_silu(f);
}

}  // namespace

Architecture architecture_llama() {
  return {
      {"llama", "mistral", "smollm3"}, "", "", read, {.left_out_within = {"rotary_emb.inv_freq"}}};
}

}  // namespace mlxtape::models
