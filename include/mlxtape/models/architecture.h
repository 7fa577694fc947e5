// Architecture: how one kind of config.json becomes a plan, and how files of such models in other formats are converted to MLX
// format. A new one is a file in src/models/architectures and its line in architectures.list; a program may load a directory
// with an architecture of its own (LoadOptions::architecture).
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "mlxtape/models/fields.h"
#include "mlxtape/models/plan.h"

namespace mlxtape::models {

// Names of tensors in Hugging Face's files. Experts as separate tensors or as gate_up_proj, and filters [C, 1, K], are
// converted to MLX format for every architecture.
struct ForeignNames {
  std::vector<std::string> left_out;  // prefixes of names that are not part of the language model
  std::vector<std::pair<std::string, std::string>> replaced;  // prefixes, and what MLX uses instead
  bool norms_from_0 =
      false;  // if experts or filters are in Hugging Face's format, norms multiply by 1 + w
};

struct Architecture {
  std::vector<std::string> types;  // values of model_type in config.json
  std::string prefix;              // of all tensor names: "language_model."
  std::string nested;  // the object that may contain the keys: "text_config"; empty: none
  void (*read)(const Fields& fields, ModelPlan& plan);
  ForeignNames foreign = {};
};

// The architectures in architectures.list.
const std::vector<Architecture>& architectures();
// All types: "qwen3, qwen3_5, ..."
std::string architecture_names();

}  // namespace mlxtape::models
