// Where each tensor of a model belongs, under which name and of which shape.
#include <algorithm>
#include <cmath>

#include "mlxtape/models/model.h"
#include "mlxtape/ops/elementwise.h"
#include "mlxtape/ops/random.h"
#include "rope.h"

namespace mlxtape::models {

namespace {

// Appends the parts of a model to a list of slots, for weights that may be changed and for such that may not.
template <class S>
class Names {
 public:
  Names(std::vector<S>& slots, const Config& config, std::string before)
      : slots_(slots), config_(config), before_(std::move(before)) {}

  Names layer(std::int64_t number) const {
    Names names(slots_, config_, before_ + "layers." + std::to_string(number) + ".");
    names.layer_ = number;
    return names;
  }
  Names in(const std::string& module) const {
    Names names = *this;
    names.path_ += module + ".";
    return names;
  }

  template <class T>
  void tensor(const std::string& name, Role role, T& t, const Shape& shape) const {
    tensor(name, role, t, shape, shape);
  }
  template <class T>
  void tensor(const std::string& name, Role role, T& t, const Shape& shape,
              const Shape& in_file) const {
    add(name, role, shape, in_file).tensor = &t;
  }
  template <class W>
  void weight(const std::string& module, Role role, W& w, const Shape& shape) const {
    S& slot = add(module, role, shape, shape);
    slot.weight = &w;
    slot.is_weight = true;
    if (shape.rank() == 3) slot.experts = shape[0];
  }

 private:
  S& add(const std::string& name, Role role, const Shape& shape, const Shape& in_file) const {
    std::string path = path_ + name;
    for (const auto& [usual, own] : config_.own_names) {
      if (path == usual) path = own;
    }
    S slot;
    slot.name = before_ + path;
    slot.path = layer_ < 0 ? slot.name : path;
    slot.role = role;
    slot.layer = layer_;
    slot.shape = shape;
    slot.file_shape = in_file;
    slots_.push_back(std::move(slot));
    return slots_.back();
  }

