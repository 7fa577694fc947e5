// head_loss: a loss over the logits of a head, plain or quantised, differentiable on a tape. It is computed for some rows at a
// time: the logits of all rows never exist at once, nor do their gradients.
//
// Formula    z = hidden·headᵀ;  loss = sum or mean of the rows' losses, weighted (ops/loss_rows.h)
// Gradient   to hidden and, if the head is quantised, to its scales and biases, which are summed in f32. Computed in the
//            forward pass if a tape needs it.
// Limits     For a plain head that is trained use ops/linear_loss.h, which has its gradient too. The head must have no adapter.
#pragma once

#include <functional>

#include "mlxtape/nn/linear.h"
#include "mlxtape/ops/cross_entropy.h"

namespace mlxtape::nn {

// Rows [start, stop).
struct HeadRows {
  std::int64_t start = 0, stop = 0;
  Tensor logits;          // [stop − start, V]; the memory may be reused
  ops::LossRows rows;     // their weights
  Tensor losses;          // [stop − start] f32, to be written
  bool gradient = false;  // is it needed?
};
// Writes the losses; returns the gradient of the logits for dloss = 1, if needed.
using HeadRowsLoss = std::function<Tensor(const HeadRows&)>;

// A number of rows of logits that is fast and small on this kind of device.
std::int64_t head_chunk_rows(const Device& device, std::int64_t classes, DType dtype);

// hidden: [rows, width]; rows: for a sum or a mean. chunk_rows: rows of logits at a time; 0: head_chunk_rows.
Tensor head_loss(Tape& tape, const Tensor& hidden, const Weight& head, const ops::LossRows& rows,
                 const HeadRowsLoss& loss_of, std::int64_t chunk_rows = 0);

// targets: [rows]. Sum or mean.
Tensor head_cross_entropy(Tape& tape, const Tensor& hidden, const Weight& head,
                          const Tensor& targets, const ops::CrossEntropyOptions& how,
                          std::int64_t chunk_rows = 0);

}  // namespace mlxtape::nn
