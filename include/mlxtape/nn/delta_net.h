// delta_net: a gated delta rule between projections: convolved, normalised, gated.
//
// Formula    q, k, v, z, b, a = x·in;  [q | k | v] ← silu(conv1d_depthwise_causal([q | k | v], conv))
//            decay, β = delta_gates(a, b, A_log, dt_bias);  q, k ← q·rsqrt(Σq² + ε)·dk^−½, k·rsqrt(Σk² + ε)
//            y = rms_norm_gated(gated_delta_rule(q, k, v, decay, β), norm, z)·outᵀ
// Layout     x, y: [B, L, H]. The projections by head (qwen3_next): qkvz [2·nk·dk + 2·nv·dv, H], of each key head its
//            rows of q, k, v and z, one after another, and ba [2·nv, H], of each key head its rows of b and a; or by
//            kind (qwen3_5): qkv [2·nk·dk + nv·dv, H], z [nv·dv, H], b and a [nv, H]. conv: [2·nk·dk + nv·dv, K];
//            A_log, dt_bias: [nv]; norm: [dv]; out: [H, nv·dv]. State: conv [B, K−1, 2·nk·dk + nv·dv], the rows
//            before x that a filter still sees; rule [B, nv, dv, dk].
// Types      x and its projections: f32, f16, bf16, all alike; conv, A_log, dt_bias, norm and the states: as their ops
//            take them
// Limits     ε is norm_eps: 1e-6 in transformers and in mlx-lm from 0.32.2 on, dk·1e-6 before it. A state before has
//            both parts. No mask and no packed sequences.
#pragma once

#include "mlxtape/nn/linear.h"

namespace mlxtape::nn {

// Either qkvz and ba, or qkv, z, b and a; the others are not defined.
struct DeltaNetWeights {
  Weight qkvz, ba;
  Weight qkv, z, b, a;
  Tensor conv, a_log, dt_bias, norm;
  Weight out;
};

struct DeltaNetShape {
  std::int64_t key_heads, value_heads, key_dim, value_dim;
  double norm_eps = 1e-6;  // of q and k
  float eps = 1e-6F;       // of the result's norm
};

// What a sequence was left with, for the tokens after it. Undefined: nothing came before.
struct DeltaNetState {
  Tensor conv, rule;
};

struct DeltaNetResult {
  Tensor y;
  DeltaNetState state;  // undefined unless wanted
};

Check delta_net_check(const Tensor& x, const DeltaNetWeights& w, const DeltaNetShape& shape,
                      const DeltaNetState& before = {});

// Differentiable in x, the weights and the state before, through y and the state after.
DeltaNetResult delta_net(Tape& tape, const Tensor& x, const DeltaNetWeights& w,
                         const DeltaNetShape& shape, const DeltaNetState& before = {},
                         bool want_state = false);

// One token of each sequence, x [B, 1, H]: the state is changed in place. No gradient.
Tensor delta_net_step(Tape& tape, const Tensor& x, const DeltaNetWeights& w,
                      const DeltaNetShape& shape, const DeltaNetState& state);

}  // namespace mlxtape::nn
