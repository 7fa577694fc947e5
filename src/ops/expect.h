// What the validators of ops with many inputs ask of a tensor that comes beside another.
#pragma once

#include <string>

#include "mlxtape/base/error.h"
#include "mlxtape/core/tensor.h"

namespace mlxtape::ops {

// The op, and the input that the others go with, under its name.
struct Beside {
  const char* op;
  const char* name;
  const Tensor& tensor;
};

inline Check expect_tensor(const Beside& first, const char* name, const Tensor& t,
                           const Shape& shape, DType dtype) {
  const auto wrong = [&](Errc code, const std::string& must, const std::string& got) {
    return Error(code, std::string(first.op) + ": " + name + " must be " + must + ", got " + got);
  };
  if (!(t.shape() == shape)) return wrong(Errc::kShape, to_string(shape), to_string(t.shape()));
  if (t.dtype() != dtype) return wrong(Errc::kDType, name_of(dtype), name_of(t.dtype()));
  if (t.backend() != first.tensor.backend()) {
    return wrong(
        Errc::kDevice,
        std::string("where ") + first.name + " is (" + name_of(first.tensor.backend()) + ")",
        name_of(t.backend()));
  }
  return std::nullopt;
}

}  // namespace mlxtape::ops
