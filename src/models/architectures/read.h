// What architectures read from a config.json alike. Errors name the key.
#pragma once

#include <functional>
#include <optional>

#include "mlxtape/models/architecture.h"

namespace mlxtape::models {

using MaybeSize = std::optional<std::int64_t>;

// Sizes that a file may leave out; without a value the key is required.
struct UsualSizes {
  MaybeSize vocabulary = {}, width = {}, layers = {}, max_positions = {}, heads = {},
            key_heads = {};
};
// Fills the plan's own numbers and makes room for its layers; the attention of all of them.
AttentionPlan read_sizes(const Fields& f, ModelPlan& plan, const UsualSizes& usual = {});

struct UsualDelta {
  MaybeSize key_heads = {}, value_heads = {}, key_dim = {}, value_dim = {}, kernel = {};
};
DeltaPlan read_delta(const Fields& f, DeltaPlan::Rows rows, const UsualDelta& usual = {});
// Is attention in this layer? In every nth, where "full_attention_interval" is n.
std::function<bool(std::size_t layer)> read_attention_layers(const Fields& f);

struct MoeKeys {
  bool required = true;      // "num_experts"; without it, and without any, the plan has 0
  bool renormalise = false;  // where "norm_topk_prob" is left out
  bool shared = true;  // one of "shared_expert_intermediate_size" that every token goes through
};
MoePlan read_moe(const Fields& f, const MoeKeys& keys);
// Are experts in this layer? In every nth, where "decoder_sparse_step" is n, but in none of "mlp_only_layers".
std::function<bool(std::size_t layer)> read_expert_layers(const Fields& f);

struct RopeKeys {
  std::optional<double> base;  // where "rope_theta" may be left out
  double share = 1;            // of a head's channels that are rotated
  bool share_is_required = false;
  bool all_in_parameters = false;  // "rope_parameters" says all, whatever stands beside it
};
// "rope_theta", "partial_rotary_factor", "rope_scaling", or transformers 5's "rope_parameters", which holds the three.
RopeConfig read_rope(const Fields& f, std::int64_t head_dim, const RopeKeys& keys = {});

// How Hugging Face's files have the experts of "mlp.switch_mlp": one by one, or gate and up in one tensor.
std::vector<ForeignExperts> usual_experts();

// What would change the results if it were passed over.
void expect_silu(const Fields& f);
void expect_no_windows(const Fields& f);

}  // namespace mlxtape::models
