// linear_loss: the output projection of a language model fused with the loss over its logits, for some
// rows at a time: linear_cross_entropy and linear_kl_divergence. The logits of all rows never exist at
// once, nor do their gradients.
//
// Formula    z[t,v]  = Σ_d hidden[t,d]·weight[v,d]
//            loss    = cross_entropy(z, targets), sum or mean     (ops/cross_entropy.h)
//                      kl_divergence(z, teacher), sum or mean     (ops/kl_divergence.h)
// Gradient   dhidden[t,d] = dloss·Σ_v dz[t,v]·weight[v,d];  dweight[v,d] = dloss·Σ_t dz[t,v]·hidden[t,d]
//            with dz for dloss = 1. Computed in the forward pass, chunk by chunk, if a tape needs them;
//            multiplied by dloss, on the device, in the backward pass. To hidden and weight only.
// Layout     hidden: [..., D], the axes before D count T rows; weight: [V, D]. targets, mask: T
//            elements. A teacher: logits [T, V], or k of them [T, k], or hidden [..., D'] and weight
//            [V, D'] of its own, whose logits are computed chunk by chunk too. loss: [].
//            Saved for backward: dhidden and dweight.
// Types      hidden, weight: one of f32, f16, bf16, as z, dz, dhidden. dweight is summed over chunks
//            in f32, or with f32_sums off in the weight's type. Products have f32 sums. In f16, dz of a
//            mean over many rows is small: below 6e-8 it is 0.
// Cost       6·T·D·V flop with gradients, 2·T·D·V without. Besides the traffic of the products, each logit
//            is read once and written once. A chunk's logits take 640 MiB on a GPU, 128 MiB on a CPU, or
//            less; dweight in f32 4·V·D bytes, read and written once per chunk.
// Limits     sum or mean only: a loss per row would need a gradient per row. V ≥ 1; T = 0 gives 0. Otherwise as
//            for the losses.
#pragma once

#include "mlxtape/base/error.h"
#include "mlxtape/core/encoder.h"
#include "mlxtape/ops/cross_entropy.h"
#include "mlxtape/ops/kl_divergence.h"
#include "mlxtape/tape/tape.h"

namespace mlxtape::ops {

struct LinearLossOptions {
  bool f32_sums = true;  // sum dweight in f32
  bool f32_dweight =
      false;  // and return it in f32: to a tape, only for a weight that is watched itself
  std::int64_t chunk_rows = 0;  // 0: as many as fit
};

// A teacher given by its logits, or by hidden and weight of its own.
struct LinearTeacher {
  LinearTeacher(KlTeacher given) : logits(std::move(given)) {}  // NOLINT: that is a teacher
  LinearTeacher(Tensor from, Tensor by)
      : logits(Tensor()), hidden(std::move(from)), weight(std::move(by)) {}

  KlTeacher logits;
  Tensor hidden, weight;  // undefined if logits are given
};

// The contract as code: the first rule violated, or nothing.
Check linear_cross_entropy_check(const Tensor& hidden, const Tensor& weight, const Tensor& targets,
                                 const CrossEntropyOptions& options,
                                 const LinearLossOptions& how = {});
Check linear_kl_divergence_check(const Tensor& hidden, const Tensor& weight,
                                 const LinearTeacher& teacher, const KlDivergenceOptions& options,
                                 const LinearLossOptions& how = {});

Tensor linear_cross_entropy(CommandEncoder& encoder, const Tensor& hidden, const Tensor& weight,
                            const Tensor& targets, const CrossEntropyOptions& options,
                            const LinearLossOptions& how = {});
Tensor linear_cross_entropy(Tape& tape, const Tensor& hidden, const Tensor& weight,
                            const Tensor& targets, const CrossEntropyOptions& options,
                            const LinearLossOptions& how = {});

Tensor linear_kl_divergence(CommandEncoder& encoder, const Tensor& hidden, const Tensor& weight,
                            const LinearTeacher& teacher, const KlDivergenceOptions& options,
                            const LinearLossOptions& how = {});
Tensor linear_kl_divergence(Tape& tape, const Tensor& hidden, const Tensor& weight,
                            const LinearTeacher& teacher, const KlDivergenceOptions& options,
                            const LinearLossOptions& how = {});

// The loss and its gradients for dloss = 1. Those that are not requested are not computed and are undefined.
// dweight: f32 with f32_sums, else of the weight's type.
struct LinearLoss {
  Tensor loss, dhidden, dweight;
};
struct LinearLossWanted {
  bool dhidden = true, dweight = true;
};
LinearLoss linear_cross_entropy_with_gradient(CommandEncoder& encoder, const Tensor& hidden,
                                              const Tensor& weight, const Tensor& targets,
                                              const CrossEntropyOptions& options,
                                              const LinearLossOptions& how = {},
                                              LinearLossWanted wanted = {});
LinearLoss linear_kl_divergence_with_gradient(CommandEncoder& encoder, const Tensor& hidden,
                                              const Tensor& weight, const LinearTeacher& teacher,
                                              const KlDivergenceOptions& options,
                                              const LinearLossOptions& how = {},
                                              LinearLossWanted wanted = {});

}  // namespace mlxtape::ops
