// quantized_matmul: products with quantised weights: codes of a few bits, with a scale and a bias for each group of
// neighbours in a row. With gradients.
//
// Formula    y[m,n] = Σ_k x[m,k]·w[n,k],  w[n,k] = s[n,g]·q[n,k] + b[n,g],  g = ⌊k/group⌋
// Gradient   dx[m,k] = Σ_n dy[m,n]·w[n,k];   dW[n,k] = Σ_m dy[m,n]·x[m,k], from which ds and db follow as for
//            dequantize; codes have none
// Layout     x: [..., K], y: [..., N]; w: [N, K], quantised as in quantize.h. Strided inputs are copied first.
//            Saved for backward: the inputs.
// Types      x, y: f32, f16, bf16; scales, biases: both that type or both f32; codes: u32. Sums are f32, results
//            rounded once. For few rows, M up to 8 on a GPU and up to 32 on a CPU, w is f32 and never stored; for more,
//            and in dx, it is rounded to the type of x. ds and db have the type of the scales, dW is f32.
// Cost       few rows: bound by reading the codes, on a CPU from about 4 rows on by arithmetic. More: also writes and
//            reads w in the type of x, at most 64 MB of it at a time (1 MB on a CPU); the gradient does so with dW.
// Limits     bits 2, 3, 4, 5, 6, 8; group 32, 64, 128; K a multiple of the group. M and N: any sizes.
#pragma once

#include "mlxtape/base/error.h"
#include "mlxtape/core/encoder.h"
#include "mlxtape/ops/quantize.h"
#include "mlxtape/tape/tape.h"

namespace mlxtape::ops {

struct QuantizedMatmulGrads {
  Tensor dx, d_scales, d_biases;
};

// Gradients that are not requested are not computed, and are undefined in the result. On a tape: those not needed.
struct QuantizedMatmulWanted {
  bool x = true;
  bool params = true;  // scales and biases
};

Check quantized_matmul_check(const Tensor& x, const QuantizedWeight& w);
Check quantized_matmul_backward_check(const Tensor& x, const QuantizedWeight& w, const Tensor& dy);

Tensor quantized_matmul(CommandEncoder& encoder, const Tensor& x, const QuantizedWeight& w);
Tensor quantized_matmul(Tape& tape, const Tensor& x, const QuantizedWeight& w);
QuantizedMatmulGrads quantized_matmul_backward(CommandEncoder& encoder, const Tensor& x,
                                               const QuantizedWeight& w, const Tensor& dy,
                                               QuantizedMatmulWanted wanted = {});

// dx = dy·w, or, if it adds, dx += dy·w. dx: contiguous.
Check quantized_matmul_dx_into_check(const QuantizedWeight& w, const Tensor& dy, const Tensor& dx);
void quantized_matmul_dx_into(CommandEncoder& encoder, const QuantizedWeight& w, const Tensor& dy,
                              const Tensor& dx, bool adds);

}  // namespace mlxtape::ops
