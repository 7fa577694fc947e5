// Architecture: how one kind of config.json becomes a plan, and how files of such models in other formats are converted to MLX
// format. A new one is a file in src/models/architectures and its line in architectures.list; a program may load a directory
// with an architecture of its own (LoadOptions::architecture).
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "mlxtape/models/fields.h"
#include "mlxtape/models/plan.h"

namespace mlxtape::models {

// How other formats store an experts' weight that MLX format has as one tensor [E, out, in]. Paths are within a layer.
struct ForeignExperts {
  enum class Rows : std::uint8_t { kAll, kFirstHalf, kSecondHalf };
  std::string path;  // in MLX format: "mlp.switch_mlp.up_proj"
  std::string each;  // one tensor for each, {e} being its number: "mlp.experts.{e}.up_proj.weight"
  std::string together;    // or one for all of them: "mlp.experts.gate_up_proj"
  Rows rows = Rows::kAll;  // which rows of each expert's in that one
};

// Names of tensors in other formats. A rule whose names do not occur in a directory does nothing. Filters [C, 1, K] are
// converted to MLX format for every architecture.
struct ForeignNames {
  std::vector<std::string> left_out = {};  // prefixes of names that are not part of the model
  std::vector<std::string> left_out_within = {};  // the same, anywhere in a name
  // Prefixes that are left out if the head is tied to the embedding.
  std::vector<std::string> left_out_if_tied = {"lm_head."};
  std::vector<std::pair<std::string, std::string>> replaced =
      {};  // prefixes, and what MLX uses instead
  std::vector<ForeignExperts> experts = {};
  bool norms_from_0 =
      false;  // if experts are separate tensors, or filters [C, 1, K], norms multiply by 1 + w
};

struct Architecture {
  std::vector<std::string> types;  // values of model_type in config.json
  std::string prefix;              // of all tensor names: "language_model."
  std::string nested;  // the object that may contain the keys: "text_config"; empty: none
  void (*read)(const Fields& fields, ModelPlan& plan);
  ForeignNames foreign = {};
  // Paths of parts within their layer, or within the model, that MLX's form of this architecture names otherwise than most:
  // the usual one and its own, {"self_attn.o_proj", "self_attn.out_proj"}.
  std::vector<std::pair<std::string, std::string>> own_names = {};
};

// The architectures in architectures.list.
const std::vector<Architecture>& architectures();
// All types: "qwen3, qwen3_5, ..."
std::string architecture_names();

}  // namespace mlxtape::models
