// Qwen3-Next: delta nets, gated attention in every fourth layer, experts in all but the layers that are named.
#include <algorithm>

#include "read.h"

namespace mlxtape::models {

namespace {

using formats::Json;

// Layers without experts, whatever "decoder_sparse_step" says.
std::vector<std::int64_t> dense_layers(const Fields& f) {
  std::vector<std::int64_t> layers;
  const Json* list = f.find("mlp_only_layers");
  if (list == nullptr) return layers;
  if (!list->is_array()) f.fail("mlp_only_layers", "an array", *list);
  for (const Json& layer : list->array()) {
    if (!layer.is_integer()) f.fail("mlp_only_layers", "numbers of layers", layer);
    layers.push_back(layer.integer());
  }
  return layers;
}

void read(const Fields& f, ModelPlan& plan) {
  AttentionPlan attention = read_sizes(f, plan);
  attention.gated = true;
  RopeKeys rope;
  rope.share = 0.25;
  rope.share_is_required = true;
  plan.ropes = {read_rope(f, attention.head_dim, rope)};
  const auto has_attention = read_attention_layers(f);
  const DeltaPlan delta = read_delta(f, DeltaPlan::Rows::kByHead);
  const MoePlan moe = read_moe(f, true, false);
  const auto step = static_cast<std::size_t>(f.whole("decoder_sparse_step", 1));
  const std::vector<std::int64_t> dense = dense_layers(f);
  for (std::size_t l = 0; l < plan.layers.size(); ++l) {
    LayerPlan& layer = plan.layers[l];
    if (has_attention(l)) {
      layer.mixer = attention;
    } else {
      layer.mixer = delta;
    }
    const bool experts = moe.experts > 0 && (l + 1) % step == 0 &&
                         std::count(dense.begin(), dense.end(), static_cast<std::int64_t>(l)) == 0;
    if (experts) {
      layer.network = moe;
    } else {
      layer.network = SwigluPlan{f.whole("intermediate_size")};
    }
  }
  expect_silu(f);
  expect_no_windows(f);
}

}  // namespace

Architecture architecture_qwen3_next() {
  return {{"qwen3_next"},
          "",
          "",
          read,
          {.left_out_within = {"mtp."}, .experts = usual_experts(), .norms_from_0 = true}};
}

}  // namespace mlxtape::models
