#include "mlxtape/nn/head_loss.h"

#include <algorithm>

#include "mlxtape/ops/elementwise.h"
#include "mlxtape/ops/matmul.h"
#include "mlxtape/ops/quantized_matmul.h"

namespace mlxtape::nn {

namespace {

// Each chunk reads the whole head. Below 64 rows products are made in another way, with other last bits.
constexpr std::int64_t kFewestRows = 128;

// For dloss = 1. What is not wanted is not defined.
struct Gradients {
  Tensor hidden, scales, biases;
};

class Chunks {
 public:
  Chunks(CommandEncoder& encoder, const Weight& head, bool of_hidden, bool of_params)
      : encoder_(encoder), head_(head), of_hidden_(of_hidden), of_params_(of_params) {
    if (of_params_) {  // their sums over rows are then f32 as well
      wide_ = head.quantized;
      wide_.scales = ops::cast(encoder, head.quantized.scales.detach(), DType::kF32);
      wide_.biases = ops::cast(encoder, head.quantized.biases.detach(), DType::kF32);
    }
  }

  // chunk: all of it but the logits.
  void run(const Tensor& hidden, HeadRows chunk, const HeadRowsLoss& loss_of,
           Gradients& gradients) {
    Tape none(encoder_);
    chunk.logits = linear(none, hidden, constant_head());
    chunk.gradient = of_hidden_ || of_params_;
    const Tensor dlogits = loss_of(chunk);
    if (chunk.gradient) back(hidden, dlogits, chunk.start, chunk.stop, gradients);
  }

 private:
  Weight constant_head() const {
    if (!head_.is_quantized()) return head_.plain.detach();
    ops::QuantizedWeight w = head_.quantized;
    w.scales = w.scales.detach();
    w.biases = w.biases.detach();
    return w;
  }

  void back(const Tensor& hidden, const Tensor& dlogits, std::int64_t start, std::int64_t stop,
            Gradients& sum) {
    const Tensor dhidden = of_hidden_ ? sum.hidden.slice(0, start, stop) : Tensor();
    if (!head_.is_quantized()) {
      ops::matmul_into(encoder_, dlogits, head_.plain.detach(), dhidden, 0);
      return;
    }
    const ops::QuantizedWeight& w = of_params_ ? wide_ : head_.quantized;
    const auto part =
        ops::quantized_matmul_backward(encoder_, hidden, w, dlogits, {of_hidden_, of_params_});
    if (of_hidden_) encoder_.copy(part.dx, dhidden);
    if (of_params_) {
      encoder_.add_into(sum.scales, part.d_scales);
      encoder_.add_into(sum.biases, part.d_biases);
    }
  }

  CommandEncoder& encoder_;
  const Weight& head_;
  ops::QuantizedWeight wide_;
  bool of_hidden_, of_params_;
};

void head_loss_pullback(Pullback& pullback) {
  CommandEncoder& encoder = pullback.encoder();
  const Tensor& dloss = pullback.grad();
  for (std::size_t i = 0; i < pullback.inputs(); ++i) {
    if (!pullback.needs(i)) continue;
    Tensor scaled = ops::multiply(encoder, pullback.saved()[i], dloss);
    pullback.give(i, ops::cast(encoder, std::move(scaled), pullback.sum_type(i)));
  }
}

void check(const Tape& tape, const Tensor& hidden, const Weight& head, std::int64_t chunk_rows) {
  if (hidden.rank() != 2) {
    throw Error(Errc::kShape,
                "head_loss: hidden must be [rows, width], got " + to_string(hidden.shape()));
  }
  require(linear_check(hidden, head, {}));
  if (head.adapter.defined()) {
    throw Error(Errc::kArgument, "head_loss: the head must not have an adapter");
  }
  if (!head.is_quantized() && tape.wants({head.plain})) {
    throw Error(Errc::kNoGradient, "head_loss: a plain head must not be watched");
  }
  if (chunk_rows < 0) {
    throw Error(Errc::kArgument,
                "head_loss: chunk_rows must be at least 0, got " + std::to_string(chunk_rows));
  }
}

}  // namespace

std::int64_t head_chunk_rows(const Device& device, std::int64_t classes, DType dtype) {
  const std::int64_t bytes = device.traits().logits_bytes;
  return std::max(bytes / (classes * static_cast<std::int64_t>(size_of(dtype))), kFewestRows);
}

Tensor head_loss(Tape& tape, const Tensor& hidden, const Weight& head, const ops::LossRows& rows,
                 const HeadRowsLoss& loss_of, std::int64_t chunk_rows) {
  check(tape, hidden, head, chunk_rows);
  CommandEncoder& encoder = tape.encoder();
  const std::int64_t count = hidden.dim(0);
  const bool quantized = head.is_quantized();
  const bool of_hidden = tape.wants({hidden});
  const bool of_params = quantized && tape.wants({head.quantized.scales, head.quantized.biases});
  const std::int64_t each =
      chunk_rows > 0 ? chunk_rows
                     : head_chunk_rows(encoder.device(), head.shape()[0], hidden.dtype());
  Gradients sum;
  if (of_hidden) sum.hidden = encoder.empty(hidden.shape(), hidden.dtype());
  if (of_params) {
    sum.scales = encoder.zeros(head.quantized.scales.shape(), DType::kF32);
    sum.biases = encoder.zeros(head.quantized.biases.shape(), DType::kF32);
  }
  const Tensor losses = encoder.empty({count}, DType::kF32);
  const Tensor h = encoder.contiguous(hidden.detach());
  Chunks chunks(encoder, head, of_hidden, of_params);
  for (std::int64_t start = 0; start < count; start += each) {
    const std::int64_t stop = std::min(count, start + each);
    chunks.run(h.slice(0, start, stop),
               {start, stop, {}, rows.slice(start, stop), losses.slice(0, start, stop)}, loss_of,
               sum);
  }
  Tensor loss = ops::loss_rows_reduce(encoder, losses, rows, ops::Reduction::kSum);
  if (of_hidden || of_params) {
    const Tensor& scales = quantized ? head.quantized.scales : head.plain;
    const Tensor& biases = quantized ? head.quantized.biases : head.plain;
    tape.record("head_loss", head_loss_pullback, {hidden, scales, biases}, {&loss},
                Saved({sum.hidden, sum.scales, sum.biases}));
  }
  return loss;
}

Tensor head_cross_entropy(Tape& tape, const Tensor& hidden, const Weight& head,
                          const Tensor& targets, const ops::CrossEntropyOptions& how,
                          std::int64_t chunk_rows) {
  if (how.reduction == ops::Reduction::kNone) {
    throw Error(Errc::kArgument, "head_cross_entropy: reduction must be sum or mean, got none");
  }
  CommandEncoder& encoder = tape.encoder();
  const ops::LossRows rows =
      ops::loss_rows(encoder, hidden.dim(0),
                     {how.mask, targets, head.shape()[0], how.ignore_index, how.reduction});
  return head_loss(
      tape, hidden, head, rows,
      [&](const HeadRows& chunk) {
        ops::cross_entropy_rows(encoder, chunk.logits, chunk.rows, how.label_smoothing,
                                chunk.losses, chunk.gradient ? chunk.logits : Tensor());
        return chunk.logits;
      },
      chunk_rows);
}

}  // namespace mlxtape::nn
