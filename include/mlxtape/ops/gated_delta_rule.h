// gated_delta_rule: the recurrence of Gated DeltaNet: a memory of keys and values that decays and that every token corrects.
//
// Formula    for each value head, S_0 = initial_state or 0, t = 1 … T:
//            S' = S_{t−1}·diag(g_t);  u_t = β_t·(v_t − S'·k_t);  S_t = S' + u_t·k_tᵀ;  y_t = S_t·q_t
//            g = exp(decay), or decay itself. Where the mask is false the state is unchanged and y_t = 0.
//            normalise: k and q are replaced by k·rsqrt(Σk² + ε) and q·rsqrt(Σq² + ε); then q is multiplied by scale.
// Gradient   starting with dS = d_final_state, for t = T … 1:
//            dS += dy_t·q_tᵀ;  dq_t = S_tᵀ·dy_t;  du = dS·k_t;  dβ_t = du·(v_t − S'·k_t);  dv_t = β_t·du
//            dk_t = dSᵀ·u_t − β_t·S'ᵀ·du;  dS' = dS − β_t·du·k_tᵀ;  dg_t = Σ_rows dS'∘S_{t−1};  dS = dS'·diag(g_t)
//            Value heads that share a key head: dq and dk are their sums. d_decay = g·dg, or dg. Where the mask
//            is false every gradient is 0.
// Layout     q, k: [B, T, Hk, Dk]; v, y: [B, T, Hv, Dv]; value head h reads key head h / (Hv/Hk). beta: [B, T, Hv];
//            decay: [B, T, Hv], or [B, T, Hv, Dk] with one per key channel; mask: [B, T];
//            states: [S, Hv, Dv, Dk]. S is B, or the number of packed sequences: with sequence_starts [S+1] there
//            is no axis B, and sequence s is the tokens sequence_starts[s] to sequence_starts[s+1]. q, k and v may
//            be views whose channels are contiguous, others are copied first. Saved for backward: the inputs.
// Types      q, k, v, y: one of f32, f16, bf16; decay, beta, states and their gradients: f32; mask: bool;
//            sequence_starts: i32, i64. Sums and states are f32, y is rounded once.
// Cost       forward 6·Dk·Dv operations for each token and value head, backward 26 and only the memory of one state per 128
//            tokens, which are recomputed, and on the CPU 2·T·Dk numbers per thread. step reads and writes the state. On
//            CUDA, 16-bit heads of width 128 with one decay per head need 0.6 KiB of scratch memory per token and value head
//            forward, 2.2 KiB backward. On Metal, heads of width 128 need 19 MiB backward for 2048 tokens and 0.5 MiB for each
//            128 more, however many heads there are.
// Limits     Dk and Dv up to 256, Hv a multiple of Hk. sequence_starts: as for conv1d_depthwise_causal. Nothing is
//            ever divided by a decay: any from 0 to 1 is accurate, larger ones are used as they are. Tokens are processed
//            in chunks: inf or NaN in one may reach earlier ones, unless the mask hides it.
#pragma once

#include "mlxtape/base/error.h"
#include "mlxtape/core/encoder.h"
#include "mlxtape/tape/tape.h"

namespace mlxtape::ops {

// An undefined tensor means none.
struct GatedDeltaRuleOptions {
  bool log_decay = true;  // decay holds log g
  bool normalise = false;
  double eps = 1e-6;
  double scale = 1;
  Tensor sequence_starts = {};
  Tensor initial_state = {};
  Tensor mask = {};
  bool want_final_state = false;
};

struct GatedDeltaRuleInputs {
  Tensor q, k, v, decay, beta;
};

struct GatedDeltaRuleResult {
  Tensor y;
  Tensor final_state;  // undefined unless requested
};

struct GatedDeltaRuleGradients {
  Tensor dq, dk, dv, d_decay, d_beta;
  Tensor d_initial_state;  // undefined without an initial state
};

Check gated_delta_rule_check(const GatedDeltaRuleInputs& in,
                             const GatedDeltaRuleOptions& options = {});
Check gated_delta_rule_backward_check(const GatedDeltaRuleInputs& in, const Tensor& dy,
                                      const GatedDeltaRuleOptions& options = {},
                                      const Tensor& d_final_state = {});
Check gated_delta_rule_step_check(const GatedDeltaRuleInputs& in, const Tensor& state,
                                  const GatedDeltaRuleOptions& options = {});

GatedDeltaRuleResult gated_delta_rule(CommandEncoder& encoder, const GatedDeltaRuleInputs& in,
                                      const GatedDeltaRuleOptions& options = {});
GatedDeltaRuleResult gated_delta_rule(Tape& tape, const GatedDeltaRuleInputs& in,
                                      const GatedDeltaRuleOptions& options = {});

// An undefined dy or d_final_state counts as zeros.
GatedDeltaRuleGradients gated_delta_rule_backward(CommandEncoder& encoder,
                                                  const GatedDeltaRuleInputs& in, const Tensor& dy,
                                                  const GatedDeltaRuleOptions& options = {},
                                                  const Tensor& d_final_state = {});

// One token for each of B sequences: T = 1. state [B, Hv, Dv, Dk], which must not share a buffer with an input, is
// updated in place. No gradient.
// Of the options, log_decay, normalise, eps, scale and mask are used.
Tensor gated_delta_rule_step(CommandEncoder& encoder, const GatedDeltaRuleInputs& in,
                             const Tensor& state, const GatedDeltaRuleOptions& options = {});

}  // namespace mlxtape::ops
