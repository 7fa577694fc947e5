#include "mlxtape/nn/self_attention.h"

#include "expect.h"
#include "mlxtape/ops/attention.h"
#include "mlxtape/ops/attention_step.h"
#include "mlxtape/ops/elementwise.h"
#include "mlxtape/ops/layout.h"
#include "mlxtape/ops/rms_norm.h"
#include "mlxtape/ops/rope.h"

namespace mlxtape::nn {

namespace {

constexpr const char* kBlock = "self_attention";

// [B, L, heads, D], rotated by its positions; rope counts them along the axis before the channels.
Tensor rotated(Tape& tape, const Tensor& x, const Rope& rope, const SelfAttentionCache* cache) {
  if (rope.dims == 0) return x;  // to the op 0 means all of them
  ops::RopeOptions options;
  options.dims = rope.dims;
  options.base = rope.base;
  options.scale = rope.scale;
  options.periods = rope.periods;
  if (cache != nullptr) {
    options.offset = cache->start;
    options.offsets = cache->lengths;
  }
  const Tensor gained = rope.gain.defined() ? ops::multiply(tape, x, rope.gain) : x;
  const Tensor by_head = ops::transpose(tape, gained, {0, 2, 1, 3});
  return ops::transpose(tape, ops::rope(tape, by_head, options), {0, 2, 1, 3});
}

// The new tokens' among all that the cache has then.
Tensor attend(Tape& tape, const Tensor& q, const Tensor& k, const Tensor& v,
              const SelfAttentionShape& shape, const SelfAttentionCache* cache) {
  ops::AttentionOptions options;
  options.causal = true;
  options.scale = shape.scale;
  options.window = shape.window;
  if (cache == nullptr) return ops::attention(tape, q, k, v, options);
  if (tape.wants({q, k, v})) {
    throw Error(Errc::kNoGradient,
                "self_attention: a cache is for inference, but a gradient is wanted: call it "
                "under Tape::NoGrad, or without a cache");
  }
  CommandEncoder& encoder = tape.encoder();
  if (cache->lengths.defined()) {
    return ops::attention_step(encoder, q, k, v, {cache->keys, cache->values, cache->lengths},
                               {shape.scale, shape.window});
  }
  const std::int64_t end = cache->start + k.dim(1);
  encoder.copy(k, cache->keys.slice(1, cache->start, end));
  encoder.copy(v, cache->values.slice(1, cache->start, end));
  return ops::attention(encoder, q, cache->keys.slice(1, 0, end), cache->values.slice(1, 0, end),
                        options)
      .y;
}

Check check_cache(const Tensor& x, const SelfAttentionShape& s, const SelfAttentionCache& cache) {
  const std::int64_t batch = x.dim(0);
  if (const Check check =
          expect_weights(kBlock, x,
                         {{"the cache's keys", cache.keys, {batch, kAny, s.key_heads, s.head_dim}},
                          {"the cache's values",
                           cache.values,
                           {batch, cache.keys.dim(1), s.key_heads, s.head_dim}}})) {
    return check;
  }
  if (cache.lengths.defined()) {
    if (cache.start != 0) {
      return Error(Errc::kArgument, "self_attention: a cache has a start or lengths, not both");
    }
    return expect_weights(kBlock, x,
                          {{"the cache's lengths", cache.lengths, {batch}, DType::kI32}});
  }
  if (cache.start < 0 || cache.start + x.dim(1) > cache.keys.dim(1)) {
    return Error(Errc::kArgument, "self_attention: a cache of " +
                                      std::to_string(cache.keys.dim(1)) +
                                      " tokens has no room for " + std::to_string(x.dim(1)) +
                                      " after " + std::to_string(cache.start));
  }
  return std::nullopt;
}

Check check_norms(const Tensor& x, const SelfAttentionWeights& w, std::int64_t head_dim) {
  if (!w.q_norm.defined()) return expect_absent(kBlock, {{"k_norm", w.k_norm}}, "without q_norm");
  return expect_weights(kBlock, x,
                        {{"q_norm", w.q_norm, {head_dim}, w.q_norm.dtype()},
                         {"k_norm", w.k_norm, {head_dim}, w.k_norm.dtype()}});
}

Check check_biases(const Tensor& x, const SelfAttentionWeights& w) {
  if (!w.q_bias.defined()) {
    return expect_absent(kBlock, {{"k_bias", w.k_bias}, {"v_bias", w.v_bias}, {"o_bias", w.o_bias}},
                         "without q_bias");
  }
  return expect_weights(kBlock, x,
                        {{"q_bias", w.q_bias, {w.q.shape()[0]}},
                         {"k_bias", w.k_bias, {w.k.shape()[0]}},
                         {"v_bias", w.v_bias, {w.v.shape()[0]}},
                         {"o_bias", w.o_bias, {w.o.shape()[0]}}});
}

}  // namespace

Check self_attention_check(const Tensor& x, const SelfAttentionWeights& w,
                           const SelfAttentionShape& s, const SelfAttentionCache* cache) {
  if (const Check check = expect_tokens(kBlock, x)) return check;
  if (s.heads < 1 || s.key_heads < 1 || s.head_dim < 1 || s.heads % s.key_heads != 0) {
    return Error(Errc::kArgument,
                 "self_attention: heads must be a multiple of key_heads and no size below 1, got " +
                     std::to_string(s.heads) + " and " + std::to_string(s.key_heads) + " of " +
                     std::to_string(s.head_dim));
  }
  if (s.rope.dims < 0 || s.rope.dims > s.head_dim || s.rope.dims % 2 != 0) {
    return Error(Errc::kArgument, "self_attention: rope.dims must be even and from 0 to head_dim " +
                                      std::to_string(s.head_dim) + ", got " +
                                      std::to_string(s.rope.dims));
  }
  const std::int64_t width = x.shape().back(), queries = s.heads * s.head_dim;
  const std::int64_t keys = s.key_heads * s.head_dim;
  if (const Check check = expect_weights(kBlock, x,
                                         {{"q", w.q, {(s.gated ? 2 : 1) * queries, width}},
                                          {"k", w.k, {keys, width}},
                                          {"v", w.v, {keys, width}},
                                          {"o", w.o, {width, queries}}})) {
    return check;
  }
  if (const Check check = check_norms(x, w, s.head_dim)) return check;
  if (s.window < 0) {
    return Error(Errc::kArgument,
                 "self_attention: window must be at least 0, got " + std::to_string(s.window));
  }
  if (const Check check = check_biases(x, w)) return check;
  if (s.rope.gain.defined()) {
    if (const Check check = expect_weights(kBlock, x, {{"rope.gain", s.rope.gain, {s.head_dim}}})) {
      return check;
    }
  }
  return cache == nullptr ? std::nullopt : check_cache(x, s, *cache);
}

Tensor self_attention(Tape& tape, const Tensor& x, const SelfAttentionWeights& w,
                      const SelfAttentionShape& shape, const SelfAttentionCache* cache) {
  require(self_attention_check(x, w, shape, cache));
  const std::int64_t batch = x.shape()[0], tokens = x.shape()[1], dim = shape.head_dim;
  const auto project = [&](const Weight& weight, const Tensor& bias, std::int64_t heads) {
    const Tensor all = linear(tape, x, weight, bias);
    return ops::reshape(tape, all, {batch, tokens, heads, all.shape().back() / heads});
  };
  Tensor q = project(w.q, w.q_bias, shape.heads), gate;
  if (shape.gated) {
    const auto query_and_gate = ops::split(tape, q, 2, -1);
    q = query_and_gate[0];
    gate = query_and_gate[1];
  }
  Tensor k = project(w.k, w.k_bias, shape.key_heads);
  if (w.q_norm.defined()) {
    q = ops::rms_norm(tape, q, w.q_norm, shape.eps);
    k = ops::rms_norm(tape, k, w.k_norm, shape.eps);
  }
  const Tensor v = project(w.v, w.v_bias, shape.key_heads);
  Tensor seen = attend(tape, rotated(tape, q, shape.rope, cache),
                       rotated(tape, k, shape.rope, cache), v, shape, cache);
  if (shape.gated) seen = ops::multiply(tape, seen, ops::sigmoid(tape, gate));
  return linear(tape, ops::reshape(tape, seen, {batch, tokens, shape.heads * dim}), w.o, w.o_bias);
}

}  // namespace mlxtape::nn
