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

Tensor run_delta(Tape& tape, const Model& model, const nn::DeltaNetWeights& w, const Tensor& x,
                 const LayerPast* past) {
  const nn::DeltaNetShape shape = delta_shape(model.config);
  if (past == nullptr) return nn::delta_net(tape, x, w, shape).y;
  if (past->attention.lengths.defined()) return nn::delta_net_step(tape, x, w, shape, past->delta);
  const nn::DeltaNetState before = past->delta_is_new ? nn::DeltaNetState{} : past->delta;
  const auto [y, after] = nn::delta_net(tape, x, w, shape, before, true);
  tape.encoder().copy(after.conv, past->delta.conv);
  tape.encoder().copy(after.rule, past->delta.rule);
  return y;
}

}  // namespace

nn::DeltaNetShape delta_shape(const Config& c) {
  nn::DeltaNetShape shape{c.linear_key_heads, c.linear_value_heads, c.linear_key_dim,
                          c.linear_value_dim};
  shape.eps = c.eps;
  return shape;
}

Stream run_layer(Tape& tape, const Model& model, std::int64_t layer, const Stream& in,
                 const LayerPast* past, const LayerWeights* weights) {
  const Config& c = model.config;
  const LayerWeights& w =
      weights != nullptr ? *weights : model.weights.layers[static_cast<std::size_t>(layer)];
  Stream stream{in.more, in.h};
  const Tensor mixed = add_and_norm(tape, stream, w.input_norm, c.eps);
  if (c.has_attention(layer)) {
    const nn::SelfAttentionShape shape{
        c.heads, c.key_heads, c.head_dim, c.family != Config::Family::kQwen3, model.rope, c.eps};
    stream.more = nn::self_attention(tape, mixed, w.attention, shape,
                                     past == nullptr ? nullptr : &past->attention);
  } else {
    stream.more = run_delta(tape, model, w.delta, mixed, past);
  }
  const Tensor x = add_and_norm(tape, stream, w.post_norm, c.eps);
  stream.more = c.has_experts(layer)
                    ? nn::moe(tape, x, w.moe, {c.chosen, c.renormalise}, &stream.routed)
                    : nn::swiglu_network(tape, x, w.mlp);
  return stream;
}

Tensor run_norm(Tape& tape, const Model& model, const Stream& in) {
  Stream stream = in;
  return add_and_norm(tape, stream, model.weights.norm, model.config.eps);
}

}  // namespace mlxtape::models
