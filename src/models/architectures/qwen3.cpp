// Qwen3: attention and SwiGLU in every layer.
#include "read.h"

namespace mlxtape::models {

namespace {

void read(const Fields& f, ModelPlan& plan) {
  const AttentionPlan attention = read_sizes(f, plan);
  plan.ropes = {read_rope(f, attention.head_dim)};
  const SwigluPlan network{f.whole("intermediate_size")};
  for (LayerPlan& layer : plan.layers) layer = {attention, network};
  expect_silu(f);
  expect_no_windows(f);
}

}  // namespace

Architecture architecture_qwen3() { return {{"qwen3"}, "", "", read}; }

}  // namespace mlxtape::models
