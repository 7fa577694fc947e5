// sort: the elements along one axis in order, or the indices that put them in order.
//
// Formula    argsort p: x[p_0] ≤ x[p_1] ≤ …; equal ones by index; −0 = +0; NaN after every number
//            sort    y_j = x[p_j]
// Gradient   sort dx[p_j] = dy_j. Indices have none: nothing is recorded.
// Layout     x: any shape, sorted along axis (negative: from the end); without an axis x is flattened. Other
//            axes than the last and strided inputs are copied first.
// Types      x: f32, f16, bf16, i32, u32. Indices are u32. Values are moved, never changed.
// Cost       radix: a pass over the row for each 8 bits of the type, in cache up to 65,536 columns on a CPU and
//            in one block's memory up to 16,384 on CUDA
// Limits     rank ≥ 1 with an axis of less than 2³² elements; any extent may be 0.
#pragma once

#include "mlxtape/base/error.h"
#include "mlxtape/core/encoder.h"
#include "mlxtape/ops/take_along_axis.h"
#include "mlxtape/tape/tape.h"

namespace mlxtape::ops {

// The contract as code: the first rule broken, or nothing. op: the function's name.
Check sort_check(const char* op, const Tensor& x, OptionalAxis axis);

Tensor argsort(CommandEncoder& encoder, const Tensor& x, OptionalAxis axis = -1);

}  // namespace mlxtape::ops
