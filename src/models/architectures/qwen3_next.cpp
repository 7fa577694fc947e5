// Qwen3-Next: delta nets, gated attention in every fourth layer, experts in all but the layers that are named.
#include "read.h"

namespace mlxtape::models {

namespace {

void read(const Fields& f, ModelPlan& plan) {
  AttentionPlan attention = read_sizes(f, plan);
  attention.gated = true;
  RopeKeys rope;
  rope.share = 0.25;
  rope.share_is_required = true;
  plan.ropes = {read_rope(f, attention.head_dim, rope)};
  const auto has_attention = read_attention_layers(f);
  const DeltaPlan delta = read_delta(f, DeltaPlan::Rows::kByHead);
  const MoePlan moe = read_moe(f, {});
  const auto has_experts = read_expert_layers(f);
  for (std::size_t l = 0; l < plan.layers.size(); ++l) {
    LayerPlan& layer = plan.layers[l];
    if (has_attention(l)) {
      layer.mixer = attention;
    } else {
      layer.mixer = delta;
    }
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

Architecture architecture_qwen3_next() {
  return {{"qwen3_next"},
          "",
          "",
          read,
          {.left_out_within = {"mtp."}, .experts = usual_experts(), .norms_from_0 = true}};
}

}  // namespace mlxtape::models
