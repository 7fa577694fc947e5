// A model with its weights packed by rounding to the nearest, as mlx-lm's convert does.
#pragma once

#include "mlxtape/models/model.h"
#include "mlxtape/ops/quantize.h"

namespace mlxtape::models {

// How a module is to be packed; bits 0: not at all. Called with its path and the shape of its weight.
using PackingRule = std::function<Packing(const std::string& path, const Shape& shape)>;

// Every weight whose rows are a multiple of the group: routers and gates of shared experts in 8 bits and groups of 64,
// or not where that does not divide them; all others as given.
PackingRule usual_packing(Packing all);

// Packed weights stay as they are. The new config.json says how each was packed.
Model quantize_model(CommandEncoder& encoder, const Model& model, const PackingRule& rule,
                     ops::QuantizeRule rounding = ops::QuantizeRule::kGpu);

}  // namespace mlxtape::models
