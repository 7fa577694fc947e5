// cross_entropy: the cross-entropy of each row of logits with its target, in nats, and its gradient.
//
// Formula    lse[r]  = log Σ_v exp(z[r,v])
//            l[r]    = w[r]·(lse[r] − (1 − ε)·z[r,t[r]] − ε/V·Σ_v z[r,v])
//            loss    = l[r] for none, Σ_r l[r] for sum, Σ_r l[r] / Σ_r w[r] for mean
//            w[r]    = mask[r], 1 without a mask, 0 where t[r] = ignore_index   (ops/loss_rows.h)
// Gradient   c[r]    = dloss·w[r], for mean also divided by Σ_r w[r]
//            dz[r,v] = c[r]·(exp(z[r,v] − lse[r]) − (1 − ε)·[v = t[r]] − ε/V)
//            to the logits only: mask and targets are constants
// Layout     z: [..., V], the axes before V count R rows. t, mask: [...] or [R]. loss: [...] for
//            none, else []. Strided inputs are copied first. Saved for backward: z and, a few numbers
//            per row, m, Σ exp(z − m), t, w. Nothing else of size R·V exists besides z and dz.
// Types      z, dz: f32, f16, bf16. t: i32, u32, i64. mask: bool, f32, f16, bf16. loss: f32. All
//            arithmetic is f32; dz is rounded once.
// Cost       forward: reads 1·RV elements. Backward: reads 1·RV, writes 1·RV. With gradient: reads
//            1·RV, writes 1·RV in all. A row with w = 0 is not read.
// Limits     V ≥ 1; 0 ≤ ε ≤ 1. Rows with w = 0 give exactly 0, whatever is in them; if no row
//            counts, loss and gradient are 0. A target outside [0, V) that is not ignore_index
//            cannot be rejected without waiting for the device: its row's loss and gradient are NaN.
//            Logits of −inf are legal: away from the target and without ε they contribute nothing; otherwise
//            the loss is +inf. A row with +inf or NaN, or only −inf, gives NaN.
#pragma once

#include <optional>

#include "mlxtape/base/error.h"
#include "mlxtape/core/encoder.h"
#include "mlxtape/ops/loss_rows.h"
#include "mlxtape/tape/tape.h"

namespace mlxtape::ops {

struct CrossEntropyOptions {
  Tensor mask = {};
  std::optional<std::int64_t> ignore_index = {};
  float label_smoothing = 0;  // ε
  Reduction reduction = Reduction::kNone;
};

// The contract as code: the first rule violated, or nothing.
Check cross_entropy_check(const Tensor& logits, const Tensor& targets,
                          const CrossEntropyOptions& options = {});
Check cross_entropy_with_gradient_check(const Tensor& logits, const Tensor& targets,
                                        const CrossEntropyOptions& options, const Tensor& dlogits);
Check cross_entropy_rows_check(const Tensor& logits, const LossRows& rows, float label_smoothing,
                               const Tensor& losses, const Tensor& dlogits);

Tensor cross_entropy(CommandEncoder& encoder, const Tensor& logits, const Tensor& targets,
                     const CrossEntropyOptions& options = {});
Tensor cross_entropy(Tape& tape, const Tensor& logits, const Tensor& targets,
                     const CrossEntropyOptions& options = {});

// The loss, and what the backward pass takes: norm [R, 2] f32 is m and Σ_v exp(z − m) of each row, for
// some m near the largest z. Two numbers, because their lse would lose what z − lse needs.
struct CrossEntropyParts {
  Tensor loss, norm;
  LossRows rows;
};
CrossEntropyParts cross_entropy_parts(CommandEncoder& encoder, const Tensor& logits,
                                      const Tensor& targets, const CrossEntropyOptions& options);
// dz from dloss, the gradient that reaches the loss: one number or one per row. parts.loss is not read.
Tensor cross_entropy_backward(CommandEncoder& encoder, const Tensor& logits,
                              const CrossEntropyParts& parts, const Tensor& dloss,
                              float label_smoothing);

// The loss, and in dlogits, contiguous, its gradient for dloss = 1, in one call. dlogits may be logits itself.
Tensor cross_entropy_with_gradient(CommandEncoder& encoder, const Tensor& logits,
                                   const Tensor& targets, const CrossEntropyOptions& options,
                                   const Tensor& dlogits);

// The same for some of the rows of a loss: logits [R, V]; writes losses [R] f32 and dlogits, or the
// losses only if dlogits is undefined.
void cross_entropy_rows(CommandEncoder& encoder, const Tensor& logits, const LossRows& rows,
                        float label_smoothing, const Tensor& losses, const Tensor& dlogits);

}  // namespace mlxtape::ops
