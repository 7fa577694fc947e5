#include "mlxtape/ops/attention.h"

#include <cmath>
#include <string>

#include "attention_args.h"
#include "ops/expect.h"
#include "ops/views.h"

namespace mlxtape::ops {

namespace {

constinit const KernelHandle kForward("attention_fwd");
constinit const KernelHandle kBackward("attention_bwd");

constexpr std::int64_t kMostChannels = 256;

Error wrong(Errc code, const std::string& what) { return {code, "attention: " + what}; }

Check expect_tensor(const Tensor& q, const char* name, const Tensor& t, const Shape& shape,
                    DType dtype) {
  return ops::expect_tensor(Beside{"attention", "q", q}, name, t, shape, dtype);
}

// [B, T, H, D], or [T, H, D] with B = 1.
struct Axes {
  std::int64_t batch, tokens, heads, channels;
  explicit Axes(const Tensor& t)
      : batch(t.rank() == 4 ? t.dim(0) : 1),
        tokens(t.dim(t.rank() - 3)),
        heads(t.dim(t.rank() - 2)),
        channels(t.dim(t.rank() - 1)) {}
  Shape shape(std::int64_t rank) const {
    return rank == 4 ? Shape{batch, tokens, heads, channels} : Shape{tokens, heads, channels};
  }
};

Shape lse_shape(const Tensor& q) {
  const Axes a(q);
  return q.rank() == 4 ? Shape{a.batch, a.tokens, a.heads} : Shape{a.tokens, a.heads};
}
Shape y_shape(const Tensor& q, const Tensor& v) {
  Axes a(q);
  a.channels = v.shape().back();
  return a.shape(q.rank());
}

Check check_mask(const Tensor& q, const Tensor& k, const Tensor& mask) {
  const Axes a(q), b(k);
  const std::int64_t sizes[] = {a.batch, a.heads, a.tokens, b.tokens};
  bool fits = mask.rank() == 4;
  for (std::int64_t i = 0; fits && i < 4; ++i) {
    fits = mask.dim(i) == sizes[i] || (i < 3 && mask.dim(i) == 1);
  }
  if (!fits) {
    return wrong(Errc::kShape, "mask must be " +
                                   to_string(Shape{a.batch, a.heads, a.tokens, b.tokens}) +
                                   ", each but the last may be 1, got " + to_string(mask.shape()));
  }
  if (mask.dtype() != DType::kBool && mask.dtype() != DType::kF32 && mask.dtype() != q.dtype()) {
    return wrong(Errc::kDType, std::string("mask must be bool, f32 or the type of q (") +
                                   name_of(q.dtype()) + "), got " + name_of(mask.dtype()));
  }
  if (mask.backend() != q.backend()) {
    return wrong(Errc::kDevice, std::string("mask must be where q is (") + name_of(q.backend()) +
                                    "), got " + name_of(mask.backend()));
  }
  return std::nullopt;
}

// What both kernels are given.
struct Call {
  AttentionArgs args{};
  Tensor q, k, v, mask, sinks, starts, key_starts;
};

Call call_of(CommandEncoder& encoder, const Tensor& q, const Tensor& k, const Tensor& v,
             const AttentionOptions& options) {
  Call call;
  AttentionArgs& args = call.args;
  const Axes a(q), b(k);
  args.batch = a.batch;
  args.queries = a.tokens;
  args.keys = b.tokens;
  args.heads = a.heads;
  args.key_heads = b.heads;
  args.dim = a.channels;
  args.value_dim = v.shape().back();
  call.q = heads_in_packs(encoder, q, args.q);
  call.k = heads_in_packs(encoder, k, args.k);
  call.v = heads_in_packs(encoder, v, args.v);
  args.scale = static_cast<float>(options.scale == 0 ? 1 / std::sqrt(static_cast<double>(args.dim))
                                                     : options.scale);
  args.causal = options.causal ? 1 : 0;
  args.window = options.window;
  if (options.mask.defined()) {
    // Its last axis may have any stride; a mask is large, and often a view of one row or head.
    call.mask = options.mask;
    for (std::int64_t i = 0; i < 4; ++i) {
      args.mask[i] = call.mask.dim(i) == 1 ? 0 : call.mask.strides()[i];
    }
    args.mask_kind = call.mask.dtype() == DType::kBool  ? AttentionMask::kBool
                     : call.mask.dtype() == DType::kF32 ? AttentionMask::kF32
                                                        : AttentionMask::kLikeQ;
  }
  call.sinks = contiguous_or_absent(encoder, options.sinks);
  call.starts = contiguous_or_absent(encoder, options.sequence_starts);
  call.key_starts = contiguous_or_absent(encoder, options.key_starts);
  if (call.starts.defined()) {
    args.sequences = call.starts.dim(0) - 1;
    args.start_bytes = static_cast<std::int32_t>(size_of(call.starts.dtype()));
    if (!call.key_starts.defined()) call.key_starts = call.starts;
  }
  return call;
}

}  // namespace

Check attention_check(const Tensor& q, const Tensor& k, const Tensor& v,
                      const AttentionOptions& options) {
  if (!is_kernel_float(q.dtype())) {
    return wrong(Errc::kDType,
                 std::string("q must be f32, f16 or bf16, got ") + name_of(q.dtype()));
  }
  const Tensor& starts = options.sequence_starts;
  if (starts.defined()) {
    if (const Check check =
            expect_starts({"attention", "q", q}, "[T, H, D]", 3, "sequence_starts", starts)) {
      return check;
    }
    if (options.key_starts.defined()) {
      if (const Check check =
              expect_tensor(q, "key_starts", options.key_starts, starts.shape(), starts.dtype())) {
        return check;
      }
    }
  } else if (q.rank() != 4) {
    return wrong(Errc::kShape, "q must be [B, T, H, D], got " + to_string(q.shape()));
  } else if (options.key_starts.defined()) {
    return wrong(Errc::kArgument, "key_starts must come with sequence_starts, got it alone");
  }
  if (k.rank() != q.rank() || v.rank() != q.rank()) {
    return wrong(Errc::kShape, "k and v must have the axes of q " + to_string(q.shape()) +
                                   ", got " + to_string(k.shape()) + " and " +
                                   to_string(v.shape()));
  }
  const Axes a(q), b(k), c(v);
  if (a.heads < 1 || b.heads < 1 || a.heads % b.heads != 0) {
    return wrong(Errc::kShape, "heads must be a multiple of key heads, at least 1 each, got " +
                                   std::to_string(a.heads) + " and " + std::to_string(b.heads));
  }
  if (a.channels < 1 || a.channels > kMostChannels || c.channels < 1 ||
      c.channels > kMostChannels) {
    return wrong(Errc::kShape, "D and Dv must be from 1 to 256, got " + std::to_string(a.channels) +
                                   " and " + std::to_string(c.channels));
  }
  Axes keys = b;
  keys.batch = a.batch;
  keys.channels = a.channels;
  if (const Check check = expect_tensor(q, "k", k, keys.shape(q.rank()), q.dtype())) return check;
  keys.channels = c.channels;
  if (const Check check = expect_tensor(q, "v", v, keys.shape(q.rank()), q.dtype())) return check;
  if (!std::isfinite(options.scale)) {
    return wrong(Errc::kArgument, "scale must be finite, got " + std::to_string(options.scale));
  }
  if (options.window < 0 || (options.window > 0 && !options.causal)) {
    return wrong(Errc::kArgument, (options.causal ? "window must be at least 0, got "
                                                  : "window must be 0 without causal, got ") +
                                      std::to_string(options.window));
  }
  if (options.mask.defined()) {
    if (starts.defined()) {
      return wrong(Errc::kArgument,
                   "mask must be absent with sequence_starts: pad to [B, T, H, D] for one");
    }
    if (const Check check = check_mask(q, k, options.mask)) return check;
  }
  if (options.sinks.defined()) {
    return expect_tensor(q, "sinks", options.sinks, {a.heads}, DType::kF32);
  }
  return std::nullopt;
}

Check attention_backward_check(const Tensor& q, const Tensor& k, const Tensor& v,
                               const AttentionResult& result, const Tensor& dy,
                               const AttentionOptions& options) {
  if (const Check check = attention_check(q, k, v, options)) return check;
  if (const Check check = expect_tensor(q, "y", result.y, y_shape(q, v), q.dtype())) return check;
  if (const Check check = expect_tensor(q, "lse", result.lse, lse_shape(q), DType::kF32)) {
    return check;
  }
  return expect_tensor(q, "dy", dy, y_shape(q, v), q.dtype());
}

AttentionResult attention(CommandEncoder& encoder, const Tensor& q, const Tensor& k,
                          const Tensor& v, const AttentionOptions& options) {
  require(attention_check(q, k, v, options));
  const Call c = call_of(encoder, q, k, v, options);
  AttentionResult result{encoder.empty(y_shape(q, v), q.dtype()),
                         encoder.empty(lse_shape(q), DType::kF32)};
  if (result.y.size() != 0) {
    encoder.dispatch(kForward, q.dtype(), c.args,
                     {c.q, c.k, c.v, c.mask, c.sinks, c.starts, c.key_starts},
                     {result.y, result.lse});
  }
  return result;
}

AttentionGradients attention_backward(CommandEncoder& encoder, const Tensor& q, const Tensor& k,
                                      const Tensor& v, const AttentionResult& result,
                                      const Tensor& dy, const AttentionOptions& options) {
  require(attention_backward_check(q, k, v, result, dy, options));
  const Call c = call_of(encoder, q, k, v, options);
  const Tensor y = encoder.contiguous(result.y), lse = encoder.contiguous(result.lse);
  const Tensor dy_rows = in_packs(encoder, dy);
  AttentionGradients grads{encoder.empty_like(q), encoder.empty_like(k), encoder.empty_like(v), {}};
  if (options.sinks.defined()) grads.d_sinks = encoder.empty_like(options.sinks);
  if (grads.dq.size() + grads.dk.size() != 0) {
    encoder.dispatch(kBackward, q.dtype(), c.args,
                     {c.q, c.k, c.v, c.mask, c.sinks, c.starts, c.key_starts, y, lse, dy_rows},
                     {grads.dq, grads.dk, grads.dv, grads.d_sinks});
  } else if (options.sinks.defined()) {
    grads.d_sinks = encoder.zeros(options.sinks.shape(), DType::kF32);
  }
  return grads;
}

namespace {

struct Kept {
  double scale;
  std::int64_t window;
  bool causal;
};

void attention_pullback(Pullback& pullback) {
  const Saved& saved = pullback.saved();  // q, k, v, y, lse, mask, sinks, starts, key starts
  const auto& kept = saved.args<Kept>();
  AttentionOptions options;
  options.scale = kept.scale;
  options.window = kept.window;
  options.causal = kept.causal;
  options.mask = saved[5];
  options.sinks = saved[6];
  options.sequence_starts = saved[7];
  options.key_starts = saved[8];
  const AttentionGradients grads =
      attention_backward(pullback.encoder(), saved[0], saved[1], saved[2], {saved[3], saved[4]},
                         pullback.grad(), options);
  pullback.give(0, grads.dq);
  pullback.give(1, grads.dk);
  pullback.give(2, grads.dv);
  pullback.give(3, grads.d_sinks);
}

}  // namespace

Tensor attention(Tape& tape, const Tensor& q, const Tensor& k, const Tensor& v,
                 const AttentionOptions& options) {
  if (options.mask.defined() && tape.wants({options.mask})) {
    throw wrong(Errc::kNoGradient,
                "mask must not be watched or made of what is: no gradient flows to it");
  }
  AttentionResult result = attention(tape.encoder(), q, k, v, options);
  if (tape.wants({q, k, v, options.sinks})) {
    tape.record("attention", attention_pullback, {q, k, v, options.sinks}, {&result.y},
                Saved({q, k, v, result.y, result.lse, options.mask, options.sinks,
                       options.sequence_starts, options.key_starts},
                      Kept{options.scale, options.window, options.causal}));
  }
  return result.y;
}

}  // namespace mlxtape::ops
