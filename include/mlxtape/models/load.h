// Load and save models: directories in MLX format and GGUF files, and reading directories in Hugging Face format.
//
// A GGUF file is loaded like a directory (mlxtape/formats/gguf_model.h): its quantised weights stay quantised if our kernels
// support their groups, and none is rounded.
// On the CPU, weights are used in place from the mapped files, and nothing is read before it is needed, provided that they are
// aligned to the size of their elements: files written by this library are, those of mlx-lm often are not and are copied. Do
// not truncate a file while a model loaded from it lives. Directories in Hugging Face format are converted to MLX format while
// loading: experts are stacked, norms stored as an offset from 1 are shifted, weights for vision and for multi-token
// prediction are skipped.
// Errors     kIo, with the file and the tensor: one that is missing, has another shape or type than config.json says, or
//            does not belong to the model.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "mlxtape/formats/gguf_export.h"
#include "mlxtape/models/model.h"

namespace mlxtape::models {

struct LoadOptions {
  std::function<void(std::size_t done, std::size_t all)> progress;  // in bytes, tensor by tensor
  const Architecture* architecture =
      nullptr;  // in addition to the library's, for a model_type of your own
};

Model load_model(const std::string& directory, CommandEncoder& encoder,
                 const LoadOptions& options = {});

// The model without its weights' data: all checks of load_model, but no data is read. Its tensors have names, types and
// shapes but no memory and no device: use it for mlxtape/models/size.h only.
Model load_shapes(const std::string& directory);

struct SaveOptions {
  // A directory whose tokenizer and other small files are copied; empty: none.
  std::string files_from = {};
  bool replace = false;  // overwrite an existing directory, once the new one is complete
  std::size_t shard_bytes = std::size_t{5} << 30U;
};
// Writes what mlx-lm loads: the weights, their index, config.json.
void save_model(const Model& model, const std::string& directory, const SaveOptions& options = {});

struct SaveGgufOptions {
  std::string
      files_from;    // a directory, or a GGUF file, whose tokenizer comes along; none if empty
  std::string name;  // general.name
  std::optional<formats::GgufType> matrices = {};  // of plain weights; without it their own type
  formats::GgufType otherwise =
      formats::GgufType::kF16;  // of quantised weights that no type of GGUF holds exactly
  std::size_t part_bytes = 0;   // 0: one file
};
// What llama.cpp loads (mlxtape/formats/gguf_export.h). A file that is there is replaced once the new one is complete.
formats::GgufExported save_gguf(const Model& model, const std::string& path,
                                const SaveGgufOptions& options = {});

}  // namespace mlxtape::models
