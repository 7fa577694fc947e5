#include "layer.h"

#include "mlxtape/ops/elementwise.h"
#include "mlxtape/ops/rms_norm.h"

namespace mlxtape::models {

namespace {

// What a norm multiplies by.
Tensor norm_weight(Tape& tape, const ModelPlan& plan, const Tensor& w) {
  if (!plan.norms_from_0 || !w.defined()) return w;
  return ops::add(tape, ops::cast(tape, w, DType::kF32), 1.0);
}

// h ← h + more; y = rms_norm(h), or h itself without a norm there.
Tensor add_and_norm(Tape& tape, const ModelPlan& plan, Stream& stream, bool there,
                    const Tensor& weight) {
  if (!there) {
    if (stream.more.defined()) stream.h = ops::add(tape, stream.h, stream.more);
    stream.more = {};
    return stream.h;
  }
  const Tensor w = norm_weight(tape, plan, weight);
  if (!stream.more.defined()) return ops::rms_norm(tape, stream.h, w, plan.eps);
  const auto [y, h, r] = ops::rms_norm_residual(tape, stream.more, stream.h, w, plan.eps);
  stream.h = h;
  return y;
}

// What a block adds: its result, normalised and scaled where the plan says so.
Tensor added(Tape& tape, const ModelPlan& plan, const Tensor& result, bool there, const Tensor& w,
             double scale) {
  const Tensor normed =
      there ? ops::rms_norm(tape, result, norm_weight(tape, plan, w), plan.eps) : result;
  return scale == 1 ? normed : ops::multiply(tape, normed, scale);
}

nn::GateActivation activation_of(Activation activation) {
  switch (activation) {
    case Activation::kGelu: return nn::GateActivation::kGelu;
    case Activation::kGeluTanh: return nn::GateActivation::kGeluTanh;
    case Activation::kClampedSilu:  // plan_check refuses it
    case Activation::kSilu: break;
  }
  return nn::GateActivation::kSilu;
}

Tensor run_attention(Tape& tape, const Model& model, const AttentionPlan& plan,
                     const nn::SelfAttentionWeights& weights, const Tensor& x, const Past& past) {
  nn::SelfAttentionWeights w = weights;
  w.q_norm = norm_weight(tape, model.config.plan, weights.q_norm);
  w.k_norm = norm_weight(tape, model.config.plan, weights.k_norm);
  const nn::SelfAttentionShape shape{.heads = plan.heads,
                                     .key_heads = plan.key_heads,
                                     .head_dim = plan.head_dim,
                                     .gated = plan.gated,
                                     .rope = model.ropes[plan.rope],
                                     .eps = model.config.plan.eps,
                                     .scale = plan.scale,
                                     .window = plan.window};
  nn::SelfAttentionPast seen{.mode = past.mode};
  if (past.mode == nn::Mode::kTrain) return nn::self_attention(tape, x, w, shape, seen);
  seen.start = past.start;
  seen.lengths = past.lengths;
  if (const auto* ring = std::get_if<WindowCache>(&past.cache)) {
    seen.keys = ring->keys;
    seen.values = ring->values;
    seen.ring = true;
    seen.places = ring->places;
  } else {
    const auto& all = std::get<KeyValueCache>(past.cache);
    seen.keys = all.keys;
    seen.values = all.values;
  }
  return nn::self_attention(tape, x, w, shape, seen);
}

Tensor run_delta(Tape& tape, const Model& model, const DeltaPlan& plan,
                 const nn::DeltaNetWeights& w, const Tensor& x, const Past& past) {
  nn::DeltaNetShape shape{plan.key_heads, plan.value_heads, plan.key_dim, plan.value_dim};
  shape.eps = model.config.plan.eps;
  if (past.mode == nn::Mode::kTrain) return nn::delta_net(tape, x, w, shape).y;
  const auto& [conv, rule] = std::get<DeltaCache>(past.cache);
  if (past.mode == nn::Mode::kStep) return nn::delta_net_step(tape, x, w, shape, {conv, rule});
  const bool is_new = past.start == 0;
  const auto [y, after] = nn::delta_net(
      tape, x, w, shape, is_new ? nn::DeltaNetState{} : nn::DeltaNetState{conv, rule}, true);
  tape.encoder().copy(after.conv, conv);
  tape.encoder().copy(after.rule, rule);
  return y;
}

}  // namespace

Stream run_layer(Tape& tape, const Model& model, std::int64_t layer, const Stream& in,
                 const Past& past, const LayerWeights* weights) {
  const ModelPlan& all = model.config.plan;
  const LayerPlan& plan = all.layer(layer);
  const LayerWeights& w =
      weights != nullptr ? *weights : model.weights.layers[static_cast<std::size_t>(layer)];
  Stream stream{in.more, in.h};
  const Tensor before = add_and_norm(tape, all, stream, plan.norms.mixer_pre, w.mixer_norm);
  const Tensor mixed =
      plan.attention() != nullptr
          ? run_attention(tape, model, *plan.attention(), w.attention, before, past)
          : run_delta(tape, model, *plan.delta(), w.delta, before, past);
  stream.more = added(tape, all, mixed, plan.norms.mixer_post, w.mixer_post_norm, plan.residual);
  const Tensor x = add_and_norm(tape, all, stream, plan.norms.network_pre, w.network_norm);
  const MoePlan* moe = plan.moe();
  const Tensor y =
      moe != nullptr ? nn::moe(tape, x, w.moe, {moe->chosen, moe->renormalise}, &stream.routed)
                     : nn::swiglu_network(tape, x, w.mlp, activation_of(plan.swiglu()->activation));
  stream.more = added(tape, all, y, plan.norms.network_post, w.network_post_norm, plan.residual);
  return stream;
}

Stream run_embedding(Tape& tape, const Model& model, const Tensor& tokens) {
  const double scale = model.config.plan.embedding_scale;
  const Tensor h = nn::embed(tape, model.weights.embedding, tokens);
  return {{}, scale == 1 ? h : ops::multiply(tape, h, scale)};
}

Tensor run_norm(Tape& tape, const Model& model, const Stream& in) {
  Stream stream = in;
  const ModelPlan& plan = model.config.plan;
  const Tensor h = add_and_norm(tape, plan, stream, true, model.weights.norm);
  return plan.logit_scale == 1 ? h : ops::multiply(tape, h, plan.logit_scale);
}

}  // namespace mlxtape::models
