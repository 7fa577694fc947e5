// A fictional architecture that no model has: windows in every second layer, no norms of queries and keys, experts without
// a shared one in the last layer.
#include "read.h"

namespace mlxtape::models {

namespace {

void read(const Fields& f, ModelPlan& plan) {
  AttentionPlan attention = read_sizes(f, plan);
  attention.qk_norm = false;
  plan.ropes = {read_rope(f, attention.head_dim)};
  AttentionPlan near = attention;
  near.window = f.whole("window");
  for (std::size_t l = 0; l < plan.layers.size(); ++l) {
    plan.layers[l] = {l % 2 == 0 ? near : attention, SwigluPlan{f.whole("intermediate_size")}};
  }
  plan.layers.back().network =
      MoePlan{f.whole("num_experts"), f.whole("num_experts_per_tok"), 16, 0, true};
}

}  // namespace

Architecture architecture_fictional() { return {{"fictional"}, "", "", read}; }

}  // namespace mlxtape::models
