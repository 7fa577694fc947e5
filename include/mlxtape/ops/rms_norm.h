// rms_norm: each row divided by its root mean square, times a weight; plain, after a residual sum, or
// multiplied by silu of a gate; and l2_norm, each row divided by its length. With gradients.
//
// Formula    r[b]    = 1 / sqrt(1/D · Σ_i x[b,i]² + eps)
//            y[b,i]  = x[b,i]·r[b]·w[i]
//   residual h[b,i]  = x[b,i] + residual[b,i], rounded to its type;  y and r as above, computed from h
//   gated    y[b,i]  = x[b,i]·r[b]·w[i]·silu(g[b,i]),  silu(g) = g·σ(g),  σ(g) = 1/(1 + exp(−g))
//   l2_norm  r[b]    = 1 / sqrt(Σ_i x[b,i]² + eps),  y[b,i] = x[b,i]·r[b]
// Gradient   s[b]    = Σ_i dy[b,i]·x[b,i]·w[i]
//            dx[b,k] = r[b]·(dy[b,k]·w[k] − x[b,k]·(s[b]·r[b]²/D))
//            dw[i]   = Σ_b dy[b,i]·x[b,i]·r[b]
//   residual dh      = dh_in + dx, computed from h: the gradient of x and of residual alike
//   gated    dx, dw    with dy·silu(g) in place of dy
//            dg[b,i] = dy[b,i]·x[b,i]·r[b]·w[i]·σ(g[b,i])·(1 + g[b,i]·(1 − σ(g[b,i])))
//   l2_norm  dx        with 1 in place of D and of w
// Layout     x, y, h, residual, g and their gradients: any shape with D as the last axis; all other
//            axes count rows b. w, dw: [D]. r: the shape of x without its last axis. Strided inputs
//            are copied first. Saved for backward: x (h), r, w, and g.
// Types      x: f32, f16, bf16, as everything of its shape. w: the type of x, or f32; dw has
//            the type of w. r: f32. Sums are f32, each result is rounded once.
// Cost       elements, of R·D; r, w and dw are small.
//            plain     forward reads 1, writes 1;  backward reads 2, writes 1
//            residual  forward reads 2, writes 2;  backward reads 2 or 3 (dh_in), writes 1
//            gated     forward reads 2, writes 1;  backward reads 3, writes 2
//            A row is used twice: one that does not fit the second-level cache is read twice. A
//            row is never split between threads.
// Limits     rank ≥ 1, D ≥ 1, eps finite and ≥ 0. 0 rows give empty results and dw = 0. NaN makes
//            its row NaN. A row with an infinity, or whose Σ x² exceeds the largest f32, has r = 0.
//            eps = 0 and a row of zeros give r = inf and NaN. silu(−inf) is NaN.
#pragma once

#include "mlxtape/base/error.h"
#include "mlxtape/core/encoder.h"
#include "mlxtape/tape/tape.h"

namespace mlxtape::ops {

// Tensor() as w stands for a weight of ones; its dw is undefined.

struct RmsNorm {
  Tensor y, r;
};
struct RmsNormGrads {
  Tensor dx, dw;
};
Check rms_norm_check(const Tensor& x, const Tensor& w, float eps);
Check rms_norm_backward_check(const Tensor& x, const Tensor& w, const Tensor& r, const Tensor& dy);

RmsNorm rms_norm(CommandEncoder& encoder, const Tensor& x, const Tensor& w, float eps);

// dx and dw from x, w, the r returned by rms_norm, and dy, the gradient of y.
RmsNormGrads rms_norm_backward(CommandEncoder& encoder, const Tensor& x, const Tensor& w,
                               const Tensor& r, const Tensor& dy);

struct RmsNormResidual {
  Tensor y, h, r;
};
struct RmsNormResidualGrads {
  Tensor dh, dw;
};
Check rms_norm_residual_check(const Tensor& x, const Tensor& residual, const Tensor& w, float eps);
Check rms_norm_residual_backward_check(const Tensor& h, const Tensor& w, const Tensor& r,
                                       const Tensor& dy, const Tensor& dh_in);

RmsNormResidual rms_norm_residual(CommandEncoder& encoder, const Tensor& x, const Tensor& residual,
                                  const Tensor& w, float eps);

// dh_in is the gradient of h other than through y; Tensor() stands for none.
RmsNormResidualGrads rms_norm_residual_backward(CommandEncoder& encoder, const Tensor& h,
                                                const Tensor& w, const Tensor& r, const Tensor& dy,
                                                const Tensor& dh_in);

struct RmsNormGatedGrads {
  Tensor dx, dw, dg;
};
Check rms_norm_gated_check(const Tensor& x, const Tensor& w, const Tensor& g, float eps);
Check rms_norm_gated_backward_check(const Tensor& x, const Tensor& w, const Tensor& g,
                                    const Tensor& r, const Tensor& dy);

RmsNorm rms_norm_gated(CommandEncoder& encoder, const Tensor& x, const Tensor& w, const Tensor& g,
                       float eps);
RmsNormGatedGrads rms_norm_gated_backward(CommandEncoder& encoder, const Tensor& x, const Tensor& w,
                                          const Tensor& g, const Tensor& r, const Tensor& dy);

// Uses the kernels of rms_norm; checked by rms_norm_check without a weight.
RmsNorm l2_norm(CommandEncoder& encoder, const Tensor& x, float eps = 1e-6F);
Tensor l2_norm_backward(CommandEncoder& encoder, const Tensor& x, const Tensor& r,
                        const Tensor& dy);

// On a tape. A w that is Tensor() has no gradient; r is kept by the tape.
Tensor rms_norm(Tape& tape, const Tensor& x, const Tensor& w, float eps);
RmsNormResidual rms_norm_residual(Tape& tape, const Tensor& x, const Tensor& residual,
                                  const Tensor& w, float eps);  // r is undefined
Tensor rms_norm_gated(Tape& tape, const Tensor& x, const Tensor& w, const Tensor& g, float eps);
Tensor l2_norm(Tape& tape, const Tensor& x, float eps = 1e-6F);

}  // namespace mlxtape::ops
