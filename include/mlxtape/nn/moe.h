// moe: a mixture of experts with a shared expert that every token goes through.
//
// Formula    r = moe_route(x·routerᵀ, k);  y = experts(x, r) + σ(x·shared_gateᵀ)∘swiglu_network(x, shared)
// Layout     x, y: [B, L, H]; router: [E, H]; experts: gate, up [E, I, H], down [E, H, I]; shared: gate, up [J, H],
//            down [H, J]; shared_gate: [1, H]. No shared expert if shared_gate is undefined.
// Types      one of f32, f16, bf16; weights plain or quantised
// Cost       experts with adapters: during a call, and again in the backward pass, there is a copy of all weights with the
//            adapters added, 3·E·I·H values of x's type, at 2·r operations each; in the backward pass gradients of the same
//            size too. Nothing of it is kept in between. Without a tape and with fewer than E pairs of a token and an
//            expert, only the weights of the chosen experts are copied.
#pragma once

#include "mlxtape/nn/linear.h"

namespace mlxtape::nn {

struct MoeWeights {
  Weight router;
  SwigluWeights
      experts;  // if only some are quantised, all are dequantised for the duration of a call
  SwigluWeights shared;
  Weight shared_gate;
};

struct MoeShape {
  std::int64_t chosen = 1;
  bool renormalise = true;  // a token's scores are scaled to sum to 1
};

Check moe_check(const Tensor& x, const MoeWeights& w, const MoeShape& shape);

// counts, if given, is set to [E] u32: the number of tokens per expert.
Tensor moe(Tape& tape, const Tensor& x, const MoeWeights& w, const MoeShape& shape,
           Tensor* counts = nullptr);

}  // namespace mlxtape::nn
