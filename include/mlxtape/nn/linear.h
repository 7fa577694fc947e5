// linear: rows times a weight that lies as files have it.
//
// Formula    y = x·wᵀ;  swiglu_network: y = (silu(x·gateᵀ)∘(x·upᵀ))·downᵀ
// Layout     x: […, In], w: [Out, In], y: […, Out]; gate, up: [I, H], down: [H, I]
// Types      as matmul takes them
#pragma once

#include "mlxtape/tape/tape.h"

namespace mlxtape::nn {

Check linear_check(const Tensor& x, const Tensor& w);
Tensor linear(Tape& tape, const Tensor& x, const Tensor& w);

struct SwigluWeights {
  Tensor gate, up, down;
};
Check swiglu_network_check(const Tensor& x, const SwigluWeights& w);
Tensor swiglu_network(Tape& tape, const Tensor& x, const SwigluWeights& w);

}  // namespace mlxtape::nn
