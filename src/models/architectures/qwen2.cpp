// Qwen2 and 2.5: as Llama, with biases of queries, keys and values.
#include "read.h"

namespace mlxtape::models {

namespace {

void read(const Fields& f, ModelPlan& plan) {
  AttentionPlan attention = read_sizes(f, plan, {.max_positions = 32768});
  attention.qk_norm = false;
  attention.bias = {.q = true, .k = true, .v = true, .o = false};
  plan.tied = f.truth("tie_word_embeddings", true);
  RopeKeys keys;
  keys.base = 1000000;
  plan.ropes = {read_rope(f, attention.head_dim, keys)};
  plan.ropes[0].traditional = f.truth("rope_traditional", false);
  const SwigluPlan network{f.whole("intermediate_size")};
  for (LayerPlan& layer : plan.layers) layer = {attention, network};
  expect_silu(f);
  expect_no_windows(f);
}

}  // namespace

Architecture architecture_qwen2() {
  return {{"qwen2"}, "", "", read, {.left_out_within = {"rotary_emb.inv_freq"}}};
}

}  // namespace mlxtape::models
