// quantized_matmul: products with weights that stay packed: codes of a few bits, with a scale and a bias for each
// group of neighbours in a row. With gradients.
//
// Formula    w[n,k] = s[n,g]·q[n,k] + b[n,g],  g = ⌊k/group⌋;   y[m,n] = Σ_k x[m,k]·w[n,k]
// Gradient   dx[m,k] = Σ_n dy[m,n]·w[n,k]
//            ds[n,g] = Σ_{k in g} dW[n,k]·q[n,k];   db[n,g] = Σ_{k in g} dW[n,k],  dW[n,k] = Σ_m dy[m,n]·x[m,k]
//            codes have none
// Layout     x: [..., K], y: [..., N]; codes: [N, K·bits/32], each row one stream of bits, q[n,k] being those from
//            k·bits on, counted from bit 0 of word 0; scales, biases: [N, K/group]. Strided inputs are copied first.
//            Saved for backward: the inputs.
// Types      x, y: f32, f16, bf16; scales, biases, both alike: that type or f32; codes: u32. Sums are f32, results
//            rounded once. For few rows, M up to 8 on a GPU and up to 32 on a CPU, w is f32 and never stored; for more,
//            and in dx, it is rounded to the type of x. ds and db have the type of the scales, dW is f32.
// Cost       few rows: bound by reading the codes, from about 4 rows on by arithmetic on a CPU. More: also writes and
//            reads w in the type of x, at most 64 MB of it at a time (1 MB on a CPU); the gradient does so with dW.
// Limits     bits 2, 3, 4, 5, 6, 8; group 32, 64, 128; K a multiple of the group. M and N: any sizes.
#pragma once

#include "mlxtape/base/error.h"
#include "mlxtape/core/encoder.h"
#include "mlxtape/tape/tape.h"

namespace mlxtape::ops {

struct QuantizedWeight {
  Tensor codes, scales, biases;
  int bits = 4, group_size = 64;
};

struct QuantizedMatmulGrads {
  Tensor dx, dscales, dbiases;
};

// What is not wanted is not computed, and undefined in the result. On a tape: what nobody asks for.
struct QuantizedMatmulWanted {
  bool x = true, scales = true, biases = true;
};

Check quantized_matmul_check(const Tensor& x, const QuantizedWeight& w);
Check quantized_matmul_backward_check(const Tensor& x, const QuantizedWeight& w, const Tensor& dy);

Tensor quantized_matmul(CommandEncoder& encoder, const Tensor& x, const QuantizedWeight& w);
Tensor quantized_matmul(Tape& tape, const Tensor& x, const QuantizedWeight& w);
QuantizedMatmulGrads quantized_matmul_backward(CommandEncoder& encoder, const Tensor& x,
                                               const QuantizedWeight& w, const Tensor& dy,
                                               QuantizedMatmulWanted wanted = {});

// For ops made of this one: w [..., N, K] in full, with as many axes as the codes, in a type that x may have; and from
// its gradient dw, of the same shape and type, the sums over groups: dscales and dbiases.
Check quantized_unpack_check(const QuantizedWeight& w, DType dtype);
Tensor quantized_unpack(CommandEncoder& encoder, const QuantizedWeight& w, DType dtype);
QuantizedMatmulGrads quantized_unpack_backward(CommandEncoder& encoder, const QuantizedWeight& w,
                                               const Tensor& dw);

}  // namespace mlxtape::ops
