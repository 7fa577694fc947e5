// The networks of experts, whichever way their weights are given: plain, quantised, with adapters.
#pragma once

#include "mlxtape/nn/linear.h"
#include "mlxtape/ops/experts.h"

namespace mlxtape::nn {

// x: [T, H]; the weights' shapes have been checked.
Tensor run_experts(Tape& tape, const Tensor& x, const ops::ExpertRoute& route,
                   const SwigluWeights& w);

}  // namespace mlxtape::nn
