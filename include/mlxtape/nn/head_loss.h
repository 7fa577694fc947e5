// head_loss: a loss over the logits of a head, plain or packed, a number that a tape can walk back from. Some rows of
// logits at a time: those of all rows never exist, nor do their gradients.
//
// Formula    z = hidden·headᵀ;  loss = sum or mean of the rows' losses, by weights (ops/loss_rows.h)
// Gradient   to hidden and, where it is packed, to the head's scales and biases. Made in the forward pass where a tape
//            wants it; scales' and biases' are added up in f32.
// Limits     A plain head that learns: ops/linear_loss.h, which has its gradient too. No adapter of a head.
#pragma once

#include <functional>

#include "mlxtape/nn/linear.h"
#include "mlxtape/ops/cross_entropy.h"

namespace mlxtape::nn {

// Rows [start, stop) of all.
struct HeadRows {
  std::int64_t start = 0, stop = 0;
  Tensor logits;          // [stop − start, V], whose memory may be used again
  ops::LossRows rows;     // how much they count
  Tensor losses;          // [stop − start] f32, to be written
  bool gradient = false;  // is it wanted?
};
// Writes the losses; returns the gradient of the logits for a loss' of 1, where wanted.
using HeadRowsLoss = std::function<Tensor(const HeadRows&)>;

// As many rows of logits as are quick and small, on this kind of device.
std::int64_t head_chunk_rows(const Device& device, std::int64_t classes, DType dtype);

// hidden: [rows, width]; rows: of a sum or a mean. chunk_rows: rows of logits at a time, 0: head_chunk_rows.
Tensor head_loss(Tape& tape, const Tensor& hidden, const Weight& head, const ops::LossRows& rows,
                 const HeadRowsLoss& loss_of, std::int64_t chunk_rows = 0);

// targets: [rows]. Sum or mean.
Tensor head_cross_entropy(Tape& tape, const Tensor& hidden, const Weight& head,
                          const Tensor& targets, const ops::CrossEntropyOptions& how,
                          std::int64_t chunk_rows = 0);

}  // namespace mlxtape::nn
