// self_attention: attention among the tokens of a sequence with its projections, optionally with normalised queries and keys
// and a gate on the result.
//
// Formula    [q | gate] = x·qᵀ, head by head, or q = x·qᵀ;  k = x·kᵀ;  v = x·vᵀ; each with its bias, if given
//            q, k ← rope(rms_norm(q, q_norm)), rope(rms_norm(k, k_norm)), the first rope.dims channels rotated; without norms
//            rope(q), rope(k)
//            y = (attention(q, k, v)∘σ(gate))·oᵀ, causal, over the last window tokens if there is a window
// Layout     x, y: [B, L, H]; q: [heads·2·D, H], for each head D rows of queries, then D of the gate; not gated:
//            [heads·D, H]; k, v: [key_heads·D, H]; o: [H, heads·D]; q_norm, k_norm: [D]; biases: as many as rows
// Types      x and the projections: one of f32, f16, bf16; q_norm, k_norm: as for rms_norm
// Limits     rope.dims even, from 0 to D. No packed sequences. With a cache there is no gradient.
#pragma once

#include "mlxtape/nn/linear.h"

namespace mlxtape::nn {

struct SelfAttentionWeights {
  Weight q, k, v, o;
  Tensor q_norm, k_norm;                                      // both or none
  Tensor q_bias = {}, k_bias = {}, v_bias = {}, o_bias = {};  // all or none
};

struct Rope {
  std::int64_t dims = 0;  // 0: nothing is rotated
  double base = 10000, scale = 1;
  Tensor periods = {};  // [dims/2], replace base and scale, as for ops::rope
  Tensor gain = {};     // [D], of x's type: factors of the channels before they are rotated
};

struct SelfAttentionShape {
  std::int64_t heads, key_heads, head_dim;
  bool gated = true;
  Rope rope = {};
  float eps = 1e-6F;
  double scale = 0;         // of scores; 0: head_dim^−½
  std::int64_t window = 0;  // 0: none
};

// The keys and values of the tokens before x. keys, values: [B, capacity, key_heads, D], updated in place. The number of
// earlier tokens is start in every sequence, or lengths [B] i32 on the device, for up to 16 new tokens.
struct SelfAttentionCache {
  Tensor keys, values;
  std::int64_t start = 0;
  Tensor lengths = {};
};

Check self_attention_check(const Tensor& x, const SelfAttentionWeights& w,
                           const SelfAttentionShape& shape,
                           const SelfAttentionCache* cache = nullptr);

Tensor self_attention(Tape& tape, const Tensor& x, const SelfAttentionWeights& w,
                      const SelfAttentionShape& shape, const SelfAttentionCache* cache = nullptr);

}  // namespace mlxtape::nn
