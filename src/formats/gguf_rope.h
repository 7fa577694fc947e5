// Ropes in config.json and in GGUF.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "formats/gguf_architecture.h"
#include "mlxtape/formats/gguf.h"
#include "mlxtape/formats/gguf_write.h"
#include "mlxtape/formats/json.h"

namespace mlxtape::formats {

// Adds "rope_theta", "rope_scaling", "partial_rotary_factor", or "rope_parameters" with all of them, to the sizes.
void read_gguf_rope(const GgufFile& file, const GgufArchitecture& architecture,
                    std::int64_t head_dim, Json& sizes);

void write_gguf_rope(const Json& sizes, const GgufArchitecture& architecture, std::int64_t head_dim,
                     std::vector<GgufKey>& keys);

std::vector<float> llama3_factors(const Json& sizes, std::int64_t head_dim);

// The double with the fewest digits that is this float: what a person wrote.
double shortest(float value);

}  // namespace mlxtape::formats
