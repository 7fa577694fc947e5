// kl_divergence: the KL divergence of a student's distribution from its teacher's, both given as
// logits, in nats; the teacher's may be its k largest logits only. With the student's gradient.
//
// Formula    p[r,·]  = softmax(teacher[r,·]/T),  q[r,·] = softmax(student[r,·]/T)
//            l[r]    = w[r]·F·Σ_v p[r,v]·(log p[r,v] − log q[r,v])
//            loss    = l[r] for none, Σ_r l[r] for sum, Σ_r l[r] / Σ_r w[r] for mean
//            F       = T² with scale_by_t2, which keeps the size of gradients independent of T, else 1
//            w[r]    = mask[r], 1 without a mask                              (ops/loss_rows.h)
//            top k:  p is the softmax over the k values only; the sum runs over them, at their
//                    indices; log q is over all V.
// Gradient   c[r]    = dloss·w[r]·F/T, for mean also divided by Σ_r w[r]
//            dstudent[r,v] = c[r]·(q[r,v] − p[r,v]), p = 0 if v is not among the k
//            to the student only: the teacher is a constant, watched or not, as is the mask
// Layout     student, teacher: [..., V], the axes before V count R rows; values, indices: [..., k].
//            mask: [...] or [R]. loss: [...] for none, else []. Strided inputs are copied first.
//            Saved for backward: student, teacher and, a few numbers per row, the m and Σ exp(z − m) of
//            both, w. Nothing else of size R·V exists besides these and dstudent.
// Types      student, teacher, values: f32, f16, bf16, each its own; dstudent as student; indices:
//            u32; mask: bool, f32, f16, bf16. loss: f32. All arithmetic is f32; dstudent is rounded once.
// Cost       forward: reads 2·RV elements, 1·RV from k. Backward: the same and writes 1·RV. With
//            gradient: reads 2·RV (1·RV), writes 1·RV in all. A row with w = 0 is not read.
// Limits     V ≥ 1, k ≥ 1, T > 0. Rows with w = 0 give exactly 0. The indices of a row must be
//            distinct, which is not checked; one outside [0, V) makes the row's loss NaN and its gradient
//            meaningless. Where p > 0 and the student has −inf the loss is +inf. A row with
//            +inf or NaN, or only −inf, in either, gives NaN.
#pragma once

#include "mlxtape/base/error.h"
#include "mlxtape/core/encoder.h"
#include "mlxtape/ops/loss_rows.h"
#include "mlxtape/tape/tape.h"

namespace mlxtape::ops {

// All V logits, or the k largest and their indices: then logits is undefined.
struct KlTeacher {
  KlTeacher(Tensor all) : logits(std::move(all)) {}  // NOLINT: a teacher's logits are a teacher
  KlTeacher(Tensor top, Tensor places) : values(std::move(top)), indices(std::move(places)) {}

  Tensor logits;           // [..., V]
  Tensor values, indices;  // [..., k]

  KlTeacher slice(std::int64_t start, std::int64_t stop) const;  // along the first axis
};

struct KlDivergenceOptions {
  float temperature = 1;     // T
  bool scale_by_t2 = false;  // F = T²
  Tensor mask = {};
  Reduction reduction = Reduction::kNone;
};

// The contract as code: the first rule violated, or nothing.
Check kl_divergence_check(const Tensor& student, const KlTeacher& teacher,
                          const KlDivergenceOptions& options = {});
Check kl_divergence_with_gradient_check(const Tensor& student, const KlTeacher& teacher,
                                        const KlDivergenceOptions& options, const Tensor& dstudent);
Check kl_divergence_rows_check(const Tensor& student, const KlTeacher& teacher,
                               const KlDivergenceOptions& options, const LossRows& rows,
                               const Tensor& losses, const Tensor& dstudent);

Tensor kl_divergence(CommandEncoder& encoder, const Tensor& student, const KlTeacher& teacher,
                     const KlDivergenceOptions& options = {});
Tensor kl_divergence(Tape& tape, const Tensor& student, const KlTeacher& teacher,
                     const KlDivergenceOptions& options = {});

// The loss, and what the backward pass takes: norm [R, 4] f32 is m and Σ_v exp((z − m)/T) of each row of
// the student, then of the teacher, for some m near the largest z.
struct KlDivergenceParts {
  Tensor loss, norm;
  LossRows rows;
};
KlDivergenceParts kl_divergence_parts(CommandEncoder& encoder, const Tensor& student,
                                      const KlTeacher& teacher, const KlDivergenceOptions& options);
// dstudent from dloss, the gradient that reaches the loss: one number or one per row. parts.loss is not read.
Tensor kl_divergence_backward(CommandEncoder& encoder, const Tensor& student,
                              const KlTeacher& teacher, const KlDivergenceParts& parts,
                              const Tensor& dloss, const KlDivergenceOptions& options);

// The loss, and in dstudent, contiguous, its gradient for dloss = 1, in one call. dstudent may be student itself.
Tensor kl_divergence_with_gradient(CommandEncoder& encoder, const Tensor& student,
                                   const KlTeacher& teacher, const KlDivergenceOptions& options,
                                   const Tensor& dstudent);

// The same for some of the rows of a loss; mask and reduction are taken from rows, not from options.
// Writes losses [R] f32 and dstudent, or the losses only if dstudent is undefined.
void kl_divergence_rows(CommandEncoder& encoder, const Tensor& student, const KlTeacher& teacher,
                        const KlDivergenceOptions& options, const LossRows& rows,
                        const Tensor& losses, const Tensor& dstudent);

}  // namespace mlxtape::ops
