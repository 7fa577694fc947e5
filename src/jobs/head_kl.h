// head_kl: how far a student with a head, plain or quantised, is from its teacher, a number that a tape can walk back from
// (nn/head_loss.h).
//
// Formula    z = hidden·headᵀ;  loss = Σ_r w[r]·KL(softmax(t[r]/T) ‖ softmax(z[r]/T)) / Σ_r w[r], without a factor T²
//            top k: z is gathered at the teacher's indices, and both softmaxes are over those k alone
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
  std::int64_t chunk_rows = 0;  // 0: as many as are quick
};

// hidden: [rows, width]; weights: w, [rows] f32.
Tensor head_kl(Tape& tape, const Tensor& hidden, const nn::Weight& head, const HeadTeacher& teacher,
               const Tensor& weights, const HeadKlOptions& options);

}  // namespace mlxtape::jobs
