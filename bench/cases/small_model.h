// A small language model without attention, made of recorded ops alone: what the tests of training train and
// the benchmark of a whole step measures.
//
//   x = embedding[ids]
//   each layer:  a, b = split(rms_norm(x)·In);  x += (silu(b)·conv(a))·Out
//                x += swiglu(rms_norm(x)·Gate, rms_norm(x)·Up)·Down
//   loss = mean cross-entropy of rms_norm(x)·Headᵀ
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "mlxtape/core/encoder.h"
#include "mlxtape/ops/optimiser.h"
#include "mlxtape/tape/tape.h"

namespace mlxtape::bench {

struct SmallModelConfig {
  std::int64_t vocab = 16, width = 64, hidden = 128, layers = 2, taps = 4;
  DType dtype = DType::kF32;
  float rate = 1e-3F;
  double nudge = 0;  // every parameter starts this much larger, relative to itself
};

class SmallModel {
 public:
  SmallModel(CommandEncoder& encoder, const SmallModelConfig& config, unsigned seed);

  std::int64_t parameters() const;
  const std::vector<Tensor>& weights() const { return weights_; }

  // ids, targets: [B, T] i32.
  Tensor loss(Tape& tape, const std::vector<Tensor>& weights, const Tensor& ids,
              const Tensor& targets) const;

  // Forward, backward, the norm of the gradients clipped to 1, AdamW; the embedding by rows. Waits for
  // nothing: it can be captured. The loss before the step.
  Tensor step(const Tensor& ids, const Tensor& targets);

  std::size_t nodes() const { return nodes_; }  // of the last step's tape, before its walk

 private:
  CommandEncoder& encoder_;
  SmallModelConfig config_;
  std::vector<Tensor> weights_, m_, v_, master_;
  Tensor rate_, t_;
  std::size_t nodes_ = 0;
};

}  // namespace mlxtape::bench
