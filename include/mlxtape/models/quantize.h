// Quantise a model's weights by rounding to nearest, as mlx-lm's convert does; dequantise them; change a model's dtype.
#pragma once

#include <string_view>
#include <vector>

#include "mlxtape/models/model.h"
#include "mlxtape/ops/quantize.h"

namespace mlxtape::models {

// How a module is quantised; bits 0: not quantised. Called for every weight.
using FormatRule = std::function<WeightFormat(const Part& part)>;

// Every weight whose rows are a multiple of the group size: routers and shared-expert gates to 8 bits in groups of 64 (or not
// at all if their rows are not a multiple of 64), all others as given.
FormatRule usual_format(WeightFormat all);

// mlx-lm's recipes mixed_2_6, mixed_3_4, mixed_3_6 and mixed_4_6, by their low and high bits. High: the head, and v_proj and
// down_proj of the layers i with i < n/8, i ≥ 7n/8 or (i − n/8) mod 3 = 2, of n. Low: all others. Routers and shared-expert
// gates get 8 bits, unlike in mlx-lm, whose recipes give them the low ones.
FormatRule mixed_format(const std::string& recipe, int group_size, const ModelPlan& plan);
const std::vector<std::string>& mixed_recipes();  // their names

// Exceptions to a rule for modules whose path matches a pattern; the last match counts. It is an error, when the rule is
// called, if such a module's rows are not a multiple of the group size.
struct FormatException {
  std::string pattern;  // * matches any text, ? one character: "*.down_proj"
  WeightFormat format;  // bits 0: not quantised
};
FormatRule format_with(FormatRule rule, std::vector<FormatException> exceptions);
bool path_fits(std::string_view path, std::string_view pattern);

// Quantised weights stay as they are. The new config.json records how each was quantised.
Model quantize_model(CommandEncoder& encoder, const Model& model, const FormatRule& rule,
                     ops::QuantizeRule rounding = ops::QuantizeRule::kGpu);

// Dequantises every quantised weight to the type of its scales.
Model dequantize_model(CommandEncoder& encoder, const Model& model);

// Casts every float, including scales and biases, to f32, f16 or bf16. A_log of Qwen3.5 stays as it is, as in mlx-lm.
// If config.json names the weights' type ("torch_dtype", "dtype"), it is updated.
Model cast_model(CommandEncoder& encoder, const Model& model, DType dtype);

}  // namespace mlxtape::models
