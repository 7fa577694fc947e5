#include <cmath>

#include "dynamic_formats.h"
#include "head.h"
#include "mlxtape/jobs/evaluate.h"
#include "mlxtape/ops/elementwise.h"
#include "mlxtape/ops/layout.h"
#include "mlxtape/ops/linear_loss.h"
#include "mlxtape/ops/reduce.h"

namespace mlxtape::jobs {

namespace {

// Elements of a weight that are compared at a time, in f32: 64 MiB of each of the few tensors it takes.
constexpr std::int64_t kPart = std::int64_t{1} << 24;

struct ProbeArgs {
  models::WeightFormat low, high;
  ops::QuantizeRule rounding;
};

// In few bits and back.
Tensor coarse(CommandEncoder& encoder, const Tensor& w, models::WeightFormat p,
              ops::QuantizeRule rounding) {
  return ops::dequantize(encoder, ops::quantize(encoder, w, {p.bits, p.group_size}, rounding));
}

// The gradient of t: Σ dw∘(w_low − w_high).
void probe_pullback(Pullback& pullback) {
  if (!pullback.needs(0)) return;
  CommandEncoder& encoder = pullback.encoder();
  const Tensor& w = pullback.saved()[0];
  const auto args = pullback.saved().args<ProbeArgs>();
  const Tensor dw = encoder.contiguous(pullback.grad());
  const std::int64_t each =
      std::max<std::int64_t>(1, kPart * w.dim(0) / std::max<std::int64_t>(1, w.size()));
  const Tensor sum = encoder.zeros({}, DType::kF32);
  for (std::int64_t start = 0; start < w.dim(0); start += each) {
    const std::int64_t stop = std::min(w.dim(0), start + each);
    const Tensor some = w.slice(0, start, stop);
    const auto wide = [&](models::WeightFormat p) {
      return ops::cast(encoder, coarse(encoder, some, p, args.rounding), DType::kF32);
    };
    const Tensor lost = ops::subtract(encoder, wide(args.low), wide(args.high));
    const Tensor g = ops::cast(encoder, dw.slice(0, start, stop), DType::kF32);
    encoder.add_into(sum, ops::sum(encoder, ops::multiply(encoder, lost, g)));
  }
  pullback.give(0, sum);
}

// w_low, as w_low + t·(w_low − w_high) at t = 0.
Tensor probe(Tape& tape, const Tensor& w, const Tensor& t, const DynamicQuantOptions& options) {
  Tensor low = coarse(tape.encoder(), w, options.low, options.rounding);
  tape.record("probe", probe_pullback, {t}, {&low},
              Saved({w}, ProbeArgs{options.low, options.high, options.rounding}));
  return low;
}

class Measure {
 public:
  Measure(CommandEncoder& encoder, const models::Model& model, const SensitivityOptions& options)
      : encoder_(encoder), model_(model), options_(options), low_(model) {
    for (const models::ConstSlot& slot : models::slots(model)) {
      if (!slot.is_weight) continue;
      if (slot.weight->is_quantized()) {
        throw Error(Errc::kArgument,
                    "dynamic_quant: the model's weights must not be quantised, got " + slot.name +
                        " in " + std::to_string(slot.weight->quantized.format.bits) + " bits");
      }
      if (!is_measured(slot, options.formats)) continue;
      names_.push_back(slot.name);
      millions_.push_back(static_cast<double>(*element_count(slot.shape)) / 1e6);
    }
    sums_.resize(names_.size());
  }

  void add(const Batch& batch) {
    Tape tape(encoder_);
    zeros_.clear();
    for (std::size_t i = 0; i < names_.size(); ++i) {
      zeros_.push_back(tape.watch(encoder_.zeros({}, DType::kF32)));
    }
    const Tensor tokens = upload_tokens(encoder_, batch);
    const Tensor loss = divergence(tape, batch, tokens);
    tape.backward(loss);
    for (std::size_t i = 0; i < names_.size(); ++i) {
      float part = 0;
      encoder_.download(tape.grad(zeros_[i]), &part, sizeof part);
      if (!std::isfinite(part)) {
        throw NotFinite("dynamic_quant: the sensitivity of " + names_[i] + " must be finite, got " +
                        text_of_nonfinite(static_cast<double>(part)) + " in batch " +
                        std::to_string(batches_));
      }
      sums_[i] += static_cast<double>(part);
    }
    ++batches_;
  }

  Sensitivities result() const {
    Sensitivities values;
    for (std::size_t i = 0; i < names_.size(); ++i) {
      values.emplace_back(names_[i], sums_[i] / static_cast<double>(batches_) / millions_[i]);
    }
    return values;
  }

