// Inputs as kernels take them.
#pragma once

#include "mlxtape/core/encoder.h"

namespace mlxtape::ops {

inline Tensor contiguous_or_absent(CommandEncoder& encoder, const Tensor& t) {
  return t.defined() ? encoder.contiguous(t) : t;
}

// Of [B, T, H, D] or [T, H, D]: from one batch entry, token and head to the next, for kernels that need channels
// side by side, and the tensor, which is a copy where they were not.
inline Tensor heads_of(CommandEncoder& encoder, const Tensor& t, std::int64_t (&strides)[3]) {
  const std::int64_t rank = t.rank();
  const bool side_by_side = t.shape().back() == 1 || t.strides()[rank - 1] == 1;
  Tensor rows = side_by_side ? t : encoder.contiguous(t);
  strides[0] = rank == 4 ? rows.strides()[0] : 0;
  strides[1] = rows.strides()[rank - 3];
  strides[2] = rows.strides()[rank - 2];
  return rows;
}

}  // namespace mlxtape::ops
