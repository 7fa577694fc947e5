// conv1d_depthwise_causal: each channel is filtered along time with its own K taps, using past inputs only.
//
// Formula    e[t,c]  = x[t,c] for t ≥ 0; e[−(K−1)+j, c] = initial_state[j,c], or 0 without one
//            z[t,c]  = Σ_k w[c,k]·e[t+k−(K−1), c]                            0 ≤ t < T, 0 ≤ k < K
//            y[t,c]  = z[t,c], or z[t,c]·σ(z[t,c]) with silu;   σ(z) = 1/(1 + exp(−z))
//            final_state[j,c] = e[T−(K−1)+j, c]                              0 ≤ j < K−1
// Gradient   dz[t,c] = dy[t,c], or dy[t,c]·σ(z)·(1 + z·(1 − σ(z))) with silu; 0 outside [0, T)
//            de[i,c] = Σ_k w[c,k]·dz[i+(K−1)−k, c] + d_final_state[i−T+(K−1), c] if that row exists
//            dx[i,c] = de[i,c];   d_initial_state[j,c] = de[−(K−1)+j, c]
//            dw[c,k] = Σ_i e[i,c]·dz[i+(K−1)−k, c]                           over every sequence
// Layout     x, y: [T, C] or [B, T, C] row-major, w: [C, K], states: [S, K−1, C], oldest row first.
//            S is B, or 1 for [T, C], or the number of packed sequences: with sequence_starts [S+1],
//            sequence s is the rows sequence_starts[s] to sequence_starts[s+1] of x [T, C], and the
//            formula holds for each sequence. Strided inputs are copied first. Saved for backward: x.
// Types      x: f32, f16, bf16; y, states and their gradients have the type of x. w: the type of x
//            or f32; dw has the type of w. sequence_starts: i32 or i64. Sums are f32, each result
//            is rounded once, z is not rounded before silu.
// Cost       forward: reads 1·TC, writes 1·TC elements; backward: reads 2·TC, writes 1·TC (z is
//            recomputed). step: reads KC of w and KBC, writes KBC. All memory-bound, silu in
//            16 bits also compute-bound.
// Limits     1 ≤ K ≤ 16; T < K, T = 0, B = 0 and C = 0 are legal. sequence_starts must begin with 0,
//            end with T and never decrease; its values are not checked but used as if clamped to
//            that, so in any case every row belongs to one sequence and nothing outside x is
//            read. The past is zeros, so a tap that is inf or NaN gives NaN there.
//            Below z = −87, where σ is subnormal, silu is only exact to |z| times the smallest f32.
#pragma once

#include "mlxtape/base/error.h"
#include "mlxtape/core/encoder.h"
#include "mlxtape/tape/tape.h"

namespace mlxtape::ops {

// Options; the default is a plain convolution per batch entry, e.g. {.silu = true}. An undefined tensor
// means none.
struct Conv1dDepthwiseCausalOptions {
  Tensor sequence_starts = {};  // [S+1]
  Tensor initial_state = {};    // [S, K−1, C]
  bool silu = false;
  bool want_final_state = false;
};

struct Conv1dDepthwiseCausalResult {
  Tensor y;            // as x
  Tensor final_state;  // [S, K−1, C]; undefined unless requested
};

struct Conv1dDepthwiseCausalGradients {
  Tensor dx;               // as x
  Tensor dw;               // [C, K]
  Tensor d_initial_state;  // [S, K−1, C]; undefined without an initial state
};

// The contracts as code: the first rule violated, or nothing.
Check conv1d_depthwise_causal_check(const Tensor& x, const Tensor& w,
                                    const Conv1dDepthwiseCausalOptions& options = {});
Check conv1d_depthwise_causal_backward_check(const Tensor& x, const Tensor& w, const Tensor& dy,
                                             const Conv1dDepthwiseCausalOptions& options = {},
                                             const Tensor& d_final_state = {});
Check conv1d_depthwise_causal_step_check(const Tensor& x, const Tensor& w, const Tensor& state);

Conv1dDepthwiseCausalResult conv1d_depthwise_causal(
    CommandEncoder& encoder, const Tensor& x, const Tensor& w,
    const Conv1dDepthwiseCausalOptions& options = {});

// From the inputs of the forward call, dy, and the gradient of the final state, if there is one: an
// undefined d_final_state counts as zeros.
Conv1dDepthwiseCausalGradients conv1d_depthwise_causal_backward(
    CommandEncoder& encoder, const Tensor& x, const Tensor& w, const Tensor& dy,
    const Conv1dDepthwiseCausalOptions& options = {}, const Tensor& d_final_state = {});

// One token for each of B sequences: x [B, C], result [B, C]. state [B, K−1, C] holds the rows before
// it and is updated for the next token: the oldest row is dropped, x appended. No gradient.
Tensor conv1d_depthwise_causal_step(CommandEncoder& encoder, const Tensor& x, const Tensor& w,
                                    const Tensor& state, bool silu = false);

// Differentiable in x, w and the initial state, through y and the final state.
Conv1dDepthwiseCausalResult conv1d_depthwise_causal(
    Tape& tape, const Tensor& x, const Tensor& w, const Conv1dDepthwiseCausalOptions& options = {});

}  // namespace mlxtape::ops
