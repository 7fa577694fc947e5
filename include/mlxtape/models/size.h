// How large a model is, and what memory it asks for. Of models with and without numbers (load_shapes).
#pragma once

#include <cstddef>
#include <cstdint>

#include "mlxtape/models/model.h"

namespace mlxtape::models {

// The numbers of a model, packed or not.
std::int64_t parameter_count(const Config& config);
// Those that one token goes through: all but the experts it is not sent to.
std::int64_t active_parameter_count(const Config& config);

// Of everything a file holds: codes, scales and biases, and what is not packed.
std::size_t weight_bytes(const Model& model);
// 8·weight_bytes/parameter_count, as mlx-lm counts: scales and biases are bytes, not parameters.
double bits_per_weight(const Model& model);

// What training every float of a model holds beside activations: the weights, a gradient as large as each, and of AdamW
// two moments in f32 and, for those of 16 bits, a master in f32. Of packed weights these are scales and biases.
struct TrainingBytes {
  std::size_t weights = 0, gradients = 0, optimiser = 0;
  std::size_t all() const { return weights + gradients + optimiser; }
};
TrainingBytes training_bytes(const Model& model);

}  // namespace mlxtape::models
