// Read by attention.cpp and its kernels. in, always: q, k, v, then mask, sinks, sequence_starts, key_starts or nothing.
// fwd: out y, lse. bwd: in … y, lse, dy; out dq, dk, dv, d_sinks or nothing.
#pragma once

#ifndef __METAL_VERSION__
#include <cstdint>
#endif

#include "core/program_constant.h"

enum class AttentionMask : int32_t { kNone, kBool, kF32, kLikeQ };

// Under this a score that a mask brought down counts as −inf: f32 would lose the logarithm of the sum beside it,
// and with it the gradient. A mask of −10⁹, or of the least number there is, says that a key does not count.
MT_CONSTANT float kLeastScore = -1e6F;

struct AttentionArgs {
  int64_t batch;      // 1 where sequences are packed
  int64_t sequences;  // packed ones; 0: none
  int64_t queries, keys;
  int64_t heads, key_heads, dim, value_dim;
  // Of q, k, v: from one batch entry, token, head to the next; channels lie side by side.
  int64_t q[3], k[3], v[3];
  int64_t mask[4];  // strides; 0 where the axis is 1
  int64_t window;   // 0: none
  float scale;
  int32_t causal;
  AttentionMask mask_kind;
  int32_t start_bytes;  // of an element of the starts
};
static_assert(sizeof(AttentionArgs) == 192, "host and device must agree");
