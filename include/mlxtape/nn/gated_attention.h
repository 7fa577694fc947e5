// gated_attention: attention whose result a gate of its own lets through, with normalised queries and keys.
//
// Formula    [q | gate] = x·qᵀ, head by head;  k = x·kᵀ;  v = x·vᵀ
//            q, k ← rope(rms_norm(q, q_norm)), rope(rms_norm(k, k_norm)), the first rope_dims channels turned
//            y = (attention(q, k, v)∘σ(gate))·oᵀ, causal
// Layout     x, y: [B, L, H]; q: [heads·2·D, H], of each head D rows of queries, then D of the gate; k, v: [key_heads·D,
//            H]; o: [H, heads·D]; q_norm, k_norm: [D]
// Types      x and the projections: f32, f16, bf16, all alike; q_norm, k_norm: as rms_norm takes them
// Limits     rope_dims even, from 0 to D. Positions count from 0: no cache, no packed sequences, no biases.
#pragma once

#include "mlxtape/tape/tape.h"

namespace mlxtape::nn {

struct GatedAttentionWeights {
  Tensor q, k, v, o, q_norm, k_norm;
};

struct GatedAttentionShape {
  std::int64_t heads, key_heads, head_dim, rope_dims;
  double rope_base = 10000;
  float eps = 1e-6F;
};

Check gated_attention_check(const Tensor& x, const GatedAttentionWeights& w,
                            const GatedAttentionShape& shape);

Tensor gated_attention(Tape& tape, const Tensor& x, const GatedAttentionWeights& w,
                       const GatedAttentionShape& shape);

}  // namespace mlxtape::nn
