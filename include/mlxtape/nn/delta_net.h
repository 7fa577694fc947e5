// delta_net: the gated delta rule with its projections, convolution, normalisation and gate.
//
// Formula    q, k, v, z, b, a = x·in;  [q | k | v] ← silu(conv1d_depthwise_causal([q | k | v], conv))
//            decay, β = delta_gates(a, b, A_log, dt_bias);  q, k ← q·rsqrt(Σq² + ε)·dk^−½, k·rsqrt(Σk² + ε)
//            y = rms_norm_gated(gated_delta_rule(q, k, v, decay, β), norm, z)·outᵀ
// Layout     x, y: [B, L, H]. The projections by head (qwen3_next): qkvz [2·nk·dk + 2·nv·dv, H], for each key head
//            its rows of q, k, v and z in sequence, and ba [2·nv, H], for each key head its rows of b and a; or by
//            kind (qwen3_5): qkv [2·nk·dk + nv·dv, H], z [nv·dv, H], b and a [nv, H]. conv: [2·nk·dk + nv·dv, K];
//            A_log, dt_bias: [nv]; norm: [dv]; out: [H, nv·dv]. State: conv [B, K−1, 2·nk·dk + nv·dv], the rows
//            before x that the filter still needs; rule [B, nv, dv, dk].
// Types      x and its projections: one of f32, f16, bf16; conv, A_log, dt_bias, norm and the states: as their ops
//            take them
// Limits     ε is norm_eps: 1e-6 in transformers and in mlx-lm from 0.32.2 on, dk·1e-6 before that. An initial state
//            has both parts. No mask and no packed sequences.
#pragma once

#include "mlxtape/nn/linear.h"

namespace mlxtape::nn {

// Either qkvz and ba, or qkv, z, b and a; the others are undefined.
struct DeltaNetWeights {
  Weight qkvz, ba;
  Weight qkv, z, b, a;
  Tensor conv, a_log, dt_bias, norm;
  Weight out;
};

struct DeltaNetShape {
  std::int64_t key_heads, value_heads, key_dim, value_dim;
  double norm_eps = 1e-6;  // of q and k
  float eps = 1e-6F;       // of the norm on the result
};

// The state after a sequence, for the tokens that follow. Undefined: nothing came before.
struct DeltaNetState {
  Tensor conv, rule;
};

struct DeltaNetResult {
  Tensor y;
  DeltaNetState state;  // undefined unless requested
};

Check delta_net_check(const Tensor& x, const DeltaNetWeights& w, const DeltaNetShape& shape,
                      const DeltaNetState& before = {});

// Differentiable in x, the weights and the initial state, through y and the final state.
DeltaNetResult delta_net(Tape& tape, const Tensor& x, const DeltaNetWeights& w,
                         const DeltaNetShape& shape, const DeltaNetState& before = {},
                         bool want_state = false);

// One token per sequence, x [B, 1, H]: the state is updated in place. No gradient.
Tensor delta_net_step(Tape& tape, const Tensor& x, const DeltaNetWeights& w,
                      const DeltaNetShape& shape, const DeltaNetState& state);

}  // namespace mlxtape::nn
