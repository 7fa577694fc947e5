// moe: a mixture of experts with one that every token goes through.
//
// Formula    r = moe_route(x·routerᵀ, k);  y = experts(x, r) + σ(x·shared_gateᵀ)∘swiglu_network(x, shared)
// Layout     x, y: [B, L, H]; router: [E, H]; experts: gate, up [E, I, H], down [E, H, I]; shared: gate, up [J, H],
//            down [H, J]; shared_gate: [1, H]. No shared expert where shared_gate is not defined.
// Types      f32, f16, bf16, all alike; weights plain or packed
// Cost       experts with adapters: for the time of a call, and again on the way back, all weights stand beside the others
//            with their adapters added, 3·E·I·H numbers of x's type, at 2·r operations each; on the way back as many of
//            their gradients. Nothing of it is kept in between. Without a tape and with fewer than E pairs of a token
//            and an expert, only the weights of the chosen ones.
#pragma once

#include "mlxtape/nn/linear.h"

namespace mlxtape::nn {

struct MoeWeights {
  Weight router;
  SwigluWeights
      experts;  // where some are packed and some are not, all are unpacked for the time of a call
  SwigluWeights shared;
  Weight shared_gate;
};

struct MoeShape {
  std::int64_t chosen = 1;
  bool renormalise = true;  // the scores of a token add up to 1
};

Check moe_check(const Tensor& x, const MoeWeights& w, const MoeShape& shape);

// counts, where given, becomes [E] u32: how many tokens went to each expert.
Tensor moe(Tape& tape, const Tensor& x, const MoeWeights& w, const MoeShape& shape,
           Tensor* counts = nullptr);

}  // namespace mlxtape::nn
