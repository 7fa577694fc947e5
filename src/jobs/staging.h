// Tensors that successive batches share: a captured step finds each batch at the same addresses.
#pragma once

#include <map>
#include <span>
#include <string>

#include "mlxtape/core/encoder.h"

namespace mlxtape::jobs {

class Staging {
 public:
  explicit Staging(CommandEncoder& encoder) : encoder_(&encoder) {}

  // The tensor of this name. All shapes use the same memory, one batch at a time.
  Tensor tensor(const std::string& name, const Shape& shape, DType dtype) {
    Tensor& all = memory_[name + " " + name_of(dtype)];
    const std::int64_t count = *element_count(shape);
    if (!all.defined() || all.size() < count) {
      all = encoder_->empty({count}, dtype);
      ++moves_;
    }
    return all.slice(0, 0, count).reshape(shape);
  }
  // The same, with these numbers uploaded.
  template <class T>
  Tensor put(const std::string& name, const Shape& shape, DType dtype, std::span<const T> numbers) {
    const Tensor t = tensor(name, shape, dtype);
    encoder_->upload(numbers.data(), numbers.size_bytes(), t);
    return t;
  }
  // For Staged::shape: changes when a tensor has moved, because graphs captured before then read the old address.
  std::string text_of(const Shape& shape) const {
    return to_string(shape) + " " + std::to_string(moves_);
  }

 private:
  CommandEncoder* encoder_;
  std::map<std::string, Tensor> memory_;
  std::int64_t moves_ = 0;
};

}  // namespace mlxtape::jobs
