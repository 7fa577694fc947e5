// experts: a mixture of SwiGLU networks: the output for each token is the weighted sum of the k networks that a router
// chose for it.
//
// Formula    e = indices[t,j];  g = gate[e]·x_t;  u = up[e]·x_t;  a = g·σ(g)∘u;  y_t = Σ_j scores[t,j]·down[e]·a
// Gradient   b = downᵀ[e]·dy_t;  dscores[t,j] = b·a;  du = scores[t,j]·b∘g·σ(g);
//            dg = scores[t,j]·b∘u∘σ(g)·(1 + g·(1 − σ(g)));  dx_t = Σ_j gateᵀ[e]·dg + upᵀ[e]·du
//            dgate[e] = Σ dg·x_tᵀ;  dup[e] = Σ du·x_tᵀ;  ddown[e] = Σ scores[t,j]·dy_t·aᵀ, over all t, j with that e
// Layout     x, y: [T, H]; indices, scores: [T, k]; offsets: [E+1], as moe_route gives them; gate, up: [E, I, H];
//            down: [E, H, I]. Strided inputs are copied first. Saved for backward: the inputs, and g and u by pairs
//            (t, j) in the order of their experts, hidden [T·k, 2, I].
// Types      x, scores, weights, y: one of f32, f16, bf16; indices, offsets: u32. Sums are f32; g, u, their
//            gradients and the results are rounded once. On CUDA in 16 bits, with H and I multiples of 8, so are a,
//            scores·a, and what each pair adds to y and dx; on a CPU that multiplies pairs of bf16 so is a, in y, where
//            I is even and an expert has more than 8 pairs.
// Cost       forward 6·H·I operations for each pair, backward 12. On the CPU weights are read once for each 128 pairs
//            of their expert, and nothing of size [T·k, H] is stored; on a GPU it is scratch.
// Limits     1 ≤ E ≤ 1024, 1 ≤ k ≤ 64, T·k < 2^32. offsets must match indices: pairs are sorted by the indices; an
//            index of E or more counts as nothing. The host does not wait for the counts. On CUDA in 16 bits views of x, dy
//            and the weights that are not aligned to 16 bytes are copied first, at every call: the results have the
//            same bits, but it costs a read, a write and the memory for the copies.
#pragma once

#include "mlxtape/base/error.h"
#include "mlxtape/core/encoder.h"
#include "mlxtape/tape/tape.h"

namespace mlxtape::ops {

struct ExpertWeights {
  Tensor gate, up, down;
};

// Which token goes to which expert: part of moe_route's result.
struct ExpertRoute {
  Tensor indices, scores, offsets;
};

struct ExpertsResult {
  Tensor y;
  Tensor hidden, order;  // for the gradient: g and u; the order of the pairs
};

struct ExpertsGradients {
  Tensor dx, dscores, dgate, dup, ddown;
};

// Gradients that are not requested are not computed, and are undefined in the result. On a tape: those that are not needed.
struct ExpertsWanted {
  bool x = true, weights = true;
};

Check experts_check(const Tensor& x, const ExpertRoute& route, const ExpertWeights& weights);
Check experts_backward_check(const Tensor& x, const ExpertRoute& route,
                             const ExpertWeights& weights, const ExpertsResult& result,
                             const Tensor& dy);

ExpertsResult experts(CommandEncoder& encoder, const Tensor& x, const ExpertRoute& route,
                      const ExpertWeights& weights);
ExpertsGradients experts_backward(CommandEncoder& encoder, const Tensor& x,
                                  const ExpertRoute& route, const ExpertWeights& weights,
                                  const ExpertsResult& result, const Tensor& dy,
                                  const ExpertsWanted& wanted = {});
Tensor experts(Tape& tape, const Tensor& x, const ExpertRoute& route, const ExpertWeights& weights);

}  // namespace mlxtape::ops
