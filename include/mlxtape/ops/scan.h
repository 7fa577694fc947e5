// scan: running sums along an axis, and their gradient: cumsum.
//
// Formula    y[i]  = Σ_j x[j], j ≤ i;  reverse: j ≥ i;  not inclusive: without j = i
// Gradient   dx[i] = Σ_j dy[j], j ≥ i: the same op with reverse inverted
// Layout     any shape; a row runs along axis, all other axes count rows. Strided inputs are copied first.
//            Saved for backward: nothing.
// Types      f32, f16, bf16: sums in f32, each result rounded once. Integers wrap around in their own type;
//            bools are counted in i32.
// Cost       reads 1, writes 1 element each; if there are only a few long rows they are read twice: each piece is
//            summed before any is scanned
// Limits     rank ≥ 1; an axis of length 0 gives an empty result. NaN, also from infinities of both signs, stays to
//            the end of the row. The order of summation depends on the shape only.
#pragma once

#include "mlxtape/base/error.h"
#include "mlxtape/core/encoder.h"
#include "mlxtape/tape/tape.h"

namespace mlxtape::ops {

Check cumsum_check(const Tensor& x, std::int64_t axis);
Tensor cumsum(CommandEncoder& encoder, const Tensor& x, std::int64_t axis, bool reverse = false,
              bool inclusive = true);
Tensor cumsum(Tape& tape, const Tensor& x, std::int64_t axis, bool reverse = false,
              bool inclusive = true);

}  // namespace mlxtape::ops
