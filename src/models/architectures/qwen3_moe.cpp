// Qwen3 with experts, none of them shared, in all but the layers that are named.
#include "read.h"

namespace mlxtape::models {

namespace {

void read(const Fields& f, ModelPlan& plan) {
  const AttentionPlan attention = read_sizes(f, plan);
  plan.ropes = {read_rope(f, attention.head_dim)};
  const MoePlan moe = read_moe(f, {.shared = false});
  const auto has_experts = read_expert_layers(f);
  for (std::size_t l = 0; l < plan.layers.size(); ++l) {
    LayerPlan& layer = plan.layers[l];
    layer.mixer = attention;
    if (moe.experts > 0 && has_experts(l)) {
      layer.network = moe;
    } else {
      layer.network = SwigluPlan{f.whole("intermediate_size")};
    }
  }
  expect_silu(f);
  expect_no_windows(f);
}

}  // namespace

Architecture architecture_qwen3_moe() {
  return {{"qwen3_moe"}, "", "", read, {.experts = usual_experts()}};
}

}  // namespace mlxtape::models
