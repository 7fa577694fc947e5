// Where each tensor of a model belongs, under which name and of which shape.
#include <algorithm>
#include <cmath>

#include "mlxtape/models/model.h"
#include "mlxtape/ops/elementwise.h"
#include "mlxtape/ops/random.h"
#include "rope.h"

namespace mlxtape::models {

namespace {

class Names {
 public:
  Names(std::vector<Slot>& slots, std::string path) : slots_(slots), path_(std::move(path)) {}

  Names in(const std::string& module) const { return {slots_, path_ + module + "."}; }
  void tensor(const std::string& name, Tensor& t, const Shape& shape) const {
    slots_.push_back({path_ + name, &t, nullptr, shape, shape});
  }
  void tensor(const std::string& name, Tensor& t, const Shape& shape, const Shape& in_file) const {
    slots_.push_back({path_ + name, &t, nullptr, shape, in_file});
  }
  void weight(const std::string& module, nn::Weight& w, const Shape& shape) const {
    slots_.push_back({path_ + module, nullptr, &w, shape, shape});
  }

 private:
  std::vector<Slot>& slots_;
  std::string path_;
};

void attention_slots(const Names& names, nn::SelfAttentionWeights& w, const Config& c) {
  const std::int64_t queries = c.heads * c.head_dim, keys = c.key_heads * c.head_dim;
  const std::int64_t asked = c.family == Config::Family::kQwen3 ? queries : 2 * queries;
  names.weight("q_proj", w.q, {asked, c.width});
  names.weight("k_proj", w.k, {keys, c.width});
  names.weight("v_proj", w.v, {keys, c.width});
  names.weight("o_proj", w.o, {c.width, queries});
  if (c.attention_bias) {
    names.tensor("q_proj.bias", w.q_bias, {asked});
    names.tensor("k_proj.bias", w.k_bias, {keys});
    names.tensor("v_proj.bias", w.v_bias, {keys});
    names.tensor("o_proj.bias", w.o_bias, {c.width});
  }
  names.tensor("q_norm.weight", w.q_norm, {c.head_dim});
  names.tensor("k_norm.weight", w.k_norm, {c.head_dim});
}

void delta_slots(const Names& names, nn::DeltaNetWeights& w, const Config& c) {
  const std::int64_t keys = c.linear_key_heads * c.linear_key_dim;
  const std::int64_t values = c.linear_value_heads * c.linear_value_dim;
  const std::int64_t mixed = 2 * keys + values, heads = c.linear_value_heads;
  if (c.family == Config::Family::kQwen3Next) {
    names.weight("in_proj_qkvz", w.qkvz, {mixed + values, c.width});
    names.weight("in_proj_ba", w.ba, {2 * heads, c.width});
  } else {
    names.weight("in_proj_qkv", w.qkv, {mixed, c.width});
    names.weight("in_proj_z", w.z, {values, c.width});
    names.weight("in_proj_b", w.b, {heads, c.width});
    names.weight("in_proj_a", w.a, {heads, c.width});
  }
  names.tensor("conv1d.weight", w.conv, {mixed, c.linear_kernel}, {mixed, c.linear_kernel, 1});
  names.tensor("A_log", w.a_log, {heads});
  names.tensor("dt_bias", w.dt_bias, {heads});
  names.tensor("norm.weight", w.norm, {c.linear_value_dim});
  names.weight("out_proj", w.out, {c.width, values});
}

void swiglu_slots(const Names& names, nn::SwigluWeights& w, std::int64_t width,
                  std::int64_t inner) {
  names.weight("gate_proj", w.gate, {inner, width});
  names.weight("up_proj", w.up, {inner, width});
  names.weight("down_proj", w.down, {width, inner});
}

void moe_slots(const Names& names, nn::MoeWeights& w, const Config& c) {
  const std::int64_t e = c.experts, inner = c.expert_width;
  names.weight("gate", w.router, {e, c.width});
  const Names experts = names.in("switch_mlp");
  experts.weight("gate_proj", w.experts.gate, {e, inner, c.width});
  experts.weight("up_proj", w.experts.up, {e, inner, c.width});
  experts.weight("down_proj", w.experts.down, {e, c.width, inner});
  swiglu_slots(names.in("shared_expert"), w.shared, c.width, c.shared_width);
  names.weight("shared_expert_gate", w.shared_gate, {1, c.width});
}

// Called with every tensor that there is and its name in a file.
template <class Function>
void visit(const Slot& slot, const Function& function) {
  if (slot.tensor != nullptr) {
    function(slot.name, *slot.tensor);
  } else if (!slot.weight->is_packed()) {
    function(slot.name + ".weight", slot.weight->plain);
  } else {
    function(slot.name + ".weight", slot.weight->packed.codes);
    function(slot.name + ".scales", slot.weight->packed.scales);
    function(slot.name + ".biases", slot.weight->packed.biases);
  }
}

}  // namespace

std::vector<Slot> slots(Weights& weights, const Config& c) {
  std::vector<Slot> result;
  const Names model(result, c.prefix + "model.");
  weights.layers.resize(static_cast<std::size_t>(c.layers));
  model.weight("embed_tokens", weights.embedding, {c.vocabulary, c.width});
  for (std::int64_t l = 0; l < c.layers; ++l) {
    LayerWeights& w = weights.layers[static_cast<std::size_t>(l)];
    const Names layer = model.in("layers." + std::to_string(l));
    layer.tensor("input_layernorm.weight", w.input_norm, {c.width});
    if (c.has_attention(l)) {
      attention_slots(layer.in("self_attn"), w.attention, c);
    } else {
      delta_slots(layer.in("linear_attn"), w.delta, c);
    }
    layer.tensor("post_attention_layernorm.weight", w.post_norm, {c.width});
    if (c.has_experts(l)) {
      moe_slots(layer.in("mlp"), w.moe, c);
    } else {
      swiglu_slots(layer.in("mlp"), w.mlp, c.width, c.intermediate);
    }
  }
  model.tensor("norm.weight", weights.norm, {c.width});
  if (!c.tied) Names(result, c.prefix).weight("lm_head", weights.head, {c.vocabulary, c.width});
  return result;
}

std::vector<Parameter> parameters(const Model& model) {
  std::vector<Parameter> result;
  Weights copy = model.weights;
  for (const Slot& slot : slots(copy, model.config)) {
    visit(slot, [&](const std::string& name, const Tensor& t) {
      result.push_back({name, t, slot.tensor != nullptr ? slot.file_shape : t.shape()});
    });
  }
  return result;
}

Model watch(Tape& tape, const Model& model, const std::function<bool(const std::string&)>& wanted) {
  Model watched = model;
  for (const Slot& slot : slots(watched.weights, watched.config)) {
    visit(slot, [&](const std::string& name, Tensor& t) {
      if (is_float(t.dtype()) && (!wanted || wanted(name))) t = tape.watch(t);
    });
  }
  return watched;
}

Model random_model(const Config& config, CommandEncoder& encoder, DType dtype, std::uint64_t seed) {
  Model model;
  model.config = config;
  ops::KeySequence keys(encoder, seed);
  for (const Slot& slot : slots(model.weights, config)) {
    const auto normal = [&](double deviation) {
      return ops::random_normal(encoder, keys.next(encoder), slot.shape, dtype, 0, deviation);
    };
    if (slot.weight != nullptr) {
      // As the config says; by what they sum over where that is less.
      const double by_width = 1 / std::sqrt(static_cast<double>(slot.shape.back()));
      *slot.weight = normal(std::min(config.initial_deviation, by_width));
    } else if (slot.name.ends_with("norm.weight")) {
      *slot.tensor = encoder.full(slot.shape, dtype, 1);
    } else if (slot.name.ends_with("dt_bias")) {
      // softplus of it about 0.001 to 0.1: with A_log's, memories of a token to a thousand. What is forgotten at once
      // has no gradient that could teach to keep it.
      *slot.tensor = ops::cast(encoder,
                               ops::random_uniform(encoder, keys.next(encoder), slot.shape,
                                                   DType::kF32, std::log(0.001), std::log(0.1)),
                               dtype);
    } else if (slot.name.ends_with("A_log")) {
      // log of 1 to 16.
      *slot.tensor = ops::log(encoder, ops::random_uniform(encoder, keys.next(encoder), slot.shape,
                                                           DType::kF32, 1, 16));
    } else if (slot.name.ends_with(".bias")) {
      *slot.tensor = encoder.full(slot.shape, dtype, 0);
    } else {
      *slot.tensor = normal(1 / std::sqrt(static_cast<double>(slot.shape.back())));
    }
  }
  model.rope = make_rope(config, encoder, dtype);
  return model;
}

}  // namespace mlxtape::models
