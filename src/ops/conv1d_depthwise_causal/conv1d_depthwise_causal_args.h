// Read by conv1d_depthwise_causal.cpp and its kernels: one layout, every compiler.
#pragma once

#ifndef __METAL_VERSION__
#include <cstdint>
#endif

// x as [rows, channels]; a sequence is sequence_rows of them, or what the starts say.
struct Conv1dDepthwiseCausalArgs {
  int64_t rows;
  int64_t channels;
  int64_t taps;
  int64_t sequences;
  int64_t sequence_rows;  // of every sequence; not used when start_bytes is not 0
  int32_t start_bytes;    // of one element of the starts: 4, 8, or 0 when there are none
  int32_t w_is_f32;
  int32_t silu;
  int32_t reserved;
};
static_assert(sizeof(Conv1dDepthwiseCausalArgs) == 56, "host and device must agree");
