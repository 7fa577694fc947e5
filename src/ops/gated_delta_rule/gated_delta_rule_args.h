// Read by gated_delta_rule.cpp and its kernels. in, always: q, k, v, decay, beta, mask or nothing.
// fwd: in … sequence_starts, initial_state; out y, final_state.
// bwd: in … sequence_starts, initial_state, dy, d_final_state; out dq, dk, dv, d_decay, d_beta, d_initial_state.
// step: out y, state, which is read as well. Every tensor from sequence_starts on, and every state, may be nothing.
#pragma once

#ifndef __METAL_VERSION__
#include <cstdint>
#endif

struct GatedDeltaRuleArgs {
  int64_t sequences;
  int64_t sequence_tokens;  // of each, where none are packed
  int64_t tokens;           // of all
  int64_t key_heads, value_heads, key_dim, value_dim;
  // Of q, k, v: from one batch entry, token, head to the next; channels lie side by side.
  int64_t q[3], k[3], v[3];
  float scale, eps;
  int32_t start_bytes;  // of an element of sequence_starts; 0: none are packed
  int32_t normalise;
  int32_t log_decay;
  int32_t per_channel;  // decay has a last axis [key_dim]
};
static_assert(sizeof(GatedDeltaRuleArgs) == 152, "host and device must agree");
