// Config: what a model's config.json says: its plan by its architecture, how its weights are quantised, and the text itself.
// Unknown keys are left alone. A missing or senseless value is an error that names the file and the key.
#pragma once

#include <string>
#include <string_view>
#include <unordered_map>

#include "mlxtape/formats/json.h"
#include "mlxtape/models/architecture.h"

namespace mlxtape::models {

// How weights are packed. bits 0: not at all.
struct Packing {
  int bits = 0, group_size = 0;
};

// The "quantization" of config.json: one packing for all, others for modules named by their paths.
struct Quantization {
  Packing usual;
  std::unordered_map<std::string, Packing> of;
  Packing of_module(const std::string& path) const;
};

struct Config {
  std::string model_type;
  std::string prefix;    // of every tensor's name
  ForeignNames foreign;  // of files that are not in MLX's form
  ModelPlan plan;
  Quantization quantization;
  formats::Json json;  // as it was read

  // own: an architecture beside those of the library; it comes first.
  static Config parse(const formats::Json& json, const std::string& source,
                      const Architecture* own = nullptr);
};

}  // namespace mlxtape::models
