#include "layer.h"

#include "mlxtape/ops/rms_norm.h"

namespace mlxtape::models {

namespace {

// h ← h + more; y = rms_norm(h).
Tensor add_and_norm(Tape& tape, Stream& stream, const Tensor& w, float eps) {
  if (!stream.more.defined()) return ops::rms_norm(tape, stream.h, w, eps);
  const auto [y, h, r] = ops::rms_norm_residual(tape, stream.more, stream.h, w, eps);
  stream.h = h;
  return y;
}

Tensor run_attention(Tape& tape, const Model& model, const AttentionPlan& plan,
                     const nn::SelfAttentionWeights& w, const Tensor& x, const Past& past) {
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
  const float eps = model.config.plan.eps;
  const LayerPlan& plan = model.config.plan.layer(layer);
  const LayerWeights& w =
      weights != nullptr ? *weights : model.weights.layers[static_cast<std::size_t>(layer)];
  Stream stream{in.more, in.h};
  const Tensor mixed = add_and_norm(tape, stream, w.input_norm, eps);
  stream.more = plan.attention() != nullptr
                    ? run_attention(tape, model, *plan.attention(), w.attention, mixed, past)
                    : run_delta(tape, model, *plan.delta(), w.delta, mixed, past);
  const Tensor x = add_and_norm(tape, stream, w.post_norm, eps);
  const MoePlan* moe = plan.moe();
  stream.more = moe != nullptr
                    ? nn::moe(tape, x, w.moe, {moe->chosen, moe->renormalise}, &stream.routed)
                    : nn::swiglu_network(tape, x, w.mlp);
  return stream;
}

Tensor run_norm(Tape& tape, const Model& model, const Stream& in) {
  Stream stream = in;
  return add_and_norm(tape, stream, model.weights.norm, model.config.plan.eps);
}

}  // namespace mlxtape::models
