// From what a config says of positions to what attention takes.
#pragma once

#include "mlxtape/models/config.h"
#include "mlxtape/nn/self_attention.h"

namespace mlxtape::models {

nn::Rope make_rope(const Config& config, CommandEncoder& encoder, DType dtype);

}  // namespace mlxtape::models
