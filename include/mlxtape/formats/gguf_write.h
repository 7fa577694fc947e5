// Writing GGUF files, version 3, as llama.cpp loads them.
//
// Layout     Keys and tensors in the order given, data in the order of the tensors without holes but for the alignment.
// Parts      With part_bytes, a model whose tensors have more becomes NAME-00001-of-0000N.gguf and so on, each with at most so
//            many bytes of tensors, unless one tensor has more.
// Errors     kIo where a file cannot be written; kArgument for what would be no file: a key or a name twice, text that is no
//            UTF-8, rows that are no whole blocks. Files are there whole or not at all; of several, none has its name before all
//            are written.
//
// Threads    Functions: any.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "mlxtape/base/shape.h"
#include "mlxtape/formats/gguf_types.h"

namespace mlxtape::formats {

struct GgufKey {
  std::string key;
  std::variant<std::uint16_t, std::uint32_t, std::int32_t, std::uint64_t, float, bool, std::string,
               std::vector<std::uint32_t>, std::vector<std::int32_t>, std::vector<float>,
               std::vector<std::string>>
      value;
};

struct GgufTensorToWrite {
  std::string name;
  Shape shape;  // outermost first
  GgufType type = GgufType::kF32;
  // Calls put with all of the tensor's bytes, in pieces and in order.
  std::function<void(const std::function<void(std::span<const std::byte>)>& put)> data;
};

struct GgufWriteOptions {
  std::uint32_t alignment = 32;
  std::size_t part_bytes = 0;  // 0: one file
};

// Returns the paths that were written, the first one the model's.
std::vector<std::string> write_gguf(const std::string& path, std::span<const GgufKey> keys,
                                    std::span<const GgufTensorToWrite> tensors,
                                    const GgufWriteOptions& options = {});

}  // namespace mlxtape::formats
