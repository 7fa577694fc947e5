// delta_gates: how fast a gated delta rule forgets and how much it corrects, from two projections of each token.
//
// Formula    z = a + dt_bias[h];  decay = −exp(A_log[h])·softplus(z), softplus(z) = log(1 + exp z);  beta = σ(b)
// Gradient   dz = −d_decay·exp(A_log[h])·σ(z);  da = dz;  d_dt_bias[h] = Σ dz;  d_A_log[h] = Σ d_decay·decay;
//            db = d_beta·β·(1 − β); sums over all tokens
// Layout     a, b, decay, beta: […, H]; A_log, dt_bias: [H]. decay is a logarithm, as gated_delta_rule takes it.
//            Strided inputs are copied first. Saved for backward: the inputs.
// Types      a, b: one of f32, f16, bf16; A_log, dt_bias: each any of these; decay, beta: f32. Gradients have the
//            types of their inputs, sums are f32.
// Cost       forward reads 2 and writes 2 numbers for each token and head, backward reads 4, writes 4
// Limits     none: softplus and its slope are exact for large |z|
#pragma once

#include "mlxtape/base/error.h"
#include "mlxtape/core/encoder.h"
#include "mlxtape/tape/tape.h"

namespace mlxtape::ops {

struct DeltaGatesInputs {
  Tensor a, b, a_log, dt_bias;
};

struct DeltaGates {
  Tensor decay, beta;
};

struct DeltaGatesGradients {
  Tensor da, db, d_a_log, d_dt_bias;
};

Check delta_gates_check(const DeltaGatesInputs& in);
Check delta_gates_backward_check(const DeltaGatesInputs& in, const Tensor& d_decay,
                                 const Tensor& d_beta);

DeltaGates delta_gates(CommandEncoder& encoder, const DeltaGatesInputs& in);
DeltaGates delta_gates(Tape& tape, const DeltaGatesInputs& in);

// An undefined d_decay or d_beta counts as zeros.
DeltaGatesGradients delta_gates_backward(CommandEncoder& encoder, const DeltaGatesInputs& in,
                                         const Tensor& d_decay, const Tensor& d_beta);

}  // namespace mlxtape::ops
