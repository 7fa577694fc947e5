// head_kl: how far a student with a head, plain or packed, is from its teacher, a number that a tape can walk back from.
// Some rows of logits at a time: those of all rows never exist, nor do their gradients.
//
// Formula    z = hidden·headᵀ;  loss = Σ_r w[r]·KL(softmax(t[r]/T) ‖ softmax(z[r]/T)) / Σ_r w[r], without a factor T²
//            top k: z is gathered at the teacher's indices, and both softmaxes are over those k alone
// Gradient   to hidden and, where it is packed, to the head's scales and biases. Made in the forward pass where a tape
//            wants it; scales' and biases' are added up in f32.
#pragma once

#include <functional>

#include "mlxtape/nn/linear.h"

namespace mlxtape::jobs {

// Logits of rows [start, stop) when they are asked for, [stop − start, V]; or the k largest and where they were.
struct HeadTeacher {
  std::function<Tensor(std::int64_t start, std::int64_t stop)> logits;
  Tensor values, indices;  // [rows, k], u32
};

struct HeadKlOptions {
  float temperature = 2;
  std::int64_t chunk_rows = 0;  // at least 1
};

// hidden: [rows, width]; weights: w, [rows] f32.
Tensor head_kl(Tape& tape, const Tensor& hidden, const nn::Weight& head, const HeadTeacher& teacher,
               const Tensor& weights, const HeadKlOptions& options);

}  // namespace mlxtape::jobs
