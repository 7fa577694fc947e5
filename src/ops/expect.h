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

// Where packed sequences begin: [S+1] for a first tensor whose packed layout has `rank` axes.
inline Check expect_starts(const Beside& first, const char* layout, std::int64_t rank,
                           const char* name, const Tensor& starts) {
  const auto wrong = [&](Errc code, const std::string& what) {
    return Error(code, std::string(first.op) + ": " + what);
  };
  if (first.tensor.rank() != rank) {
    return wrong(Errc::kShape, std::string(first.name) + " must be " + layout +
                                   " with sequence_starts, got " + to_string(first.tensor.shape()));
  }
  if (starts.rank() != 1 || starts.dim(0) < 2) {
    return wrong(Errc::kShape, std::string(name) + " must be [S+1] with S at least 1, got " +
                                   to_string(starts.shape()));
  }
  if (starts.dtype() != DType::kI32 && starts.dtype() != DType::kI64) {
    return wrong(Errc::kDType,
                 std::string(name) + " must be i32 or i64, got " + name_of(starts.dtype()));
  }
  return expect_tensor(first, name, starts, starts.shape(), starts.dtype());
}

}  // namespace mlxtape::ops
