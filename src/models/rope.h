// From what a plan says of positions to what attention takes.
#pragma once

#include <vector>

#include "mlxtape/models/plan.h"
#include "mlxtape/nn/self_attention.h"

namespace mlxtape::models {

std::vector<nn::Rope> make_ropes(const ModelPlan& plan, CommandEncoder& encoder, DType dtype);

}  // namespace mlxtape::models
