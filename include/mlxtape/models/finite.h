// Values of a model that are NaN or infinite: a damaged file, a run that diverged, a type that is too narrow.
//
// Cost       reads every float once, on all threads of the host; tensors on another device are downloaded one by one.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "mlxtape/formats/model_directory.h"
#include "mlxtape/models/model.h"

namespace mlxtape::models {

struct NonFinite {
  std::string first;         // the first tensor with such values
  std::int64_t numbers = 0;  // how many in that tensor
  std::int64_t tensors = 0;  // how many tensors have any; 0: everything is finite

  bool any() const { return tensors > 0; }
  // "the tensor model.norm.weight has 3 values that are NaN or infinite, as have 2 more tensors"
  std::string text() const;
};

// In a contiguous tensor in host memory; 0 for one without floats.
std::int64_t count_nonfinite(const Tensor& tensor);

// Adapters are checked too.
NonFinite find_nonfinite(CommandEncoder& encoder, const Model& model);
NonFinite find_nonfinite(CommandEncoder& encoder, const std::vector<Parameter>& tensors);
// In a directory's files, for the types that can be read; progress is called after each tensor, in bytes of all files.
NonFinite find_nonfinite(const formats::ModelFiles& files,
                         const std::function<void(std::size_t done)>& progress = {});

}  // namespace mlxtape::models
