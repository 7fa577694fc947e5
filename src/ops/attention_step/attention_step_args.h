// Read by attention_step.cpp and its kernels. in: q, k, v, lengths, sinks or nothing; out: y, keys, values.
#pragma once

#ifndef __METAL_VERSION__
#include <cstdint>
#endif

struct AttentionStepArgs {
  int64_t batch, tokens, capacity;
  int64_t heads, key_heads, dim, value_dim;
  // Of q, k, v: from one batch entry, token, head to the next; channels lie side by side.
  int64_t q[3], k[3], v[3];
  int64_t window;  // 0: none
  float scale;
  int32_t padding;
};
static_assert(sizeof(AttentionStepArgs) == 144, "host and device must agree");
