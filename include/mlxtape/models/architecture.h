// Architecture: how one kind of config.json becomes a plan, and how files that others made of such models are brought into
// MLX's form. A new one is a file in src/models/architectures and its line in architectures.list; a program may load a
// directory by one of its own (LoadOptions::architecture).
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "mlxtape/models/fields.h"
#include "mlxtape/models/plan.h"

namespace mlxtape::models {

// Names of tensors as Hugging Face's files have them. Experts that lie one by one or as gate_up_proj, and filters [C, 1, K],
// are brought into MLX's form for every architecture.
struct ForeignNames {
  std::vector<std::string> left_out;  // beginnings of names that are no part of the language model
  std::vector<std::pair<std::string, std::string>> replaced;  // beginnings, and what MLX has there
  bool norms_from_0 =
      false;  // where experts or filters are Hugging Face's, norms multiply by 1 + w
};

struct Architecture {
  std::vector<std::string> types;  // of config.json's model_type
  std::string prefix;              // of every tensor's name: "language_model."
  std::string nested;              // the object that may hold the keys: "text_config"; empty: none
  void (*read)(const Fields& fields, ModelPlan& plan);
  ForeignNames foreign = {};
};

// Those of architectures.list.
const std::vector<Architecture>& architectures();
// Every type: "qwen3, qwen3_5, ..."
std::string architecture_names();

}  // namespace mlxtape::models
