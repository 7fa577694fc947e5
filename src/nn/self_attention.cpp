#include "mlxtape/nn/self_attention.h"

#include <algorithm>

#include "expect.h"
#include "mlxtape/ops/attention.h"
#include "mlxtape/ops/attention_step.h"
#include "mlxtape/ops/elementwise.h"
#include "mlxtape/ops/layout.h"
#include "mlxtape/ops/rms_norm.h"
#include "mlxtape/ops/rope.h"
#include "mlxtape/ops/take.h"

namespace mlxtape::nn {

namespace {

constexpr const char* kBlock = "self_attention";

// [B, L, heads, D], rotated by its positions; rope counts them along the axis before the channels.
Tensor rotated(Tape& tape, const Tensor& x, const Rope& rope, const SelfAttentionPast& past) {
  if (rope.dims == 0) return x;  // to the op 0 means all of them
  ops::RopeOptions options;
  options.dims = rope.dims;
  options.base = rope.base;
  options.scale = rope.scale;
  options.periods = rope.periods;
  options.traditional = rope.traditional;
  if (past.mode == Mode::kPrefill) options.offset = past.start;
  if (past.mode == Mode::kStep) options.offsets = past.lengths;
  const Tensor gained = rope.gain.defined() ? ops::multiply(tape, x, rope.gain) : x;
  const Tensor by_head = ops::transpose(tape, gained, {0, 2, 1, 3});
  return ops::transpose(tape, ops::rope(tape, by_head, options), {0, 2, 1, 3});
}

// Calls function(rows of the ring, positions) with the runs of rows that positions [from, to) lie in.
template <class Function>
void each_run(std::int64_t ring, std::int64_t from, std::int64_t to, const Function& function) {
  while (from < to) {
    const std::int64_t row = from % ring, count = std::min(to - from, ring - row);
    function(row, from, count);
    from += count;
  }
}

// The rows that the chunk's first query still sees, and the chunk's own, in the order of their positions.
Tensor with_past(CommandEncoder& encoder, const Tensor& own, const Tensor& ring,
                 std::int64_t window, std::int64_t start) {
  const std::int64_t rows = window - 1, before = std::min(start, rows), tokens = own.dim(1);
  if (before == 0) return own;
  Shape shape = own.shape();
  shape[1] = before + tokens;
  const Tensor all = encoder.empty(shape, own.dtype());
  each_run(rows, start - before, start, [&](std::int64_t row, std::int64_t at, std::int64_t count) {
    const std::int64_t to = at - (start - before);
    encoder.copy(ring.slice(1, row, row + count), all.slice(1, to, to + count));
  });
  encoder.copy(own, all.slice(1, before, before + tokens));
  return all;
}

// The chunk's last rows, where later ones look for them.
void keep_last(CommandEncoder& encoder, const Tensor& own, const Tensor& ring, std::int64_t window,
               std::int64_t start) {
  const std::int64_t rows = window - 1, end = start + own.dim(1);
  if (rows == 0) return;
  each_run(rows, std::max(start, end - rows), end,
           [&](std::int64_t row, std::int64_t at, std::int64_t count) {
             encoder.copy(own.slice(1, at - start, at - start + count),
                          ring.slice(1, row, row + count));
           });
}

Tensor prefill(CommandEncoder& encoder, const Tensor& q, const Tensor& k, const Tensor& v,
               const ops::AttentionOptions& options, const SelfAttentionPast& past) {
  if (past.ring) {
    const Tensor keys = with_past(encoder, k, past.keys, options.window, past.start);
    const Tensor values = with_past(encoder, v, past.values, options.window, past.start);
    keep_last(encoder, k, past.keys, options.window, past.start);
    keep_last(encoder, v, past.values, options.window, past.start);
    return ops::attention(encoder, q, keys, values, options).y;
  }
  const std::int64_t end = past.start + k.dim(1);
  encoder.copy(k, past.keys.slice(1, past.start, end));
  encoder.copy(v, past.values.slice(1, past.start, end));
  return ops::attention(encoder, q, past.keys.slice(1, 0, end), past.values.slice(1, 0, end),
                        options)
      .y;
}

Tensor step(CommandEncoder& encoder, const Tensor& q, const Tensor& k, const Tensor& v,
            ops::AttentionStepOptions options, const SelfAttentionPast& past) {
  // Of a ring that is full the op puts the new token into the last row, as into any cache that is full, and sees all rows.
  if (past.ring) options.window = 0;
  Tensor y = ops::attention_step(encoder, q, k, v, {past.keys, past.values, past.lengths}, options);
  if (!past.places.defined()) return y;
  // The same op writes it to its place for those that come later: with a window of 1 that is all it does.
  options.window = 1;
  const Tensor place = ops::take(encoder, past.places, past.lengths, 0);
  ops::attention_step(encoder, q, k, v, {past.keys, past.values, place}, options);
  return y;
}

// The new tokens' among all that there are then.
Tensor attend(Tape& tape, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& sinks,
              const SelfAttentionShape& shape, const SelfAttentionPast& past) {
  ops::AttentionOptions options;
  options.causal = true;
  options.scale = shape.scale;
  options.window = shape.window;
  if (sinks.defined()) options.sinks = ops::cast(tape, sinks, DType::kF32);
  if (past.mode == Mode::kTrain) return ops::attention(tape, q, k, v, options);
  if (tape.wants({q, k, v, options.sinks})) {
    throw Error(Errc::kNoGradient,
                "self_attention: a cache is for inference, but a gradient is wanted: call it "
                "under Tape::NoGrad, or without a cache");
  }
  CommandEncoder& encoder = tape.encoder();
  if (past.mode == Mode::kPrefill) return prefill(encoder, q, k, v, options, past);
  return step(encoder, q, k, v, {shape.scale, shape.window, options.sinks}, past);
}

Error wrong_past(const std::string& what) { return {Errc::kArgument, "self_attention: " + what}; }

Check check_ring(const Tensor& x, const SelfAttentionShape& s, const SelfAttentionPast& past) {
  if (s.window < 1 || past.keys.dim(1) > s.window) {
    return wrong_past("a ring must have at most as many rows as the window " +
                      std::to_string(s.window) + ", got " + std::to_string(past.keys.dim(1)));
  }
  if (past.mode == Mode::kStep && past.places.defined() && x.dim(1) != 1) {
    return wrong_past("a ring takes one token a step, got " + std::to_string(x.dim(1)));
  }
  if (past.places.defined() != (past.keys.dim(1) == s.window && s.window > 1)) {
    return wrong_past(
        "places must be given of a ring of as many rows as the window, and of no other");
  }
  if (!past.places.defined()) return std::nullopt;
  return expect_weights(kBlock, x, {{"the ring's places", past.places, {kAny}, DType::kI32}});
}

Check check_past(const Tensor& x, const SelfAttentionShape& s, const SelfAttentionPast& past) {
  if (past.mode == Mode::kTrain) {
    return expect_absent(kBlock,
                         {{"the cache's keys", past.keys},
                          {"the cache's values", past.values},
                          {"the cache's lengths", past.lengths}},
                         "in training");
  }
  const std::int64_t batch = x.dim(0);
  if (const Check check = expect_weights(
          kBlock, x, {{"the cache's keys", past.keys, {batch, kAny, s.key_heads, s.head_dim}}})) {
    return check;
  }
  if (const Check check = expect_weights(kBlock, x,
                                         {{"the cache's values",
                                           past.values,
                                           {batch, past.keys.dim(1), s.key_heads, s.head_dim}}})) {
    return check;
  }
  if (past.ring) {
    if (const Check check = check_ring(x, s, past)) return check;
  }
  if (past.mode == Mode::kStep) {
    if (past.start != 0) return wrong_past("a step has lengths and no start");
    return expect_weights(kBlock, x, {{"the cache's lengths", past.lengths, {batch}, DType::kI32}});
  }
  if (past.lengths.defined()) return wrong_past("a prefill has a start and no lengths");
  const bool is_full = past.ring && past.keys.dim(1) == s.window;
  if (past.start < 0 || (!is_full && past.start + x.dim(1) > past.keys.dim(1))) {
    return wrong_past("a cache of " + std::to_string(past.keys.dim(1)) +
                      " tokens has no room for " + std::to_string(x.dim(1)) + " after " +
                      std::to_string(past.start));
  }
  return std::nullopt;
}

Check check_norms(const Tensor& x, const SelfAttentionWeights& w, std::int64_t head_dim) {
  if (!w.q_norm.defined()) return expect_absent(kBlock, {{"k_norm", w.k_norm}}, "without q_norm");
  return expect_weights(kBlock, x,
                        {{"q_norm", w.q_norm, {head_dim}, w.q_norm.dtype()},
                         {"k_norm", w.k_norm, {head_dim}, w.k_norm.dtype()}});
}

Check check_biases(const Tensor& x, const SelfAttentionWeights& w, std::int64_t heads) {
  return expect_those_given(kBlock, x,
                            {{"q_bias", w.q_bias, {w.q.shape()[0]}},
                             {"k_bias", w.k_bias, {w.k.shape()[0]}},
                             {"v_bias", w.v_bias, {w.v.shape()[0]}},
                             {"o_bias", w.o_bias, {w.o.shape()[0]}},
                             {"sinks", w.sinks, {heads}, w.sinks.dtype()}});
}

}  // namespace

Check self_attention_check(const Tensor& x, const SelfAttentionWeights& w,
                           const SelfAttentionShape& s, const SelfAttentionPast& past) {
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
  if (const Check check = check_biases(x, w, s.heads)) return check;
  if (s.rope.gain.defined()) {
    if (const Check check = expect_weights(kBlock, x, {{"rope.gain", s.rope.gain, {s.head_dim}}})) {
      return check;
    }
  }
  return check_past(x, s, past);
}

Tensor self_attention(Tape& tape, const Tensor& x, const SelfAttentionWeights& w,
                      const SelfAttentionShape& shape, const SelfAttentionPast& past) {
  require(self_attention_check(x, w, shape, past));
  const std::int64_t batch = x.shape()[0], tokens = x.shape()[1], dim = shape.head_dim;
  const std::vector<Tensor> projected =
      linears(tape, x, {{w.q, w.q_bias}, {w.k, w.k_bias}, {w.v, w.v_bias}});
  const auto by_heads = [&](const Tensor& all, std::int64_t heads) {
    return ops::reshape(tape, all, {batch, tokens, heads, all.shape().back() / heads});
  };
  Tensor q = by_heads(projected[0], shape.heads), gate;
  if (shape.gated) {
    const auto query_and_gate = ops::split(tape, q, 2, -1);
    q = query_and_gate[0];
    gate = query_and_gate[1];
  }
  Tensor k = by_heads(projected[1], shape.key_heads);
  if (w.q_norm.defined()) {
    q = ops::rms_norm(tape, q, w.q_norm, shape.eps);
    k = ops::rms_norm(tape, k, w.k_norm, shape.eps);
  }
  const Tensor v = by_heads(projected[2], shape.key_heads);
  Tensor seen = attend(tape, rotated(tape, q, shape.rope, past), rotated(tape, k, shape.rope, past),
                       v, w.sinks, shape, past);
  if (shape.gated) seen = ops::multiply(tape, seen, ops::sigmoid(tape, gate));
  return linear(tape, ops::reshape(tape, seen, {batch, tokens, shape.heads * dim}), w.o, w.o_bias);
}

}  // namespace mlxtape::nn
