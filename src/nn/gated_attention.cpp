#include "mlxtape/nn/gated_attention.h"

#include "expect.h"
#include "mlxtape/nn/linear.h"
#include "mlxtape/ops/attention.h"
#include "mlxtape/ops/elementwise.h"
#include "mlxtape/ops/layout.h"
#include "mlxtape/ops/rms_norm.h"
#include "mlxtape/ops/rope.h"

namespace mlxtape::nn {

namespace {

// [B, L, heads, D], its positions turned; rope counts them along the axis before the channels.
Tensor turned(Tape& tape, const Tensor& x, const GatedAttentionShape& shape) {
  if (shape.rope_dims == 0) return x;  // to rope 0 means all of them
  ops::RopeOptions options;
  options.dims = shape.rope_dims;
  options.base = shape.rope_base;
  const Tensor by_head = ops::transpose(tape, x, {0, 2, 1, 3});
  return ops::transpose(tape, ops::rope(tape, by_head, options), {0, 2, 1, 3});
}

}  // namespace

Check gated_attention_check(const Tensor& x, const GatedAttentionWeights& w,
                            const GatedAttentionShape& s) {
  if (const Check check = expect_tokens("gated_attention", x)) return check;
  if (s.heads < 1 || s.key_heads < 1 || s.head_dim < 1 || s.heads % s.key_heads != 0) {
    return Error(
        Errc::kArgument,
        "gated_attention: heads must be a multiple of key_heads and no size below 1, got " +
            std::to_string(s.heads) + " and " + std::to_string(s.key_heads) + " of " +
            std::to_string(s.head_dim));
  }
  if (s.rope_dims < 0 || s.rope_dims > s.head_dim || s.rope_dims % 2 != 0) {
    return Error(Errc::kArgument,
                 "gated_attention: rope_dims must be even and from 0 to head_dim " +
                     std::to_string(s.head_dim) + ", got " + std::to_string(s.rope_dims));
  }
  const std::int64_t width = x.shape().back(), queries = s.heads * s.head_dim;
  const std::int64_t keys = s.key_heads * s.head_dim;
  return expect_weights("gated_attention", x,
                        {{"q", w.q, {2 * queries, width}},
                         {"k", w.k, {keys, width}},
                         {"v", w.v, {keys, width}},
                         {"o", w.o, {width, queries}},
                         {"q_norm", w.q_norm, {s.head_dim}, w.q_norm.dtype()},
                         {"k_norm", w.k_norm, {s.head_dim}, w.k_norm.dtype()}});
}

Tensor gated_attention(Tape& tape, const Tensor& x, const GatedAttentionWeights& w,
                       const GatedAttentionShape& shape) {
  require(gated_attention_check(x, w, shape));
  const std::int64_t batch = x.shape()[0], tokens = x.shape()[1], dim = shape.head_dim;
  const auto project = [&](const Tensor& weight, std::int64_t heads, std::int64_t channels) {
    return ops::reshape(tape, linear(tape, x, weight), {batch, tokens, heads, channels});
  };
  const auto query_and_gate = ops::split(tape, project(w.q, shape.heads, 2 * dim), 2, -1);
  const Tensor q = ops::rms_norm(tape, query_and_gate[0], w.q_norm, shape.eps);
  const Tensor k = ops::rms_norm(tape, project(w.k, shape.key_heads, dim), w.k_norm, shape.eps);
  ops::AttentionOptions options;
  options.causal = true;
  const Tensor seen = ops::attention(tape, turned(tape, q, shape), turned(tape, k, shape),
                                     project(w.v, shape.key_heads, dim), options);
  const Tensor open = ops::multiply(tape, seen, ops::sigmoid(tape, query_and_gate[1]));
  return linear(tape, ops::reshape(tape, open, {batch, tokens, shape.heads * dim}), w.o);
}

}  // namespace mlxtape::nn
