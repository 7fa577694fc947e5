// A model's config.json from the keys of a GGUF file, and the keys from a config.json.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "formats/gguf_architecture.h"
#include "mlxtape/formats/gguf.h"
#include "mlxtape/formats/gguf_write.h"
#include "mlxtape/formats/json.h"

namespace mlxtape::formats {

// The architecture that a file or a config.json names; an error that lists those that are there for any other.
const GgufArchitecture& architecture_of(const GgufFile& file);
const GgufArchitecture& architecture_of(const Json& config, const std::string& source);

// What the names of tensors and the order of their rows depend on.
struct GgufSizes {
  std::int64_t layers = 0, heads = 0, key_heads = 0, head_dim = 0;
  // Of delta nets; 0 where there are none.
  std::int64_t delta_key_heads = 0, delta_value_heads = 0, delta_key_dim = 0, delta_value_dim = 0;
};
// source: what errors begin with.
GgufSizes gguf_sizes(const Json& config, const GgufArchitecture& architecture,
                     const std::string& source);

// config.json but for how weights are quantised.
Json config_of_gguf(const GgufFile& file, const GgufArchitecture& architecture);

// The keys behind "<architecture>.". Errors are kArgument: what llama.cpp has no key for.
std::vector<GgufKey> gguf_keys_of_config(const Json& config, const GgufArchitecture& architecture);

// The factors of "rope_freqs.weight", by which each period is stretched, of a config.json with a rope of type llama3; empty for
// any other.
std::vector<float> rope_factors_of_config(const Json& config, const GgufArchitecture& architecture);

}  // namespace mlxtape::formats
