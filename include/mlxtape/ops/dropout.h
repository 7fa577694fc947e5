// dropout: sets elements to zero at random and scales the others, so that the expected value stays.
//
// Formula    kept[i] = bernoulli(1 − p), drawn from the key as MLX draws it (ops/random.h)
//            y[i]    = x[i]/(1 − p) where kept, else 0;  p = 0: x itself;  p = 1: 0
// Gradient   dx[i]   = dy[i]/(1 − p) where kept, else 0; kept is drawn again from the same key
// Layout     x, y: any shape. key: [2] u32 on the device. Strided inputs are copied first. Saved for backward:
//            a copy of the key's 8 bytes, so that it may be advanced in place in the meantime; no mask is stored.
// Types      f32, f16, bf16. 1/(1 − p) is f32, the product is rounded once (MLX rounds 1/(1 − p) to x's type).
// Cost       reads 1, writes 1 element each, forward and backward; 35 integer operations for each
// Limits     0 ≤ p ≤ 1. Dropped elements are 0, even NaN and infinity. The same bits on every backend.
#pragma once

#include "mlxtape/base/error.h"
#include "mlxtape/core/encoder.h"
#include "mlxtape/tape/tape.h"

namespace mlxtape::ops {

Check dropout_check(const Tensor& x, double p, const Tensor& key);
// The gradient is the same function of dy: dropout(encoder, dy, p, key).
Tensor dropout(CommandEncoder& encoder, const Tensor& x, double p, const Tensor& key);
Tensor dropout(Tape& tape, const Tensor& x, double p, const Tensor& key);

}  // namespace mlxtape::ops
