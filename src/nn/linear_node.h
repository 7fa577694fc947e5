// linear_node: weights that multiply the same rows, as one node of a tape. Its gradient of x is one sum, to which each product
// adds as it is stored; adapters with one scale share their first product, and so one reading of x.
#pragma once

#include <span>
#include <vector>

#include "mlxtape/nn/linear.h"

namespace mlxtape::nn {

constexpr std::size_t kMostLinears = 4;

// x: as linear takes it; weights: at most kMostLinears, without dropout. The results, in their order.
std::vector<Tensor> linear_node(Tape& tape, const Tensor& x, std::span<const Linear> weights);

}  // namespace mlxtape::nn
