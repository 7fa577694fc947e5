#include "mlxtape/nn/delta_net.h"

#include <cmath>

#include "expect.h"
#include "mlxtape/ops/conv1d_depthwise_causal.h"
#include "mlxtape/ops/delta_gates.h"
#include "mlxtape/ops/gated_delta_rule.h"
#include "mlxtape/ops/layout.h"
#include "mlxtape/ops/rms_norm.h"

namespace mlxtape::nn {

namespace {

// mixed: [B, L, 2·nk·dk + nv·dv], q then k then v. z: [B, L, nv, dv]; b, a: [B, L, nv].
struct Projected {
  Tensor mixed, z, b, a;
};

Projected project(Tape& tape, const Tensor& x, const DeltaNetWeights& w, const DeltaNetShape& s) {
  const std::int64_t batch = x.shape()[0], tokens = x.shape()[1];
  const std::int64_t group = s.value_heads / s.key_heads, wide = group * s.value_dim;
  const Shape values{batch, tokens, s.value_heads, s.value_dim},
      heads{batch, tokens, s.value_heads};
  if (!w.qkvz.defined()) {
    const auto all = linears(tape, x, {{w.qkv}, {w.z}, {w.b}, {w.a}});
    return {all[0], ops::reshape(tape, all[1], values), all[2], all[3]};
  }
  const auto all = linears(tape, x, {{w.qkvz}, {w.ba}});
  const Tensor slabs =
      ops::reshape(tape, all[0], {batch, tokens, s.key_heads, 2 * s.key_dim + 2 * wide});
  const auto parts =
      ops::split_at(tape, slabs, {s.key_dim, 2 * s.key_dim, 2 * s.key_dim + wide}, -1);
  const Tensor pairs = ops::reshape(tape, all[1], {batch, tokens, s.key_heads, 2 * group});
  const auto gates = ops::split(tape, pairs, 2, -1);
  const auto flat = [&](const Tensor& t, std::int64_t channels) {
    return ops::reshape(tape, t, {batch, tokens, channels});
  };
  const std::int64_t keys = s.key_heads * s.key_dim;
  return {ops::concatenate(tape,
                           {flat(parts[0], keys), flat(parts[1], keys),
                            flat(parts[2], s.value_heads * s.value_dim)},
                           -1),
          ops::reshape(tape, parts[3], values), ops::reshape(tape, gates[0], heads),
          ops::reshape(tape, gates[1], heads)};
}

}  // namespace

Check delta_net_check(const Tensor& x, const DeltaNetWeights& w, const DeltaNetShape& s,
                      const DeltaNetState& before) {
  constexpr const char* kBlock = "delta_net";
  if (const Check check = expect_tokens(kBlock, x)) return check;
  if (s.key_heads < 1 || s.key_dim < 1 || s.value_dim < 1 || s.value_heads < 1 ||
      s.value_heads % s.key_heads != 0) {
    return Error(
        Errc::kArgument,
        "delta_net: value_heads must be a multiple of key_heads and no size below 1, got " +
            std::to_string(s.value_heads) + " of " + std::to_string(s.value_dim) + " and " +
            std::to_string(s.key_heads) + " of " + std::to_string(s.key_dim));
  }
  const std::int64_t width = x.shape().back(), values = s.value_heads * s.value_dim;
  const std::int64_t mixed = 2 * s.key_heads * s.key_dim + values;
  if (w.qkvz.defined()) {
    if (const Check check = expect_absent(
            kBlock, {{"qkv", w.qkv}, {"z", w.z}, {"b", w.b}, {"a", w.a}}, "beside qkvz and ba")) {
      return check;
    }
    if (const Check check = expect_weights(kBlock, x,
                                           {{"qkvz", w.qkvz, {mixed + values, width}},
                                            {"ba", w.ba, {2 * s.value_heads, width}}})) {
      return check;
    }
  } else {
    if (const Check check = expect_absent(kBlock, {{"ba", w.ba}}, "without qkvz")) return check;
    if (const Check check = expect_weights(kBlock, x,
                                           {{"qkv", w.qkv, {mixed, width}},
                                            {"z", w.z, {values, width}},
                                            {"b", w.b, {s.value_heads, width}},
                                            {"a", w.a, {s.value_heads, width}}})) {
      return check;
    }
  }
  if (const Check check =
          expect_weights(kBlock, x,
                         {{"conv", w.conv, {mixed, kAny}, w.conv.dtype()},
                          {"A_log", w.a_log, {s.value_heads}, w.a_log.dtype()},
                          {"dt_bias", w.dt_bias, {s.value_heads}, w.dt_bias.dtype()},
                          {"norm", w.norm, {s.value_dim}, w.norm.dtype()},
                          {"out", w.out, {width, values}}})) {
    return check;
  }
  if (!before.conv.defined() && !before.rule.defined()) return std::nullopt;
  const std::int64_t batch = x.shape()[0];
  return expect_weights(kBlock, x,
                        {{"the state's conv", before.conv, {batch, w.conv.dim(1) - 1, mixed}},
                         {"the state's rule",
                          before.rule,
                          {batch, s.value_heads, s.value_dim, s.key_dim},
                          DType::kF32}});
}

namespace {

// What the rule takes, from the convolved channels: [B, L, 2·nk·dk + nv·dv].
ops::GatedDeltaRuleInputs rule_inputs(Tape& tape, const Tensor& filtered, const Projected& in,
                                      const DeltaNetWeights& w, const DeltaNetShape& s) {
  const std::int64_t batch = filtered.shape()[0], tokens = filtered.shape()[1];
  const std::int64_t keys = s.key_heads * s.key_dim;
  const auto parts = ops::split_at(tape, filtered, {keys, 2 * keys}, -1);
  const Shape by_key{batch, tokens, s.key_heads, s.key_dim};
  const Shape by_value{batch, tokens, s.value_heads, s.value_dim};
  const ops::DeltaGates gates = ops::delta_gates(tape, {in.a, in.b, w.a_log, w.dt_bias});
  return {ops::reshape(tape, parts[0], by_key), ops::reshape(tape, parts[1], by_key),
          ops::reshape(tape, parts[2], by_value), gates.decay, gates.beta};
}

ops::GatedDeltaRuleOptions rule_options(const DeltaNetShape& s) {
  ops::GatedDeltaRuleOptions options;
  options.normalise = true;
  options.eps = s.norm_eps;
  options.scale = 1 / std::sqrt(static_cast<double>(s.key_dim));
  return options;
}

Tensor projected_back(Tape& tape, const Tensor& y, const Projected& in, const DeltaNetWeights& w,
                      const DeltaNetShape& s) {
  const Tensor gated = ops::rms_norm_gated(tape, y, w.norm, in.z, s.eps);
  return linear(
      tape, ops::reshape(tape, gated, {y.shape()[0], y.shape()[1], s.value_heads * s.value_dim}),
      w.out);
}

}  // namespace

DeltaNetResult delta_net(Tape& tape, const Tensor& x, const DeltaNetWeights& w,
                         const DeltaNetShape& s, const DeltaNetState& before, bool want_state) {
  require(delta_net_check(x, w, s, before));
  const Projected in = project(tape, x, w, s);
  ops::Conv1dDepthwiseCausalOptions filter;
  filter.silu = true;
  filter.initial_state = before.conv;
  filter.want_final_state = want_state;
  const auto filtered = ops::conv1d_depthwise_causal(tape, in.mixed, w.conv, filter);
  ops::GatedDeltaRuleOptions options = rule_options(s);
  options.initial_state = before.rule;
  options.want_final_state = want_state;
  const auto rule = ops::gated_delta_rule(tape, rule_inputs(tape, filtered.y, in, w, s), options);
  return {projected_back(tape, rule.y, in, w, s), {filtered.final_state, rule.final_state}};
}

Tensor delta_net_step(Tape& tape, const Tensor& x, const DeltaNetWeights& w, const DeltaNetShape& s,
                      const DeltaNetState& state) {
  require(delta_net_check(x, w, s, state));
  if (x.dim(1) != 1 || !state.conv.defined()) {
    throw Error(Errc::kArgument, "delta_net_step: one token of each sequence and a state, got x " +
                                     to_string(x.shape()) +
                                     (state.conv.defined() ? "" : " and no state"));
  }
  const Projected in = project(tape, x, w, s);
  if (tape.wants({in.mixed, in.z, in.a, in.b, w.conv, w.a_log, w.dt_bias})) {
    throw Error(Errc::kNoGradient,
                "delta_net_step: there is no gradient through a step: call it "
                "under Tape::NoGrad, or delta_net");
  }
  CommandEncoder& encoder = tape.encoder();
  const std::int64_t batch = x.dim(0), channels = in.mixed.dim(2);
  const Tensor filtered = ops::conv1d_depthwise_causal_step(
      encoder, ops::reshape(tape, in.mixed, {batch, channels}), w.conv, state.conv, true);
  const auto inputs =
      rule_inputs(tape, ops::reshape(tape, filtered, {batch, 1, channels}), in, w, s);
  return projected_back(
      tape, ops::gated_delta_rule_step(encoder, inputs, state.rule, rule_options(s)), in, w, s);
}

}  // namespace mlxtape::nn
