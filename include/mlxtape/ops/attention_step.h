// attention_step: decoding: appends the keys and values of a few new tokens to a cache and attends to it.
//
// Formula    n = lengths[b];  keys_{n+t} = k_t and values_{n+t} = v_t for t = 0 … T−1, in place; then, for i = n + t,
//            s[t,j] = scale·(q_t·keys_j);  p[t,j] = exp(s[t,j] − lse_t);  y_t = Σ_j p[t,j]·values_j  over j = 0 … i,
//            with a window over i − window < j ≤ i.  lse_t = log(Σ_j exp s[t,j] + exp sink), the last only with sinks;
//            a sink of −inf is no sink.
// Gradient   none: not for tapes.
// Layout     q: [B, T, H, D]; k: [B, T, Hk, D]; v: [B, T, Hk, Dv]; y: [B, T, H, Dv]; head h reads key head h/(H/Hk).
//            keys: [B, C, Hk, D] and values: [B, C, Hk, Dv], contiguous, each in a buffer of its own; the first n rows of
//            each sequence, as a view, are keys and values for attention. lengths: [B]; sinks: [H]. q, k, v may be views
//            whose channels are contiguous, others are copied first.
// Types      q, k, v, keys, values, y: one of f32, f16, bf16; sinks: f32; lengths: i32. Sums are f32, y is rounded
//            once; p is f32, on CUDA in 16 bits of that type.
// Cost       reads (n + T)·Hk·(D + Dv) elements for each sequence, once for all heads that share them and, on CUDA and
//            Metal, for each 8 queries of those heads; 2·(D + Dv) operations for each query, head and key that counts.
// Limits     T from 1 to 16 and at most C; C up to 2^30; D and Dv up to 256; H a multiple of Hk. lengths are not changed, and
//            are read when the kernel runs: a captured step may be replayed while they grow. A length outside [0, C − T] is
//            clamped to it, so that a full cache loses its last T rows. Rows from n + T on, and those before every window,
//            are never read. 0 · inf is NaN: if T > 1, all new keys and values must be finite.
#pragma once

#include "mlxtape/base/error.h"
#include "mlxtape/core/encoder.h"

namespace mlxtape::ops {

struct AttentionCache {
  Tensor keys, values;  // updated in place
  Tensor lengths;       // rows of each sequence before the step
};

struct AttentionStepOptions {
  double scale = 0;         // 0: D^−½
  std::int64_t window = 0;  // 0: none
  Tensor sinks = {};        // undefined: none
};

Check attention_step_check(const Tensor& q, const Tensor& k, const Tensor& v,
                           const AttentionCache& cache, const AttentionStepOptions& options = {});
Tensor attention_step(CommandEncoder& encoder, const Tensor& q, const Tensor& k, const Tensor& v,
                      const AttentionCache& cache, const AttentionStepOptions& options = {});

}  // namespace mlxtape::ops
