// Config: a model's config.json: the plan made by its architecture, how its weights are quantised, and the JSON itself.
// Unknown keys are ignored. A missing or invalid value is an error that names the file and the key.
#pragma once

#include <string>
#include <string_view>
#include <unordered_map>

#include "mlxtape/formats/json.h"
#include "mlxtape/models/architecture.h"

namespace mlxtape::models {

// How weights are quantised. bits 0: not quantised.
struct WeightFormat {
  int bits = 0, group_size = 0;
};

// "quantization" in config.json: a default, and exceptions by module path.
struct Quantization {
  WeightFormat usual;
  std::unordered_map<std::string, WeightFormat> of;
  WeightFormat of_module(const std::string& path) const;
};

struct Config {
  std::string model_type;
  std::string prefix;                                          // of every tensor's name
  std::vector<std::pair<std::string, std::string>> own_names;  // Architecture's
  ForeignNames foreign;  // of files that are not in MLX's form
  ModelPlan plan;
  Quantization quantization;
  formats::Json json;  // as read

  // own: an architecture in addition to the library's; it takes precedence.
  static Config parse(const formats::Json& json, const std::string& source,
                      const Architecture* own = nullptr);
};

}  // namespace mlxtape::models
