// scan: running sums along an axis, and their gradient: cumsum.
//
// Formula    y[i]  = Σ_j x[j], j ≤ i;  reverse: j ≥ i;  not inclusive: without j = i
// Gradient   dx[i] = Σ_j dy[j], j ≥ i: the same with reverse turned over
// Layout     any shape; a row runs along axis, all other axes count rows. Strided inputs are copied first.
//            Saved for backward: nothing.
// Types      f32, f16, bf16: sums in f32, each result rounded once. Integers wrap around in their own type;
//            bools are counted in i32.
// Cost       reads 1, writes 1 element each; long rows, where there are few, are read twice: each piece is summed
//            before any is scanned
// Limits     rank ≥ 1; an axis of length 0 gives an empty result. NaN, and what infinities of both signs make
//            of a sum, stays to the end of the row. The sums of a row are made in an order that its shape
//            alone decides.
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
