// matmul: matrix products, with a bias, an activation and a residual fused into the product. With
// gradients.
//
// Formula    z[m,n]  = Σ_k a[m,k]·b[k,n] + bias[n]
//            y[m,n]  = act(z[m,n]) + residual[m,n]
//            act     none: z;   silu: z·σ(z), σ(z) = 1/(1 + exp(−z))
//                    gelu: z·Φ(z), Φ(z) = (1 + erf(z/√2))/2
//                    gelu_tanh: z·(1 + tanh(√(2/π)·(z + 0.044715·z³)))/2
// Gradient   dz      = dy·act′(z)
//            da[m,k] = Σ_n dz[m,n]·b[k,n];   db[k,n] = Σ_m a[m,k]·dz[m,n]
//            dbias   = Σ_m dz[m,n];          dresidual = dy
//            each also summed over the batch axes along which that input was broadcast
// Layout     a: [..., M, K], b: [..., K, N], y and residual: [..., M, N], bias: [N]. Batch axes
//            broadcast. a with one axis is a row, b with one axis a column, and that axis is not in y.
//            Any strides: nothing is copied if one of the last two axes has stride 1 and the
//            other steps over it, as after transpose; otherwise the input is copied first. If b is
//            [K, N], all of a's rows are one matrix, in the forward pass and in db.
//            Saved for backward: a, b, and with an activation z, which costs as much as y.
// Types      a, b, bias and their gradients: one of f32, f16, bf16. y, z, residual: that type, or
//            f32 with out_dtype. Products and sums are f32, f32 inputs in full. The result is rounded
//            once; with an activation twice, because z may be. dz has the type of a. On CUDA cuBLASLt chooses
//            the order of summation by sizes, strides and alignment: the same bits on every run, but not for
//            views of the same numbers at another address.
// Cost       2·M·N·K flop forward, twice that backward; memory-bound below about 16 rows or
//            columns on a CPU, about 300 on a GPU. With an activation backward also reads dy and z
//            and writes dz.
// Limits     any sizes: K = 0 gives act(bias) + residual. a and b of different types are an error: cast one.
#pragma once

#include <optional>

#include "mlxtape/base/error.h"
#include "mlxtape/core/encoder.h"
#include "mlxtape/tape/tape.h"

namespace mlxtape::ops {

enum class Activation : std::int32_t { kNone, kSilu, kGelu, kGeluTanh };

struct MatmulOptions {
  Tensor bias = {};  // [N]; none if undefined
  Activation activation = Activation::kNone;
  Tensor residual = {};                 // [..., M, N]; none if undefined
  std::optional<DType> out_dtype = {};  // f32; the type of a if not given
};

// The contract as code: the first rule violated, or nothing.
Check matmul_check(const Tensor& a, const Tensor& b, const MatmulOptions& options = {});
Check matmul_into_check(const Tensor& a, const Tensor& b, const Tensor& out);
Check matmul_backward_check(const Tensor& a, const Tensor& b, const Tensor& z, const Tensor& dy,
                            Activation activation);

Tensor matmul(CommandEncoder& encoder, const Tensor& a, const Tensor& b,
              const MatmulOptions& options = {});
Tensor matmul(Tape& tape, const Tensor& a, const Tensor& b, const MatmulOptions& options = {});

// out = a·b + beta·out, for sums over several products. out: contiguous, of the result's shape, of
// the type of a or f32; with beta 0 its old content does not matter.
void matmul_into(CommandEncoder& encoder, const Tensor& a, const Tensor& b, const Tensor& out,
                 float beta = 1);

// Gradients from dy, the gradient of y. z: as stored by matmul, defined if there is an activation.
// Gradients that are not requested are not computed, and are undefined in the result.
struct MatmulGrads {
  Tensor da, db, dbias;
};
struct MatmulWanted {
  bool da = true, db = true, dbias = false;
};
MatmulGrads matmul_backward(CommandEncoder& encoder, const Tensor& a, const Tensor& b,
                            const Tensor& z, const Tensor& dy,
                            Activation activation = Activation::kNone, MatmulWanted wanted = {});

// y and z for matmul_backward.
struct MatmulWithZ {
  Tensor y, z;
};
MatmulWithZ matmul_with_z(CommandEncoder& encoder, const Tensor& a, const Tensor& b,
                          const MatmulOptions& options = {});

}  // namespace mlxtape::ops
