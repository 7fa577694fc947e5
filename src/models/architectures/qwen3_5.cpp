// Qwen3.5, dense or with experts, flat or under "text_config": Qwen3-Next with projections by kind. Its files may leave out
// nearly every size.
#include "read.h"

namespace mlxtape::models {

namespace {

void read(const Fields& f, ModelPlan& plan) {
  AttentionPlan attention = read_sizes(f, plan, {151936, 4096, 32, 131072, 32, 8});
  attention.gated = true;
  RopeKeys rope;
  rope.base = 100000;
  rope.share = 0.25;
  rope.all_in_parameters = true;
  plan.ropes = {read_rope(f, attention.head_dim, rope)};
  const auto has_attention = read_attention_layers(f);
  const DeltaPlan delta = read_delta(f, DeltaPlan::Rows::kByKind, {16, 64, 192, 128, 4});
  const MoePlan moe = read_moe(f, {.required = false, .renormalise = true});
  for (std::size_t l = 0; l < plan.layers.size(); ++l) {
    LayerPlan& layer = plan.layers[l];
    if (has_attention(l)) {
      layer.mixer = attention;
    } else {
      layer.mixer = delta;
    }
    if (moe.experts > 0) {
      layer.network = moe;
    } else {
      layer.network = SwigluPlan{f.whole("intermediate_size", 14336)};
    }
  }
  plan.wide_decay = true;
  expect_silu(f);
  expect_no_windows(f);
}

}  // namespace

Architecture architecture_qwen3_5() {
  return {{"qwen3_5", "qwen3_5_moe", "qwen3_5_text", "qwen3_5_moe_text"},
          "language_model.",
          "text_config",
          read,
          {.left_out = {"vision_tower", "model.visual"},
           .left_out_within = {"mtp."},
           .replaced = {{"model.language_model.", "language_model.model."}},
           .experts = usual_experts(),
           .norms_from_0 = true}};
}

}  // namespace mlxtape::models
