// A model in MLX's form as a GGUF file for llama.cpp.
//
// Weights    Affine groups of 4 and 5 bits, and of 8 bits without an offset, are written as Q4_1, Q5_1 and Q8_0 and are the same
//            numbers: nothing is quantised anew, and what DWQ learnt is kept. Where that cannot be (2, 3, 6 bits, 8 bits with
//            offsets, scales that are no f16 values) a weight is dequantised and written in another type; the report says of how many.
//            Norms, biases, routers and filters are F32.
// Errors     kArgument: an architecture, a tensor or a rope that GGUF has no name for. kIo: the file cannot be written.
//
// Threads    Functions: any.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "mlxtape/formats/gguf_types.h"
#include "mlxtape/formats/gguf_write.h"
#include "mlxtape/formats/json.h"
#include "mlxtape/formats/safetensors.h"

namespace mlxtape::formats {

struct GgufExport {
  Json config = Json::Object{};
  std::vector<NamedTensor> tensors;  // as MLX's files have them, on any devices
  std::string name;                  // general.name; empty: none
  std::vector<GgufKey> more;         // further keys: the tokenizer's
  std::optional<GgufType> matrices;  // of weights that are not quantised; without it their own type
  GgufType otherwise = GgufType::kF16;  // of quantised weights that no type holds exactly
  std::size_t part_bytes = 0;           // 0: one file
};

struct GgufExported {
  std::vector<std::string> paths;
  std::int64_t exact = 0;    // quantised weights that are the same numbers
  std::int64_t rounded = 0;  // those that are not
  std::size_t bytes = 0;     // of all tensors
};

GgufExported export_gguf(const std::string& path, const GgufExport& model);

}  // namespace mlxtape::formats
