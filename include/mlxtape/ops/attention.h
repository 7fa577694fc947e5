// attention: for every query the mean of the values, weighted by the softmax of its products with the keys.
//
// Formula    s[t,j] = scale·(q_t·k_j) + mask[t,j];  p[t,j] = exp(s[t,j] − lse_t);  y_t = Σ_j p[t,j]·v_j
//            lse_t = log(Σ_j exp s[t,j] + exp sink), the last only with sinks
//            A key does not count if a bool mask is false; causal: if j > i for i = t + keys − queries; with
//            a window also if j ≤ i − window; and if an added mask brings s below −10⁶, next to which f32 would
//            lose the rest of lse. If no key counts, y_t = 0. A sink of −inf is no sink.
// Gradient   D_t = dy_t·y_t;  ds[t,j] = p[t,j]·(dy_t·v_j − D_t)
//            dq_t = scale·Σ_j ds[t,j]·k_j;  dk_j = scale·Σ_t ds[t,j]·q_t;  dv_j = Σ_t p[t,j]·dy_t
//            d_sink = −Σ_t exp(sink − lse_t)·D_t. Heads that share keys: dk and dv are their sums. The mask has none, and
//            must not be watched.
// Layout     q: [B, T, H, D]; k: [B, S, Hk, D]; v: [B, S, Hk, Dv]; y: [B, T, H, Dv]; head h reads key head h/(H/Hk).
//            mask: [B, H, T, S], each axis but the last may be 1; sinks: [H]; lse: [B, T, H]. Packed: no axis B,
//            and sequence_starts [N+1]: sequence n is the queries sequence_starts[n] to sequence_starts[n+1], and
//            the keys by key_starts, or the same. q, k, v may be views whose channels are contiguous, others are
//            copied first; so are, on CUDA in 16 bits with D and Dv multiples of 8, views whose heads are not all aligned
//            to 16 bytes, and such a dy. Saved for backward: q, k, v, y, lse.
// Types      q, k, v, y: one of f32, f16, bf16; mask: bool, f32 or the type of q; sinks, lse: f32; starts: i32,
//            i64. Sums are f32, each result is rounded once; p and ds are f32, on CUDA in 16 bits of that type.
// Cost       2·(D + Dv) operations for each query, head and key that counts, backward 6·D + 4·Dv. Nothing of size
//            [T, S] exists; keys that do not count by causal or window are not visited.
// Limits     D and Dv up to 256; H a multiple of Hk; a window needs causal; no mask with packed sequences. Starts: as for
//            conv1d_depthwise_causal. 0 · inf is NaN: keys and values that do not count must be finite, too.
#pragma once

#include "mlxtape/base/error.h"
#include "mlxtape/core/encoder.h"
#include "mlxtape/tape/tape.h"

namespace mlxtape::ops {

// An undefined tensor means none.
struct AttentionOptions {
  double scale = 0;  // 0: D^−½
  bool causal = false;
  std::int64_t window = 0;  // 0: none
  Tensor mask = {};
  Tensor sinks = {};
  Tensor sequence_starts = {};
  Tensor key_starts = {};
};

struct AttentionResult {
  Tensor y;
  Tensor lse;  // for the gradient
};

struct AttentionGradients {
  Tensor dq, dk, dv;
  Tensor d_sinks;  // undefined without sinks
};

Check attention_check(const Tensor& q, const Tensor& k, const Tensor& v,
                      const AttentionOptions& options = {});
Check attention_backward_check(const Tensor& q, const Tensor& k, const Tensor& v,
                               const AttentionResult& result, const Tensor& dy,
                               const AttentionOptions& options = {});

AttentionResult attention(CommandEncoder& encoder, const Tensor& q, const Tensor& k,
                          const Tensor& v, const AttentionOptions& options = {});
AttentionGradients attention_backward(CommandEncoder& encoder, const Tensor& q, const Tensor& k,
                                      const Tensor& v, const AttentionResult& result,
                                      const Tensor& dy, const AttentionOptions& options = {});
Tensor attention(Tape& tape, const Tensor& q, const Tensor& k, const Tensor& v,
                 const AttentionOptions& options = {});

}  // namespace mlxtape::ops
