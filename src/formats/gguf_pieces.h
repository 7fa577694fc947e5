// A model's tensors in MLX's form, each with where its numbers lie in a GGUF file.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "formats/gguf_config.h"
#include "mlxtape/base/shape.h"

namespace mlxtape::formats {

// The order of rows and columns between the two forms.
struct GgufOrder {
  // For each row here, which row of all sources' rows, one source after the other; empty: as they lie.
  std::vector<std::int64_t> rows;
  // For each run of `run` columns here, which of the file's; empty: as they lie.
  std::vector<std::int64_t> columns;
  std::int64_t run = 0;
};

// Of a weight the module, of any other tensor its name; one or two tensors of the file.
struct GgufPiece {
  std::string name;
  std::vector<std::string> sources;
  const GgufName* of = nullptr;
  Shape shape;  // in MLX
  GgufOrder order;
};

// All of a file's tensors, each used once. Errors: one that is no part of such a model, and sizes that do not fit.
std::vector<GgufPiece> pieces_of(const GgufFile& file, const GgufArchitecture& architecture,
                                 const GgufSizes& sizes);

// Names in a file: "attn_q.weight" in block 3 is "blk.3.attn_q.weight"; two of them where the row has two.
std::vector<std::string> gguf_names(const GgufName& name, std::int64_t layer);
std::string mlx_name(const GgufName& name, const GgufArchitecture& architecture,
                     std::int64_t layer);

// rows: of all sources together, of `numbers` numbers each; experts: of a weight of rank 3, else 1. Throws kIo, beginning with
// `what`, where the model's sizes ask for other numbers.
GgufOrder order_of(const GgufName& name, const GgufSizes& sizes, std::int64_t rows,
                   std::int64_t numbers, std::int64_t experts, const std::string& what);

}  // namespace mlxtape::formats
