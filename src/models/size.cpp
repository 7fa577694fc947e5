#include "mlxtape/models/size.h"

namespace mlxtape::models {

std::int64_t parameter_count(const Config& config) {
  std::int64_t sum = 0;
  for (const Part& part : parts(config)) sum += *element_count(part.shape);
  return sum;
}

std::int64_t active_parameter_count(const Config& config) {
  std::int64_t sum = 0;
  for (const Part& part : parts(config)) {
    const std::int64_t count = *element_count(part.shape);
    sum += part.experts > 0 ? count / part.experts * config.plan.layer(part.layer).moe()->chosen
                            : count;
  }
  return sum;
}

std::size_t weight_bytes(const Model& model) {
  std::size_t sum = 0;
  for (const Parameter& p : parameters(model)) sum += p.tensor.bytes();
  return sum;
}

double bits_per_weight(const Model& model) {
  return 8 * static_cast<double>(weight_bytes(model)) /
         static_cast<double>(parameter_count(model.config));
}

TrainingBytes training_bytes(const Model& model) {
  TrainingBytes result;
  for (const Parameter& p : parameters(model)) {
    result.weights += p.tensor.bytes();
    if (!is_float(p.tensor.dtype())) continue;
    const auto count = static_cast<std::size_t>(p.tensor.size());
    const std::size_t copies = p.tensor.dtype() == DType::kF32 ? 2 : 3;
    result.gradients += p.tensor.bytes();
    result.optimiser += copies * count * size_of(DType::kF32);
  }
  return result;
}

}  // namespace mlxtape::models