 private:
  Tensor divergence(Tape& tape, const Batch& batch, const Tensor& tokens) {
    const Tensor theirs = hidden_rows(encoder_, model_, tokens);
    low_.weights.embedding = lowered(tape, [](const models::Part& part) {
                               return part.role == models::Role::kEmbedding;
                             }).embedding;
    models::HiddenOptions how;
    how.checkpoint = options_.checkpoint;
    how.weights = [this](Tape& inner, std::int64_t layer) {
      const auto l = static_cast<std::size_t>(layer);
      return lowered(inner, [layer](const models::Part& part) { return part.layer == layer; })
          .layers[l];
    };
    const Tensor h = ops::reshape(tape, models::hidden(tape, low_, tokens, how),
                                  {tokens.size(), model_.config.plan.width});
    if (!model_.config.plan.tied) {
      low_.weights.head = lowered(tape, [](const models::Part& part) {
                            return part.role == models::Role::kHead;
                          }).head;
    }
    std::vector<float> counts;
    for (const std::int32_t target : batch.targets) counts.push_back(target < 0 ? 0.0F : 1.0F);
    ops::KlDivergenceOptions kl;
    kl.reduction = ops::Reduction::kMean;
    kl.mask = encoder_.empty({tokens.size()}, DType::kF32);
    encoder_.upload(counts.data(), kl.mask.bytes(), kl.mask);
    ops::LinearLossOptions chunks;
    chunks.chunk_rows = options_.chunk_rows;
    return ops::linear_kl_divergence(tape, h, low_.head().plain, {theirs, model_.head().plain}, kl,
                                     chunks);
  }

  // The model's weights, of which those that are chosen are w_low.
  template <class Chosen>
  models::Weights lowered(Tape& tape, const Chosen& chosen) const {
    models::Weights weights = model_.weights;
    std::size_t measured = 0;
    for (const models::Slot& slot : models::slots(weights, model_.config)) {
      if (!slot.is_weight) continue;
      const bool counts = is_measured(slot, options_.formats);
      const std::size_t number = counts ? measured++ : 0;
      if (!chosen(slot)) continue;
      if (counts) {
        *slot.weight = probe(tape, slot.weight->plain, zeros_[number], options_.formats);
      } else if (const auto p = format_of(slot, options_.formats, false); p.bits != 0) {
        *slot.weight = coarse(encoder_, slot.weight->plain, p, options_.formats.rounding);
      }
    }
    return weights;
  }

  CommandEncoder& encoder_;
  const models::Model& model_;
  const SensitivityOptions& options_;
  models::Model low_;
  std::vector<std::string> names_;
  std::vector<double> millions_, sums_;
  std::vector<Tensor> zeros_;  // the t of each
  std::int64_t batches_ = 0;
};

}  // namespace

std::vector<Batch> calibration_rows(const std::vector<Sample>& samples, std::int64_t length,
                                    std::int64_t batch_size, std::int64_t most) {
  if (length < 1 || batch_size < 1) {
    throw Error(Errc::kArgument, "dynamic_quant: length and batch_size must be at least 1, got " +
                                     std::to_string(length) + " and " + std::to_string(batch_size));
  }
  std::vector<std::int32_t> all;
  for (const Sample& sample : samples) {
    all.insert(all.end(), sample.tokens.begin(), sample.tokens.end());
  }
  std::int64_t rows = static_cast<std::int64_t>(all.size()) / length;
  if (rows == 0) {
    throw Error(Errc::kArgument, "dynamic_quant: the samples must have at least one row of " +
                                     std::to_string(length) + " tokens, got " +
                                     std::to_string(all.size()));
  }
  if (most > 0) rows = std::min(rows, most);
  std::vector<Batch> batches;
  for (std::int64_t first = 0; first < rows; first += batch_size) {
    Batch batch;
    batch.rows = std::min(batch_size, rows - first);
    batch.length = length;
    batch.counted = batch.rows * length;
    const auto begin = all.begin() + first * length;
    batch.tokens.assign(begin, begin + batch.counted);
    batch.targets = batch.tokens;  // none is -1: all count
    batches.push_back(std::move(batch));
  }
  return batches;
}

Sensitivities sensitivities(CommandEncoder& encoder, const models::Model& model,
                            const std::vector<Batch>& batches, const SensitivityOptions& options) {
  check_formats(options.formats, model.dtype());
  if (batches.empty()) {
    throw Error(Errc::kArgument, "dynamic_quant: there must be at least one batch, got none");
  }
  if (options.chunk_rows < 0) {
    throw Error(Errc::kArgument, "dynamic_quant: chunk_rows must be at least 0, got " +
                                     std::to_string(options.chunk_rows));
  }
  for (const Batch& batch : batches) check_batch("dynamic_quant", model, batch);
  Measure measure(encoder, model, options);
  for (std::size_t b = 0; b < batches.size(); ++b) {
    measure.add(batches[b]);
    if (options.progress) {
      options.progress(static_cast<std::int64_t>(b) + 1, static_cast<std::int64_t>(batches.size()));
    }
    if (b + 1 < batches.size() && options.stop && options.stop()) break;
  }
  return measure.result();
}

}  // namespace mlxtape::jobs
