#include "head_kl.h"

#include <algorithm>

#include "mlxtape/ops/elementwise.h"
#include "mlxtape/ops/kl_divergence.h"
#include "mlxtape/ops/matmul.h"
#include "mlxtape/ops/take_along_axis.h"

namespace mlxtape::jobs {

namespace {

// For dloss = 1. What is not wanted is not defined.
struct Gradients {
  Tensor hidden, scales, biases;
};

class Chunks {
 public:
  Chunks(CommandEncoder& encoder, const nn::Weight& head, const HeadTeacher& teacher,
         ops::LossRows rows, float temperature, bool of_hidden, bool of_params)
      : encoder_(encoder),
        head_(head),
        teacher_(teacher),
        rows_(std::move(rows)),
        of_hidden_(of_hidden),
        of_params_(of_params) {
    how_.temperature = temperature;
    if (of_params_) {  // their sums over rows are then f32 as well
      wide_ = head.packed;
      wide_.scales = ops::cast(encoder, head.packed.scales.detach(), DType::kF32);
      wide_.biases = ops::cast(encoder, head.packed.biases.detach(), DType::kF32);
    }
  }

  // Rows [start, stop) of all: their losses are written, and their share of the gradients.
  void run(const Tensor& hidden, std::int64_t start, std::int64_t stop, const Tensor& losses,
           Gradients& gradients) {
    Tape none(encoder_);
    const Tensor logits = nn::linear(none, hidden, constant_head());
    const bool wanted = of_hidden_ || of_params_;
    const Tensor dlogits = compare(logits, start, stop, losses, wanted);
    if (wanted) back(hidden, dlogits, start, stop, gradients);
  }

 private:
  nn::Weight constant_head() const {
    if (!head_.is_packed()) return head_.plain.detach();
    ops::QuantizedWeight w = head_.packed;
    w.scales = w.scales.detach();
    w.biases = w.biases.detach();
    return w;
  }

  // dlogits, where wanted, in the memory of the logits.
  Tensor compare(const Tensor& logits, std::int64_t start, std::int64_t stop, const Tensor& losses,
                 bool wanted) {
    const ops::LossRows rows = rows_.slice(start, stop);
    if (teacher_.logits) {
      ops::kl_divergence_rows(encoder_, logits, teacher_.logits(start, stop), how_, rows, losses,
                              wanted ? logits : Tensor());
      return logits;
    }
    const Tensor indices = teacher_.indices.slice(0, start, stop);
    const Tensor some = ops::take_along_axis_topk(encoder_, logits, indices);
    ops::kl_divergence_rows(encoder_, some, teacher_.values.slice(0, start, stop), how_, rows,
                            losses, wanted ? some : Tensor());
    if (!wanted) return {};
    return ops::take_along_axis_topk_backward(encoder_, some, indices, logits.dim(1));
  }

  void back(const Tensor& hidden, const Tensor& dlogits, std::int64_t start, std::int64_t stop,
            Gradients& sum) {
    const Tensor dhidden = of_hidden_ ? sum.hidden.slice(0, start, stop) : Tensor();
    if (!head_.is_packed()) {
      ops::matmul_into(encoder_, dlogits, head_.plain.detach(), dhidden, 0);
      return;
    }
    const ops::QuantizedWeight& w = of_params_ ? wide_ : head_.packed;
    const auto part =
        ops::quantized_matmul_backward(encoder_, hidden, w, dlogits, {of_hidden_, of_params_});
    if (of_hidden_) encoder_.copy(part.dx, dhidden);
    if (of_params_) {
      encoder_.add_into(sum.scales, part.d_scales);
      encoder_.add_into(sum.biases, part.d_biases);
    }
  }

  CommandEncoder& encoder_;
  const nn::Weight& head_;
  const HeadTeacher& teacher_;
  ops::LossRows rows_;
  ops::KlDivergenceOptions how_;
  ops::QuantizedWeight wide_;
  bool of_hidden_, of_params_;
};

void head_kl_pullback(Pullback& pullback) {
  CommandEncoder& encoder = pullback.encoder();
  const Tensor& dloss = pullback.grad();
  for (std::size_t i = 0; i < pullback.inputs(); ++i) {
    if (!pullback.needs(i)) continue;
    Tensor scaled = ops::multiply(encoder, pullback.saved()[i], dloss);
    pullback.give(i, ops::cast(encoder, std::move(scaled), pullback.sum_type(i)));
  }
}

}  // namespace

Tensor head_kl(Tape& tape, const Tensor& hidden, const nn::Weight& head, const HeadTeacher& teacher,
               const Tensor& weights, const HeadKlOptions& options) {
  CommandEncoder& encoder = tape.encoder();
  if (!head.is_packed() && tape.wants({head.plain})) {
    throw Error(Errc::kNoGradient, "head_kl: a plain head must not be watched");
  }
  const std::int64_t count = hidden.dim(0);
  const bool packed = head.is_packed();
  const bool of_hidden = tape.wants({hidden});
  const bool of_params = packed && tape.wants({head.packed.scales, head.packed.biases});
  const ops::LossRows rows =
      ops::loss_rows(encoder, count, {weights, {}, 0, {}, ops::Reduction::kMean});
  Gradients sum;
  if (of_hidden) sum.hidden = encoder.empty(hidden.shape(), hidden.dtype());
  if (of_params) {
    sum.scales = encoder.zeros(head.packed.scales.shape(), DType::kF32);
    sum.biases = encoder.zeros(head.packed.biases.shape(), DType::kF32);
  }
  const Tensor losses = encoder.empty({count}, DType::kF32);
  const Tensor h = encoder.contiguous(hidden.detach());
  Chunks chunks(encoder, head, teacher, rows, options.temperature, of_hidden, of_params);
  for (std::int64_t start = 0; start < count; start += options.chunk_rows) {
    const std::int64_t stop = std::min(count, start + options.chunk_rows);
    chunks.run(h.slice(0, start, stop), start, stop, losses.slice(0, start, stop), sum);
  }
  Tensor loss = ops::loss_rows_reduce(encoder, losses, rows, ops::Reduction::kMean);
  if (of_hidden || of_params) {
    const Tensor& scales = packed ? head.packed.scales : head.plain;
    const Tensor& biases = packed ? head.packed.biases : head.plain;
    tape.record("head_kl", head_kl_pullback, {hidden, scales, biases}, {&loss},
                Saved({sum.hidden, sum.scales, sum.biases}));
  }
  return loss;
}

}  // namespace mlxtape::jobs
