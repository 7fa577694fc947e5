// reuse_or_empty: results written into memory that nobody else needs any more.
#pragma once

#include "mlxtape/core/encoder.h"

namespace mlxtape {

// candidate itself where a kernel that reads each element before it writes it may put a result of that
// shape and type there: candidate's holder is its only owner, it is contiguous, and its memory is not
// foreign. Else a new tensor. For functions that take a tensor by value: whoever moves one in gives its
// memory away.
inline Tensor reuse_or_empty(CommandEncoder& encoder, const Tensor& candidate, const Shape& shape,
                             DType dtype) {
  const bool reusable = candidate.buffer().owners() == 1 && !candidate.buffer().is_foreign() &&
                        candidate.dtype() == dtype && candidate.shape() == shape &&
                        candidate.is_contiguous() && candidate.device() == &encoder.device();
  return reusable ? candidate : encoder.empty(shape, dtype);
}

}  // namespace mlxtape
