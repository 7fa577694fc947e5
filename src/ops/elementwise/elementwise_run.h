// What elementwise.cpp and elementwise_tape.cpp share: one call of a kernel on operands of any shape.
#pragma once

#include <span>

#include "mlxtape/core/encoder.h"

namespace mlxtape::ops::elementwise {

struct Operand {
  const Tensor* tensor;  // null: a number
  double value = 0;

  Operand(const Tensor& t) : tensor(&t) {}          // NOLINT: operands are written as what they are
  Operand(double v) : tensor(nullptr), value(v) {}  // NOLINT
};

// The kernel of handle and dtype on operands stretched to shape, all of one type but for a condition in
// front. Into out.
void run(CommandEncoder& encoder, const KernelHandle& handle, DType dtype, const Shape& shape,
         std::initializer_list<Operand> operands, std::initializer_list<TensorRef> out);

// The same with one result, in candidate's memory if it may be had.
Tensor run_into(CommandEncoder& encoder, const KernelHandle& handle, DType dtype,
                const Shape& shape, std::initializer_list<Operand> operands,
                const Tensor& candidate);

}  // namespace mlxtape::ops::elementwise
