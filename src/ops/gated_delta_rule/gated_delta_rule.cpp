#include "mlxtape/ops/gated_delta_rule.h"

#include <algorithm>
#include <cmath>
#include <string>
#include <utility>

#include "gated_delta_rule_args.h"
#include "ops/expect.h"
#include "ops/views.h"

namespace mlxtape::ops {

namespace {

constinit const KernelHandle kForward("gated_delta_rule_fwd");
constinit const KernelHandle kBackward("gated_delta_rule_bwd");
constinit const KernelHandle kStep("gated_delta_rule_step");

constexpr std::int64_t kMostChannels = 256;

Error wrong(Errc code, const std::string& what) { return {code, "gated_delta_rule: " + what}; }

Check expect_tensor(const Tensor& q, const char* name, const Tensor& t, const Shape& shape,
                    DType dtype) {
  return ops::expect_tensor(Beside{"gated_delta_rule", "q", q}, name, t, shape, dtype);
}

// The axes before the heads: [B, T], or [T] of packed sequences.
Shape token_axes(const Tensor& q) {
  return q.rank() == 4 ? Shape{q.dim(0), q.dim(1)} : Shape{q.dim(0)};
}
Shape with(Shape shape, std::initializer_list<std::int64_t> more) {
  for (const std::int64_t n : more) shape.push_back(n);
  return shape;
}

Shape state_shape(const GatedDeltaRuleInputs& in, const GatedDeltaRuleOptions& options) {
  const Shape& v = in.v.shape();
  const std::int64_t sequences =
      options.sequence_starts.defined() ? options.sequence_starts.dim(0) - 1 : v[0];
  return {sequences, v[v.rank() - 2], v.back(), in.q.shape().back()};
}

// What every kernel is given.
struct Call {
  GatedDeltaRuleArgs args{};
  Tensor q, k, v, decay, beta, mask;
};

Call call_of(CommandEncoder& encoder, const GatedDeltaRuleInputs& in,
             const GatedDeltaRuleOptions& options) {
  Call call;
  GatedDeltaRuleArgs& args = call.args;
  const Shape &q = in.q.shape(), &v = in.v.shape();
  const Tensor& starts = options.sequence_starts;
  args.sequences = starts.defined() ? starts.dim(0) - 1 : q[0];
  args.sequence_tokens = starts.defined() ? 0 : q[1];
  args.tokens = *element_count(token_axes(in.q));
  args.key_heads = q[q.rank() - 2];
  args.value_heads = v[v.rank() - 2];
  args.key_dim = q.back();
  args.value_dim = v.back();
  call.q = heads_of(encoder, in.q, args.q);
  call.k = heads_of(encoder, in.k, args.k);
  call.v = heads_of(encoder, in.v, args.v);
  call.decay = encoder.contiguous(in.decay);
  call.beta = encoder.contiguous(in.beta);
  call.mask = contiguous_or_absent(encoder, options.mask);
  args.scale = static_cast<float>(options.scale);
  args.eps = static_cast<float>(options.eps);
  args.start_bytes = starts.defined() ? static_cast<std::int32_t>(size_of(starts.dtype())) : 0;
  args.normalise = options.normalise ? 1 : 0;
  args.log_decay = options.log_decay ? 1 : 0;
  args.per_channel = in.decay.rank() == in.q.rank() ? 1 : 0;
  return call;
}

Check check_heads(const GatedDeltaRuleInputs& in) {
  const Shape &q = in.q.shape(), &v = in.v.shape();
  const Shape tokens = token_axes(in.q);
  if (v.rank() != q.rank()) {
    return wrong(Errc::kShape,
                 "v must have the axes of q " + to_string(q) + ", got " + to_string(v));
  }
  const std::int64_t key_heads = q[q.rank() - 2], heads = v[v.rank() - 2];
  if (key_heads < 1 || heads < 1 || heads % key_heads != 0) {
    return wrong(Errc::kShape,
                 "value heads must be a multiple of key heads, at least 1 each, got " +
                     std::to_string(heads) + " and " + std::to_string(key_heads));
  }
  if (q.back() < 1 || q.back() > kMostChannels || v.back() < 1 || v.back() > kMostChannels) {
    return wrong(Errc::kShape, "Dk and Dv must be from 1 to 256, got " + std::to_string(q.back()) +
                                   " and " + std::to_string(v.back()));
  }
  if (const Check check = expect_tensor(in.q, "k", in.k, q, in.q.dtype())) return check;
  if (const Check check =
          expect_tensor(in.q, "v", in.v, with(tokens, {heads, v.back()}), in.q.dtype())) {
    return check;
  }
  const Shape by_head = with(tokens, {heads});
  if (const Check check = expect_tensor(in.q, "beta", in.beta, by_head, DType::kF32)) return check;
  const bool per_channel = in.decay.rank() == q.rank();
  return expect_tensor(in.q, "decay", in.decay, per_channel ? with(by_head, {q.back()}) : by_head,
                       DType::kF32);
}

}  // namespace

Check gated_delta_rule_check(const GatedDeltaRuleInputs& in, const GatedDeltaRuleOptions& options) {
  const Tensor& q = in.q;
  if (!is_kernel_float(q.dtype())) {
    return wrong(Errc::kDType,
                 std::string("q must be f32, f16 or bf16, got ") + name_of(q.dtype()));
  }
  if (options.sequence_starts.defined()) {
    if (const Check check = expect_starts({"gated_delta_rule", "q", q}, "[T, Hk, Dk]", 3,
                                          "sequence_starts", options.sequence_starts)) {
      return check;
    }
  } else if (q.rank() != 4) {
    return wrong(Errc::kShape, "q must be [B, T, Hk, Dk], got " + to_string(q.shape()));
  }
  if (const Check check = check_heads(in)) return check;
  if (!std::isfinite(options.scale) || options.scale == 0) {
    return wrong(Errc::kArgument,
                 "scale must be finite and not 0, got " + std::to_string(options.scale));
  }
  if (!(options.eps >= 0) || !std::isfinite(options.eps)) {
    return wrong(Errc::kArgument,
                 "eps must be finite and at least 0, got " + std::to_string(options.eps));
  }
  if (options.mask.defined()) {
    if (const Check check = expect_tensor(q, "mask", options.mask, token_axes(q), DType::kBool)) {
      return check;
    }
  }
  if (options.initial_state.defined()) {
    return expect_tensor(q, "initial_state", options.initial_state, state_shape(in, options),
                         DType::kF32);
  }
  return std::nullopt;
}

Check gated_delta_rule_backward_check(const GatedDeltaRuleInputs& in, const Tensor& dy,
                                      const GatedDeltaRuleOptions& options,
                                      const Tensor& d_final_state) {
  if (const Check check = gated_delta_rule_check(in, options)) return check;
  if (dy.defined()) {
    if (const Check check = expect_tensor(in.q, "dy", dy, in.v.shape(), in.v.dtype())) return check;
  }
  if (d_final_state.defined()) {
    return expect_tensor(in.q, "d_final_state", d_final_state, state_shape(in, options),
                         DType::kF32);
  }
  return std::nullopt;
}

Check gated_delta_rule_step_check(const GatedDeltaRuleInputs& in, const Tensor& state,
                                  const GatedDeltaRuleOptions& options) {
  if (options.sequence_starts.defined() || options.initial_state.defined()) {
    return wrong(
        Errc::kArgument,
        "sequence_starts and initial_state must be absent in a step: give the state as state");
  }
  if (const Check check = gated_delta_rule_check(in, options)) return check;
  if (in.q.dim(1) != 1) {
    return wrong(Errc::kShape,
                 "q of a step must be [B, 1, Hk, Dk], got " + to_string(in.q.shape()));
  }
  if (const Check check =
          expect_tensor(in.q, "state", state, state_shape(in, options), DType::kF32)) {
    return check;
  }
  if (!state.is_contiguous()) {
    return wrong(Errc::kShape,
                 "state must be contiguous, for it is changed in place, got strides " +
                     to_string(state.strides()));
  }
  const std::pair<const char*, const Tensor*> read[] = {
      {"q", &in.q}, {"k", &in.k}, {"v", &in.v}, {"decay", &in.decay}, {"beta", &in.beta}};
  for (const auto& [name, t] : read) {
    if (t->has_memory() && t->buffer().address() == state.buffer().address()) {
      return wrong(
          Errc::kArgument,
          "state must lie in a buffer of its own, for it is changed in place, got that of " +
              std::string(name));
    }
  }
  return std::nullopt;
}

GatedDeltaRuleResult gated_delta_rule(CommandEncoder& encoder, const GatedDeltaRuleInputs& in,
                                      const GatedDeltaRuleOptions& options) {
  require(gated_delta_rule_check(in, options));
  const Call c = call_of(encoder, in, options);
  const Tensor starts = contiguous_or_absent(encoder, options.sequence_starts);
  const Tensor initial = contiguous_or_absent(encoder, options.initial_state);
  GatedDeltaRuleResult result{encoder.empty_like(in.v), {}};
  if (options.want_final_state) {
    result.final_state = encoder.empty(state_shape(in, options), DType::kF32);
  }
  if (result.y.size() != 0 || result.final_state.size() != 0) {
    encoder.dispatch(kForward, in.q.dtype(), c.args,
                     {c.q, c.k, c.v, c.decay, c.beta, c.mask, starts, initial},
                     {result.y, result.final_state});
  }
  return result;
}

GatedDeltaRuleGradients gated_delta_rule_backward(CommandEncoder& encoder,
                                                  const GatedDeltaRuleInputs& in, const Tensor& dy,
                                                  const GatedDeltaRuleOptions& options,
                                                  const Tensor& d_final_state) {
  require(gated_delta_rule_backward_check(in, dy, options, d_final_state));
  const Call c = call_of(encoder, in, options);
  const Tensor starts = contiguous_or_absent(encoder, options.sequence_starts);
  const Tensor initial = contiguous_or_absent(encoder, options.initial_state);
  const Tensor dy_rows = contiguous_or_absent(encoder, dy);
  const Tensor d_final = contiguous_or_absent(encoder, d_final_state);
  GatedDeltaRuleGradients grads{encoder.empty_like(in.q),    encoder.empty_like(in.k),
                                encoder.empty_like(in.v),    encoder.empty_like(in.decay),
                                encoder.empty_like(in.beta), {}};
  if (options.initial_state.defined()) {
    grads.d_initial_state = encoder.empty_like(options.initial_state);
  }
  if (grads.dq.size() != 0 || grads.d_initial_state.size() != 0) {
    encoder.dispatch(
        kBackward, in.q.dtype(), c.args,
        {c.q, c.k, c.v, c.decay, c.beta, c.mask, starts, initial, dy_rows, d_final},
        {grads.dq, grads.dk, grads.dv, grads.d_decay, grads.d_beta, grads.d_initial_state});
  }
  return grads;
}

Tensor gated_delta_rule_step(CommandEncoder& encoder, const GatedDeltaRuleInputs& in,
                             const Tensor& state, const GatedDeltaRuleOptions& options) {
  require(gated_delta_rule_step_check(in, state, options));
  const Call c = call_of(encoder, in, options);
  Tensor y = encoder.empty_like(in.v);
  if (y.size() != 0) {
    encoder.dispatch(kStep, in.q.dtype(), c.args, {c.q, c.k, c.v, c.decay, c.beta, c.mask},
                     {y, state});
  }
  return y;
}

namespace {

struct Kept {
  double eps, scale;
  bool log_decay, normalise;
};

void gated_delta_rule_pullback(Pullback& pullback) {
  const Saved& saved = pullback.saved();  // q, k, v, decay, beta, starts, initial state, mask
  const auto& kept = saved.args<Kept>();
  GatedDeltaRuleOptions options;
  options.log_decay = kept.log_decay;
  options.normalise = kept.normalise;
  options.eps = kept.eps;
  options.scale = kept.scale;
  options.sequence_starts = saved[5];
  options.initial_state = saved[6];
  options.mask = saved[7];
  const GatedDeltaRuleGradients grads = gated_delta_rule_backward(
      pullback.encoder(), {saved[0], saved[1], saved[2], saved[3], saved[4]},
      pullback.has_grad(0) ? pullback.grad(0) : Tensor(), options,
      pullback.has_grad(1) ? pullback.grad(1) : Tensor());
  pullback.give(0, grads.dq);
  pullback.give(1, grads.dk);
  pullback.give(2, grads.dv);
  pullback.give(3, grads.d_decay);
  pullback.give(4, grads.d_beta);
  pullback.give(5, grads.d_initial_state);
}

}  // namespace

GatedDeltaRuleResult gated_delta_rule(Tape& tape, const GatedDeltaRuleInputs& in,
                                      const GatedDeltaRuleOptions& options) {
  GatedDeltaRuleResult result = gated_delta_rule(tape.encoder(), in, options);
  const Tensor& initial = options.initial_state;
  if (tape.wants({in.q, in.k, in.v, in.decay, in.beta, initial})) {
    tape.record(
        "gated_delta_rule", gated_delta_rule_pullback,
        {in.q, in.k, in.v, in.decay, in.beta, initial}, {&result.y, &result.final_state},
        Saved({in.q, in.k, in.v, in.decay, in.beta, options.sequence_starts, initial, options.mask},
              Kept{options.eps, options.scale, options.log_decay, options.normalise}));
  }
  return result;
}

}  // namespace mlxtape::ops
