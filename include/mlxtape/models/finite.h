// Numbers of a model that are NaN or infinite: a file that was damaged, a run that diverged, a type that is too narrow.
//
// Cost       reads every float once, on all threads of the host; what is on another device is downloaded tensor by tensor.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "mlxtape/formats/model_directory.h"
#include "mlxtape/models/model.h"

namespace mlxtape::models {

struct NonFinite {
  std::string first;         // the name of the first tensor that has any
  std::int64_t numbers = 0;  // of that tensor
  std::int64_t tensors = 0;  // that have any; 0: all is finite

  bool any() const { return tensors > 0; }
  // "the tensor model.norm.weight has 3 numbers that are NaN or infinite, as have 2 more tensors"
  std::string text() const;
};

// Of a contiguous tensor in the host's memory; 0 of one without floats.
std::int64_t count_nonfinite(const Tensor& tensor);

// Adapters are looked at too.
NonFinite find_nonfinite(CommandEncoder& encoder, const Model& model);
NonFinite find_nonfinite(CommandEncoder& encoder, const std::vector<Parameter>& tensors);
// Those of a directory's files in the types that can be read; progress comes after each tensor, in bytes of all files.
NonFinite find_nonfinite(const formats::ModelFiles& files,
                         const std::function<void(std::size_t done)>& progress = {});

}  // namespace mlxtape::models