  std::vector<S>& slots_;
  const Config& config_;
  std::string before_, path_;
  std::int64_t layer_ = -1;
};

template <class S, class W>
void attention_slots(const Names<S>& names, W& w, const AttentionPlan& plan, std::int64_t width) {
  const std::int64_t queries = plan.heads * plan.head_dim, keys = plan.key_heads * plan.head_dim;
  const std::int64_t asked = plan.gated ? 2 * queries : queries;
  names.weight("q_proj", Role::kProjection, w.q, {asked, width});
  names.weight("k_proj", Role::kProjection, w.k, {keys, width});
  names.weight("v_proj", Role::kValue, w.v, {keys, width});
  names.weight("o_proj", Role::kProjection, w.o, {width, queries});
  if (plan.bias.q) names.tensor("q_proj.bias", Role::kBias, w.q_bias, {asked});
  if (plan.bias.k) names.tensor("k_proj.bias", Role::kBias, w.k_bias, {keys});
  if (plan.bias.v) names.tensor("v_proj.bias", Role::kBias, w.v_bias, {keys});
  if (plan.bias.o) names.tensor("o_proj.bias", Role::kBias, w.o_bias, {width});
  if (plan.sinks) names.tensor("sinks", Role::kSinks, w.sinks, {plan.heads});
  if (plan.qk_norm) {
    names.tensor("q_norm.weight", Role::kNorm, w.q_norm, {plan.head_dim});
    names.tensor("k_norm.weight", Role::kNorm, w.k_norm, {plan.head_dim});
  }
}

template <class S, class W>
void delta_slots(const Names<S>& names, W& w, const DeltaPlan& plan, std::int64_t width) {
  const std::int64_t values = plan.values(), mixed = plan.channels(), heads = plan.value_heads;
  const Role projection = Role::kProjection;
  if (plan.rows == DeltaPlan::Rows::kByHead) {
    names.weight("in_proj_qkvz", projection, w.qkvz, {mixed + values, width});
    names.weight("in_proj_ba", projection, w.ba, {2 * heads, width});
  } else {
    names.weight("in_proj_qkv", projection, w.qkv, {mixed, width});
    names.weight("in_proj_z", projection, w.z, {values, width});
    names.weight("in_proj_b", projection, w.b, {heads, width});
    names.weight("in_proj_a", projection, w.a, {heads, width});
  }
  names.tensor("conv1d.weight", Role::kConv, w.conv, {mixed, plan.kernel}, {mixed, plan.kernel, 1});
  names.tensor("A_log", Role::kDecay, w.a_log, {heads});
  names.tensor("dt_bias", Role::kStepBias, w.dt_bias, {heads});
  names.tensor("norm.weight", Role::kGatedNorm, w.norm, {plan.value_dim});
  names.weight("out_proj", projection, w.out, {width, values});
}

template <class S, class W>
void swiglu_slots(const Names<S>& names, W& w, std::int64_t width, const SwigluPlan& plan) {
  const std::int64_t inner = plan.width;
  names.weight("gate_proj", Role::kProjection, w.gate, {inner, width});
  names.weight("up_proj", Role::kProjection, w.up, {inner, width});
  names.weight("down_proj", Role::kDown, w.down, {width, inner});
  if (plan.bias.gate) names.tensor("gate_proj.bias", Role::kBias, w.gate_bias, {inner});
  if (plan.bias.up) names.tensor("up_proj.bias", Role::kBias, w.up_bias, {inner});
  if (plan.bias.down) names.tensor("down_proj.bias", Role::kBias, w.down_bias, {width});
}

template <class S, class W>
void moe_slots(const Names<S>& names, W& w, const MoePlan& plan, std::int64_t width) {
  const std::int64_t e = plan.experts, inner = plan.width;
  names.weight("gate", Role::kRouter, w.router, {e, width});
  const Names<S> experts = names.in("switch_mlp");
  experts.weight("gate_proj", Role::kProjection, w.experts.gate, {e, inner, width});
  experts.weight("up_proj", Role::kProjection, w.experts.up, {e, inner, width});
  experts.weight("down_proj", Role::kDown, w.experts.down, {e, width, inner});
  if (plan.shared_width == 0) return;
  swiglu_slots(names.in("shared_expert"), w.shared, width, {plan.shared_width});
  names.weight("shared_expert_gate", Role::kSharedGate, w.shared_gate, {1, width});
}

template <class S, class W>
void layer_slots(const Names<S>& layer, W& w, const LayerPlan& plan, std::int64_t width) {
  const NormsPlan& norms = plan.norms;
  const bool after = norms.mixer_post || norms.network_post;
  const auto norm = [&](bool there, const char* name, auto& t) {
    if (there) layer.tensor(std::string(name) + ".weight", Role::kNorm, t, {width});
  };
  norm(norms.mixer_pre, "input_layernorm", w.mixer_norm);
  if (const AttentionPlan* attention = plan.attention()) {
    attention_slots(layer.in("self_attn"), w.attention, *attention, width);
  } else {
    delta_slots(layer.in("linear_attn"), w.delta, *plan.delta(), width);
  }
  // Where blocks are normalised behind as well, the name that most have for the network's norm is the mixer's.
  norm(norms.mixer_post, "post_attention_layernorm", w.mixer_post_norm);
  norm(norms.network_pre, after ? "pre_feedforward_layernorm" : "post_attention_layernorm",
       w.network_norm);
  if (const MoePlan* moe = plan.moe()) {
    moe_slots(layer.in("mlp"), w.moe, *moe, width);
  } else {
    swiglu_slots(layer.in("mlp"), w.mlp, width, *plan.swiglu());
  }
  norm(norms.network_post, "post_feedforward_layernorm", w.network_post_norm);
}

template <class S, class W>
std::vector<S> all_slots(W& weights, const Config& config) {
  const ModelPlan& plan = config.plan;
  std::vector<S> result;
  const Names<S> model(result, config, config.prefix + "model.");
  model.weight("embed_tokens", Role::kEmbedding, weights.embedding, {plan.vocabulary, plan.width});
  for (std::int64_t l = 0; l < plan.layer_count(); ++l) {
    layer_slots(model.layer(l), weights.layers[static_cast<std::size_t>(l)], plan.layer(l),
                plan.width);
  }
  model.tensor("norm.weight", Role::kNorm, weights.norm, {plan.width});
  if (!plan.tied) {
    Names<S>(result, config, config.prefix)
        .weight("lm_head", Role::kHead, weights.head, {plan.vocabulary, plan.width});
  }
  return result;
}

}  // namespace

std::vector<Slot> slots(Weights& weights, const Config& config) {
  weights.layers.resize(config.plan.layers.size());
  return all_slots<Slot>(weights, config);
}

std::vector<ConstSlot> slots(const Weights& weights, const Config& config) {
  if (weights.layers.size() != config.plan.layers.size()) {
    throw Error(Errc::kArgument, "model: weights must have the plan's " +
                                     std::to_string(config.plan.layers.size()) + " layers, got " +
                                     std::to_string(weights.layers.size()));
  }
  return all_slots<ConstSlot>(weights, config);
}

std::vector<Part> parts(const Config& config) {
  Weights none;
  const std::vector<Slot> all = slots(none, config);
  return {all.begin(), all.end()};
}

std::vector<Parameter> parameters(const Model& model) {
  std::vector<Parameter> result;
  for (const ConstSlot& slot : slots(model)) {
    each_tensor_of(slot, [&](const std::string& name, const Tensor& t) {
      result.push_back({name, t, slot.is_weight ? t.shape() : slot.file_shape});
    });
  }
  return result;
}

Model watch(Tape& tape, const Model& model, const std::function<bool(const std::string&)>& wanted) {
  Model watched = model;
  for (const Slot& slot : slots(watched.weights, watched.config)) {
    each_tensor_of(slot, [&](const std::string& name, Tensor& t) {
      if (is_float(t.dtype()) && (!wanted || wanted(name))) t = tape.watch(t);
    });
  }
  return watched;
}

namespace {

// As training from scratch begins with.
class Random {
 public:
  Random(CommandEncoder& encoder, DType dtype, const ModelPlan& plan, std::uint64_t seed)
      : encoder_(encoder),
        dtype_(dtype),
        deviation_(plan.initial_deviation),
        norm_(plan.norms_from_0 ? 0 : 1),
        keys_(encoder, seed) {}

