// Models from and to directories in MLX format, and from Hugging Face's.
//
// On the CPU weights are used where the files are mapped and nothing is read before it is needed, if they lie at multiples
// of their element's size: so we write them, mlx-lm often does not, and then they are copied. Files must not be cut short
// while a model of them lives. Directories as
// Hugging Face has them are brought into MLX's form on the way: experts stacked, norms that count from 0 shifted by 1,
// weights for images and for predicting several tokens left out.
// Errors     kIo, with the file and the tensor: one that is missing, has another shape or type than the config says, or
//            belongs to no part of the model.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "mlxtape/models/model.h"

namespace mlxtape::models {

struct LoadOptions {
  std::function<void(std::size_t done, std::size_t all)> progress;  // in bytes, tensor by tensor
  const Architecture* architecture =
      nullptr;  // beside the library's, for a model_type of one's own
};

Model load_model(const std::string& directory, CommandEncoder& encoder,
                 const LoadOptions& options = {});

// The model without its numbers: every check of load_model, but nothing of the data is read. Its tensors have names,
// types and shapes, but no memory, and it is on no device: what mlxtape/models/size.h tells is all it is good for.
Model load_shapes(const std::string& directory);

struct SaveOptions {
  std::string
      files_from;  // a directory whose tokenizer and other small files come along; none if empty
  bool replace = false;  // an existing directory and all it holds, once the new one is complete
  std::size_t shard_bytes = std::size_t{5} << 30U;
};
// What mlx-lm loads: weights under their names, their index, the model's config.json.
void save_model(const Model& model, const std::string& directory, const SaveOptions& options = {});

}  // namespace mlxtape::models
