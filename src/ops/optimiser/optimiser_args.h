// Arguments of the optimiser's kernels. One call serves up to kMost parameters, cut into pieces of kPiece
// elements, so that a thousand small ones cost one launch and a large one fills the machine.
//
// Tensors of a step: in  lr, t, scale, then grad of each; out w, the states, master of each. States of adamw: m, v; sgd: v;
//                    lion: m; muon: v, u. Absent: t of a rule that does not count, v of sgd without momentum, scale, master.
//         by rows (adamw_rows, ...): up to kOptimiserMostRows parameters; in also ids of each, at the end. sizes are
//         those of the gradients, which the pieces are of.
//         of squares: in each gradient; out one sum.  norm: in sums; out norm, scale.
#pragma once

#ifndef __METAL_VERSION__
#include <cstdint>
#endif

#include "core/program_constant.h"

namespace mlxtape::ops {

MT_CONSTANT int kOptimiserMost = 64;
MT_CONSTANT int kOptimiserMostRows = 8;
MT_CONSTANT int kOptimiserMostStates = 2;
MT_CONSTANT int64_t kOptimiserPiece = 16384;

struct OptimiserArgs {
  int64_t count;
  int64_t sizes[kOptimiserMost];
  int32_t f32_grads;  // else as w
  int32_t has_master;
  float beta1, beta2, eps, weight_decay;  // beta1: momentum of sgd
  float rest1, rest2;                     // 1 − beta; of sgd 1 − dampening
  float log_beta1, log_beta2;
  int32_t bias_correction, has_momentum, nesterov;
  int64_t rows[kOptimiserMostRows];    // by rows: of w
  int64_t widths[kOptimiserMostRows];  // elements of a row
};

struct NormArgs {
  int64_t sums;
  float most;
};

inline int64_t optimiser_pieces(int64_t size) {
  return (size + kOptimiserPiece - 1) / kOptimiserPiece;
}

}  // namespace mlxtape::ops
