// self_attention: attention among the tokens of a sequence with its projections, optionally with normalised queries and keys
// and a gate on the result.
//
// Formula    [q | gate] = x·qᵀ, head by head, or q = x·qᵀ;  k = x·kᵀ;  v = x·vᵀ; each with its bias, if given
//            q, k ← rope(rms_norm(q, q_norm)), rope(rms_norm(k, k_norm)), the first rope.dims channels rotated; without norms
//            rope(q), rope(k)
//            y = (attention(q, k, v)∘σ(gate))·oᵀ, causal, of the last window tokens where there is one, with sinks if given
// Layout     x, y: [B, L, H]; q: [heads·2·D, H], of each head D rows of queries, then D of the gate; not gated:
//            [heads·D, H]; k, v: [key_heads·D, H]; o: [H, heads·D]; q_norm, k_norm: [D]; biases: as many as rows
// Types      x and the projections: one of f32, f16, bf16; q_norm, k_norm: as for rms_norm
// Limits     rope.dims even, from 0 to D. No packed sequences. With a cache there is no gradient.
#pragma once

#include "mlxtape/nn/linear.h"
#include "mlxtape/nn/mode.h"

namespace mlxtape::nn {

struct SelfAttentionWeights {
  Weight q, k, v, o;
  Tensor q_norm, k_norm;                                      // both or none
  Tensor q_bias = {}, k_bias = {}, v_bias = {}, o_bias = {};  // each may be there
  Tensor sinks =
      {};  // [heads], counted by each head's softmax beside the scores; of x's type or f32
};

struct Rope {
  std::int64_t dims = 0;  // 0: nothing is rotated
  double base = 10000, scale = 1;
  bool traditional = false;
  Tensor periods = {};  // [dims/2] instead of base and scale, as ops::rope takes them
  Tensor gain =
      {};  // [D], of x's type: what the channels are multiplied by before they are rotated
};

struct SelfAttentionShape {
  std::int64_t heads, key_heads, head_dim;
  bool gated = true;
  Rope rope = {};
  float eps = 1e-6F;
  double scale = 0;         // of scores; 0: head_dim^−½
  std::int64_t window = 0;  // 0: none
};

// The keys and values of the tokens before x, by mode:
//   kTrain     nothing is given
//   kPrefill   start tokens came before in every sequence; keys, values: [B, capacity, key_heads, D], written in place
//   kStep      lengths [B] i32, on the device, says how many came before, for up to 16 new ones
// ring         keys and values have as many rows as the window, W: position p is in row p mod (W − 1), and the last row is
//              the newest token's while it is attended to. Rotated keys may lie in any order, so that a step attends to
//              all rows as they are. places: [capacity] i32, the row of each position, for a step, which has one new token
//              then; not defined for a window of 1, which has no past.
// Cost         of a ring: a step looks a row up and writes it, two small launches more; prefill copies the W − 1 rows
//              before the chunk, and the chunk, into one tensor in the order of their positions.
struct SelfAttentionPast {
  Mode mode = Mode::kTrain;
  Tensor keys = {}, values = {};
  std::int64_t start = 0;
  Tensor lengths = {};
  bool ring = false;
  Tensor places = {};
};

Check self_attention_check(const Tensor& x, const SelfAttentionWeights& w,
                           const SelfAttentionShape& shape, const SelfAttentionPast& past = {});

Tensor self_attention(Tape& tape, const Tensor& x, const SelfAttentionWeights& w,
                      const SelfAttentionShape& shape, const SelfAttentionPast& past = {});

}  // namespace mlxtape::nn