  Tensor weight(const Slot& slot) {
    // As the config says; by what they sum over where that is less.
    return normal(slot, std::min(deviation_, by_width(slot)));
  }
  Tensor tensor(const Slot& slot) {
    switch (slot.role) {
      case Role::kNorm: return encoder_.full(slot.shape, dtype_, norm_);
      case Role::kGatedNorm: return encoder_.full(slot.shape, dtype_, 1);
      case Role::kSinks:
      case Role::kBias: return encoder_.full(slot.shape, dtype_, 0);
      // softplus of it about 0.001 to 0.1: with A_log's, memories of a token to a thousand. What is forgotten at once has
      // no gradient that could teach to keep it.
      case Role::kStepBias:
        return ops::cast(encoder_, uniform(slot, std::log(0.001), std::log(0.1)), dtype_);
      case Role::kDecay: return ops::log(encoder_, uniform(slot, 1, 16));
      default: return normal(slot, by_width(slot));
    }
  }

 private:
  static double by_width(const Slot& slot) {
    return 1 / std::sqrt(static_cast<double>(slot.shape.back()));
  }
  Tensor normal(const Slot& slot, double deviation) {
    return ops::random_normal(encoder_, keys_.next(encoder_), slot.shape, dtype_, 0, deviation);
  }
  Tensor uniform(const Slot& slot, double low, double high) {
    return ops::random_uniform(encoder_, keys_.next(encoder_), slot.shape, DType::kF32, low, high);
  }

  CommandEncoder& encoder_;
  DType dtype_;
  double deviation_, norm_;
  ops::KeySequence keys_;
};

}  // namespace

Model random_model(const Config& config, CommandEncoder& encoder, DType dtype, std::uint64_t seed) {
  require(plan_check(config.plan));
  Model model;
  model.config = config;
  Random random(encoder, dtype, config.plan, seed);
  for (const Slot& slot : slots(model.weights, config)) {
    if (slot.is_weight) {
      *slot.weight = random.weight(slot);
    } else {
      *slot.tensor = random.tensor(slot);
    }
  }
  model.ropes = make_ropes(config.plan, encoder, dtype);
  return model;
}

}  // namespace mlxtape::models
