// moe_route: chooses each token's experts and their weights from the router's logits. With gradient.
//
// Formula    indices[t,·] = the k largest l[t,·], largest first; ties (also of +0 and −0) by index
//            renormalised:  s[t,j] = exp(l[t,indices[t,j]]) / Σ_i exp(l[t,indices[t,i]])
//            full softmax:  s[t,j] = exp(l[t,indices[t,j]] − lse[t]),  lse[t] = log Σ_e exp(l[t,e])
//            counts[e]  = how often e occurs in indices;  offsets[e] = Σ_{i<e} counts[i]
// Gradient   c[t] = Σ_j s[t,j]·ds[t,j], and [·] is 1 if true, else 0:
//            renormalised:  dl[t,e] = Σ_j [indices[t,j] = e]·s[t,j]·(ds[t,j] − c[t])
//            full softmax:  dl[t,e] = exp(l[t,e] − lse[t])·(Σ_j [indices[t,j] = e]·ds[t,j] − c[t])
//            Nothing flows through indices, counts and offsets.
// Layout     logits l, dl: [T, E]; indices, scores s, ds: [T, k]; counts: [E]; offsets: [E+1], the
//            last is T·k; lse: [T]. Strided inputs are copied first. Saved for backward: indices,
//            scores, and logits and lse for the full softmax.
// Types      logits f32, f16, bf16; scores and dl have their type. indices, counts, offsets: u32;
//            lse: f32. Sums are f32, each result is rounded once.
// Cost       forward: reads 1·TE, writes Tk scores and Tk u32; with k ≤ 16 a logit is read
//            twice, with more about thirty times, in cache; the full softmax adds TE exponentials.
//            backward: reads 2·Tk scores and Tk u32, writes 1·TE; the full softmax reads 1·TE more.
// Limits     1 ≤ E ≤ 1024, 1 ≤ k ≤ min(E, 64), T·k < 2^32; T = 0 is legal and counts zeros. NaN is
//            below every number: it is chosen, by index, only where fewer than k numbers are left.
//            indices are valid and distinct whatever the logits hold. A chosen −inf has score 0.
//            A row's scores are all NaN if NaN or +inf is chosen or if the largest is −inf; with
//            the full softmax also, lse too, if a NaN was not chosen. Backward takes any indices:
//            of one past E neither score nor gradient counts, equal ones add up.
#pragma once

#include "mlxtape/base/error.h"
#include "mlxtape/core/encoder.h"
#include "mlxtape/tape/tape.h"

namespace mlxtape::ops {

struct MoeRouteOptions {
  bool renormalise = true;  // scale a token's weights to sum to 1; else they are the full softmax
};

struct MoeRoute {
  Tensor indices;  // [T, k] u32
  Tensor scores;   // [T, k]
  Tensor counts;   // [E] u32
  Tensor offsets;  // [E+1] u32
  Tensor lse;      // [T] f32; undefined if renormalised
};

// What backward needs. If lse is undefined (the renormalised form), only shape and type of logits are
// read: Tensor::meta will do.
struct MoeRouteSaved {
  Tensor logits, indices, scores, lse;
};

// The contract as code: the first rule violated, or nothing.
Check moe_route_check(const Tensor& logits, std::int64_t k);
Check moe_route_backward_check(const MoeRouteSaved& saved, const Tensor& dscores);

MoeRoute moe_route(CommandEncoder& encoder, const Tensor& logits, std::int64_t k,
                   MoeRouteOptions options = {});

// dlogits from dscores, the gradient of scores.
Tensor moe_route_backward(CommandEncoder& encoder, const MoeRouteSaved& saved,
                          const Tensor& dscores);

// Differentiable in logits through scores; lse is undefined.
MoeRoute moe_route(Tape& tape, const Tensor& logits, std::int64_t k, MoeRouteOptions options = {});

}  // namespace mlxtape::ops
