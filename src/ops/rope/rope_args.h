// Read by rope.cpp and the rope kernels. in: x, offsets or nothing, periods or nothing. out: y.
#pragma once

#ifndef __METAL_VERSION__
#include <cstdint>
#endif

namespace mlxtape::ops {

struct RopeArgs {
  int64_t batch, heads, tokens, cols;  // x [batch, heads, tokens, cols]
  int64_t head_step, token_step;       // from one to the next, of x and y
  int64_t half;                        // pairs
  int64_t offset;
  int64_t offsets;  // how many: 0, 1 or batch
  double log2_base;
  double scale;
  int32_t traditional;
  int32_t back;  // turn by −θ
};
static_assert(sizeof(RopeArgs) == 96, "host and device must agree");

}  // namespace mlxtape::ops
