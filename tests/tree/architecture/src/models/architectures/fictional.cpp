// A fictional architecture that no model has: windows in every second layer, no norms of queries and keys, norms behind
// attention, biases of keys alone, a name of its own, experts without a shared one in the last layer.
#include "read.h"

namespace mlxtape::models {

namespace {

void read(const Fields& f, ModelPlan& plan) {
  AttentionPlan attention = read_sizes(f, plan);
  attention.qk_norm = false;
  attention.bias.k = true;
  plan.ropes = {read_rope(f, attention.head_dim)};
  AttentionPlan near = attention;
  near.window = f.whole("window");
  for (std::size_t l = 0; l < plan.layers.size(); ++l) {
    plan.layers[l] = {l % 2 == 0 ? near : attention, SwigluPlan{f.whole("intermediate_size")}};
  }
  for (LayerPlan& layer : plan.layers) layer.norms.mixer_post = true;
  plan.layers.back().network =
      MoePlan{f.whole("num_experts"), f.whole("num_experts_per_tok"), 16, 0, true};
}

}  // namespace

Architecture architecture_fictional() {
  return {{"fictional"}, "", "", read, {}, {{"self_attn.o_proj", "self_attn.out_proj"}}};
}

}  // namespace mlxtape::models
