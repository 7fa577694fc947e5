#include "head_kl.h"

#include "mlxtape/nn/head_loss.h"
#include "mlxtape/ops/kl_divergence.h"
#include "mlxtape/ops/take_along_axis.h"

namespace mlxtape::jobs {

namespace {

// dlogits, where wanted, in the memory of the logits.
Tensor compare(CommandEncoder& encoder, const nn::HeadRows& chunk, const HeadTeacher& teacher,
               const ops::KlDivergenceOptions& how) {
  if (teacher.logits) {
    ops::kl_divergence_rows(encoder, chunk.logits, teacher.logits(chunk.start, chunk.stop), how,
                            chunk.rows, chunk.losses, chunk.gradient ? chunk.logits : Tensor());
    return chunk.logits;
  }
  const Tensor indices = teacher.indices.slice(0, chunk.start, chunk.stop);
  const Tensor some = ops::take_along_axis_topk(encoder, chunk.logits, indices);
  ops::kl_divergence_rows(encoder, some, teacher.values.slice(0, chunk.start, chunk.stop), how,
                          chunk.rows, chunk.losses, chunk.gradient ? some : Tensor());
  if (!chunk.gradient) return {};
  return ops::take_along_axis_topk_backward(encoder, some, indices, chunk.logits.dim(1));
}

}  // namespace

Tensor head_kl(Tape& tape, const Tensor& hidden, const nn::Weight& head, const HeadTeacher& teacher,
               const Tensor& weights, const HeadKlOptions& options) {
  CommandEncoder& encoder = tape.encoder();
  ops::KlDivergenceOptions how;
  how.temperature = options.temperature;
  const ops::LossRows rows =
      ops::loss_rows(encoder, hidden.dim(0), {weights, {}, 0, {}, ops::Reduction::kMean});
  return nn::head_loss(
      tape, hidden, head, rows,
      [&](const nn::HeadRows& chunk) { return compare(encoder, chunk, teacher, how); },
      options.chunk_rows);
}

}  // namespace mlxtape::jobs
