// RowGrad: a gradient of [V, …] that is zero but in few rows: those rows, and which they are. An embedding's,
// of 16 thousand tokens among 150 thousand, is a tenth of the dense one, and costs nothing of size V.
#pragma once

#include "mlxtape/core/encoder.h"

namespace mlxtape {

// dL/dx[ids[i]] = rows[i]; every other row is zero. How many there are is known on the device alone, so
// that a step can be captured whole; ids past the last are -1, and their rows are zero.
//
// The tape adds gradients up without knowing any op, so they bring along how.
struct RowGrad {
  // dense [V, …] += rows, added in f32. dense is contiguous, of any float.
  using AddTo = void (*)(CommandEncoder&, const Tensor& dense, const RowGrad& rows);
  // Both as one, of a tensor of this shape, with rows of type; b without rows: a alone.
  using Merge = RowGrad (*)(CommandEncoder&, const RowGrad& a, const RowGrad& b, const Shape& shape,
                            DType type);

  Tensor ids;   // [n] i32, ascending, each once, then -1
  Tensor rows;  // [n, …], a float
  AddTo add_to = nullptr;
  Merge merge = nullptr;
};

}  // namespace mlxtape
