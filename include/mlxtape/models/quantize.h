// A model with its weights packed by rounding to the nearest, as mlx-lm's convert does; unpacked again; and of another type.
#pragma once

#include <string_view>
#include <vector>

#include "mlxtape/models/model.h"
#include "mlxtape/ops/quantize.h"

namespace mlxtape::models {

// How a module is to be packed; bits 0: not at all. Asked for every weight.
using PackingRule = std::function<Packing(const Part& part)>;

// Every weight whose rows are a multiple of the group: routers and gates of shared experts in 8 bits and groups of 64,
// or not where that does not divide them; all others as given.
PackingRule usual_packing(Packing all);

// mlx-lm's recipes mixed_2_6, mixed_3_4, mixed_3_6 and mixed_4_6, by their low and high bits. High: the head, and v_proj and
// down_proj of the layers i with i < n/8, i ≥ 7n/8 or (i − n/8) mod 3 = 2, of n. Low: all others. Unlike mlx-lm's, which
// loses that rule here, routers and gates of shared experts have 8 bits.
PackingRule mixed_packing(const std::string& recipe, int group_size, const ModelPlan& plan);
const std::vector<std::string>& mixed_recipes();  // their names

// Modules whose path fits a pattern otherwise than the rule says; the last pattern that fits counts. A group that does
// not divide such a module's rows is an error when the rule is asked.
struct PackingException {
  std::string pattern;  // * is any text, ? one character: "*.down_proj"
  Packing packing;      // bits 0: not packed
};
PackingRule packing_with(PackingRule rule, std::vector<PackingException> exceptions);
bool path_fits(std::string_view path, std::string_view pattern);

// Packed weights stay as they are. The new config.json says how each was packed.
Model quantize_model(CommandEncoder& encoder, const Model& model, const PackingRule& rule,
                     ops::QuantizeRule rounding = ops::QuantizeRule::kGpu);

// Every packed weight as numbers of its scales' type.
Model dequantize_model(CommandEncoder& encoder, const Model& model);

// Every float in this type, f32, f16 or bf16, scales and biases among them. A_log of Qwen3.5 stays as it is, as in mlx-lm.
// Where config.json names the weights' type ("torch_dtype", "dtype") it names the new one.
Model cast_model(CommandEncoder& encoder, const Model& model, DType dtype);

}  // namespace mlxtape::models
