// How large a model is and how much memory it needs. Works for models with and without data (load_shapes).
#pragma once

#include <cstddef>
#include <cstdint>

#include "mlxtape/models/model.h"

namespace mlxtape::models {

// The number of parameters, whether quantised or not.
std::int64_t parameter_count(const Config& config);
// The parameters active for one token: all except the experts that it is not routed to.
std::int64_t active_parameter_count(const Config& config);

// Bytes of everything in a file: codes, scales, biases, and weights that are not quantised.
std::size_t weight_bytes(const Model& model);
// 8·weight_bytes/parameter_count, as mlx-lm counts: scales and biases are bytes, not parameters.
double bits_per_weight(const Model& model);

// Memory for training every float of a model, without activations: the weights, a gradient of the same size, and for AdamW
// two moments in f32 and, for 16-bit weights, an f32 master copy. In quantised weights, scales and biases are trained.
struct TrainingBytes {
  std::size_t weights = 0, gradients = 0, optimiser = 0;
  std::size_t all() const { return weights + gradients + optimiser; }
};
TrainingBytes training_bytes(const Model& model);

}  // namespace mlxtape::models
