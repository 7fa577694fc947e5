#include "read.h"

#include <algorithm>
#include <cmath>

#include "mlxtape/base/quote.h"

namespace mlxtape::models {

namespace {

using formats::Json;

// A whole number that kernels, or common sense, have a limit for.
std::int64_t limited(const Fields& f, const char* key, MaybeSize otherwise, std::int64_t most,
                     std::int64_t least = 1) {
  const std::int64_t value = f.whole(key, otherwise, least);
  if (value > most) {
    f.fail("\"" + std::string(key) + "\" above " + std::to_string(most) +
           " is not supported, got " + std::to_string(value));
  }
  return value;
}

void expect_multiple(const Fields& f, const char* key, std::int64_t value, const char* of,
                     std::int64_t divisor) {
  if (value % divisor == 0) return;
  f.fail("\"" + std::string(key) + "\" must be a multiple of \"" + of + "\", got " +
         std::to_string(value) + " and " + std::to_string(divisor));
}

// scaling: null, or "rope_scaling", "rope_parameters".
RopeConfig parse_scaling(const Json* scaling, double base, std::int64_t dims,
                         const std::string& source) {
  RopeConfig rope;
  rope.base = base;
  rope.dims = dims;
  if (scaling == nullptr) return rope;
  const Fields fields(*scaling, source);
  const std::string kind = fields.text("type", fields.text("rope_type", "default"));
  if (kind == "default" || kind == "mrope") return rope;
  rope.factor = fields.number("factor");
  if (kind == "linear") {
    rope.scale = 1 / rope.factor;
  } else if (kind == "yarn") {
    rope.kind = RopeConfig::Kind::kYarn;
    rope.original_positions = fields.whole("original_max_position_embeddings", 4096);
    rope.beta_fast = fields.number("beta_fast", 32);
    rope.beta_slow = fields.number("beta_slow", 1);
    rope.mscale = fields.number("mscale", 1);
    if (const Json* all = fields.find("mscale_all_dim")) {
      if (!all->is_number()) fields.fail("mscale_all_dim", "a number", *all);
      rope.mscale_all_dim = all->number();
    }
  } else if (kind == "llama3") {
    rope.kind = RopeConfig::Kind::kLlama3;
    rope.original_positions = fields.whole("original_max_position_embeddings", 8192);
    rope.low_freq_factor = fields.number("low_freq_factor", 1);
    rope.high_freq_factor = fields.number("high_freq_factor", 4);
  } else {
    fields.fail("rope of type \"" + shown(kind) +
                "\" is not supported; default, mrope, linear, yarn and llama3 are");
  }
  return rope;
}

}  // namespace

AttentionPlan read_sizes(const Fields& f, ModelPlan& plan, const UsualSizes& usual) {
  plan.vocabulary = f.whole("vocab_size", usual.vocabulary);
  plan.width = f.whole("hidden_size", usual.width);
  plan.layers.resize(static_cast<std::size_t>(limited(f, "num_hidden_layers", usual.layers, 4096)));
  plan.max_positions = f.whole("max_position_embeddings", usual.max_positions);
  plan.eps = static_cast<float>(f.number("rms_norm_eps", 1e-6));
  plan.initial_deviation = f.number("initializer_range", plan.initial_deviation);
  plan.tied = f.truth("tie_word_embeddings", plan.tied);
  AttentionPlan attention;
  attention.heads = f.whole("num_attention_heads", usual.heads);
  attention.key_heads = f.whole("num_key_value_heads", usual.key_heads);
  const std::int64_t share = std::max<std::int64_t>(1, plan.width / attention.heads);
  attention.head_dim = limited(f, "head_dim", share, 256);
  expect_multiple(f, "num_attention_heads", attention.heads, "num_key_value_heads",
                  attention.key_heads);
  const bool bias = f.truth("attention_bias", false);
  attention.bias = {bias, bias, bias, bias};
  return attention;
}

DeltaPlan read_delta(const Fields& f, DeltaPlan::Rows rows, const UsualDelta& usual) {
  DeltaPlan plan;
  plan.rows = rows;
  plan.value_heads = f.whole("linear_num_value_heads", usual.value_heads);
  plan.key_heads = f.whole("linear_num_key_heads", usual.key_heads);
  plan.key_dim = limited(f, "linear_key_head_dim", usual.key_dim, 256);
  plan.value_dim = limited(f, "linear_value_head_dim", usual.value_dim, 256);
  plan.kernel = limited(f, "linear_conv_kernel_dim", usual.kernel, 16);
  expect_multiple(f, "linear_num_value_heads", plan.value_heads, "linear_num_key_heads",
                  plan.key_heads);
  return plan;
}

std::function<bool(std::size_t)> read_attention_layers(const Fields& f) {
  const auto interval = static_cast<std::size_t>(f.whole("full_attention_interval", 4));
  return [interval](std::size_t layer) {
    return (layer + 1) % interval == 0;
  };
}

MoePlan read_moe(const Fields& f, const MoeKeys& keys) {
  MoePlan plan;
  plan.renormalise = f.truth("norm_topk_prob", keys.renormalise);
  plan.experts = limited(f, "num_experts", keys.required ? MaybeSize() : 0, 1024, 0);
  if (plan.experts == 0) return plan;
  plan.chosen = f.whole("num_experts_per_tok");
  plan.width = f.whole("moe_intermediate_size");
  if (keys.shared) plan.shared_width = f.whole("shared_expert_intermediate_size");
  if (plan.chosen > plan.experts) {
    f.fail("\"num_experts_per_tok\" is " + std::to_string(plan.chosen) + ", but there are " +
           std::to_string(plan.experts) + " experts");
  }
  if (plan.chosen > 64) {
    f.fail("\"num_experts_per_tok\" above 64 is not supported, got " + std::to_string(plan.chosen));
  }
  return plan;
}

std::function<bool(std::size_t)> read_expert_layers(const Fields& f) {
  const auto step = static_cast<std::size_t>(f.whole("decoder_sparse_step", 1));
  std::vector<std::int64_t> dense;
  if (const Json* list = f.find("mlp_only_layers")) {
    if (!list->is_array()) f.fail("mlp_only_layers", "an array", *list);
    for (const Json& layer : list->array()) {
      if (!layer.is_integer()) f.fail("mlp_only_layers", "numbers of layers", layer);
      dense.push_back(layer.integer());
    }
  }
  return [step, dense](std::size_t layer) {
    return (layer + 1) % step == 0 &&
           std::count(dense.begin(), dense.end(), static_cast<std::int64_t>(layer)) == 0;
  };
}

RopeConfig read_rope(const Fields& f, std::int64_t head_dim, const RopeKeys& keys) {
  const Json* parameters = f.object("rope_parameters");
  const Json* scaling = f.object("rope_scaling");
  double base = keys.base.value_or(0), share = keys.share;
  if (parameters != nullptr && (keys.all_in_parameters || f.find("rope_theta") == nullptr)) {
    const Fields rope(*parameters, f.source());
    base = rope.number("rope_theta", keys.base);
    share = rope.number(
        "partial_rotary_factor",
        keys.all_in_parameters ? keys.share : f.number("partial_rotary_factor", keys.share));
    if (scaling == nullptr || keys.all_in_parameters) scaling = parameters;
  } else if (!keys.all_in_parameters) {
    base = f.number("rope_theta", keys.base);
    if (keys.share_is_required) share = f.number("partial_rotary_factor");
  }
  const double most = std::min(share, 2.0);  // what no integer can hold is too much as well
  const auto dims = static_cast<std::int64_t>(static_cast<double>(head_dim) * most);
  if (dims < 2 || dims > head_dim || dims % 2 != 0) {
    f.fail("\"partial_rotary_factor\" " + Json(share).dump() + " of \"head_dim\" " +
           std::to_string(head_dim) + " must be an even number of channels, got " +
           std::to_string(dims) + (share > most ? " or more" : ""));
  }
  return parse_scaling(scaling, base, dims, f.source());
}

std::vector<ForeignExperts> usual_experts() {
  using Rows = ForeignExperts::Rows;
  const auto rule = [](const std::string& part, const std::string& together, Rows rows) {
    return ForeignExperts{"mlp.switch_mlp." + part, "mlp.experts.{e}." + part + ".weight",
                          "mlp.experts." + together, rows};
  };
  return {rule("gate_proj", "gate_up_proj", Rows::kFirstHalf),
          rule("up_proj", "gate_up_proj", Rows::kSecondHalf),
          rule("down_proj", "down_proj", Rows::kAll)};
}

void expect_silu(const Fields& f) {
  if (f.text("hidden_act", "silu") != "silu")
    f.fail("hidden_act", "\"silu\"", *f.find("hidden_act"));
}

void expect_no_windows(const Fields& f) {
  if (!f.truth("use_sliding_window", false)) return;
  f.fail("use_sliding_window", "false: windows are not supported", *f.find("use_sliding_window"));
}

}  // namespace mlxtape::models
