// experts: a mixture of SwiGLU networks: each token goes through the k that a router chose for it, and comes out
// as their weighted sum.
//
// Formula    e = indices[t,j];  g = gate[e]·x_t;  u = up[e]·x_t;  a = g·σ(g)∘u;  y_t = Σ_j scores[t,j]·down[e]·a
// Gradient   b = downᵀ[e]·dy_t;  dscores[t,j] = b·a;  du = scores[t,j]·b∘g·σ(g);
//            dg = scores[t,j]·b∘u∘σ(g)·(1 + g·(1 − σ(g)));  dx_t = Σ_j gateᵀ[e]·dg + upᵀ[e]·du
//            dgate[e] = Σ dg·x_tᵀ;  dup[e] = Σ du·x_tᵀ;  ddown[e] = Σ scores[t,j]·dy_t·aᵀ, over all t, j with that e
// Layout     x, y: [T, H]; indices, scores: [T, k]; offsets: [E+1], as moe_route gives them; gate, up: [E, I, H];
//            down: [E, H, I]. Strided inputs are copied first. Saved for backward: the inputs, and g and u by pairs
//            (t, j) in the order of their experts, hidden [T·k, 2, I].
// Types      x, scores, weights, y: f32, f16, bf16, all alike; indices, offsets: u32. Sums are f32; g, u, their
//            gradients and the results are rounded once. On CUDA in 16 bits, with H and I multiples of 8, so are a,
//            scores·a, and what each pair adds to y and dx; on a CPU that multiplies pairs of bf16 so is a, in y, where
//            I is even and an expert has more than 8 pairs.
// Cost       forward 6·H·I operations for each pair, backward 12. On the CPU weights are read once for each 128 pairs
//            of their expert, and nothing of size [T·k, H] is stored; on CUDA it is scratch.
// Limits     1 ≤ E ≤ 1024, 1 ≤ k ≤ 64, T·k < 2^32. offsets must be those of indices: pairs are put by the indices,
//            of which one past E counts as nothing. Nothing waits for the counts. On CUDA in 16 bits views of x, dy and
//            the weights that do not begin at a multiple of 16 bytes are copied first, at every call: the results have
//            the same bits, at the cost of reading and writing them once more and of memory for the copies.
#pragma once

#include "mlxtape/base/error.h"
#include "mlxtape/core/encoder.h"
#include "mlxtape/tape/tape.h"

namespace mlxtape::ops {

struct ExpertWeights {
  Tensor gate, up, down;
};

// Who goes where: of moe_route's result.
struct ExpertRoute {
  Tensor indices, scores, offsets;
};

struct ExpertsResult {
  Tensor y;
  Tensor hidden, order;  // for the gradient: g and u; which pair stands where
};

struct ExpertsGradients {
  Tensor dx, dscores, dgate, dup, ddown;
};

// What is not wanted is not computed, and undefined in the result. On a tape: what nobody asks for.
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
