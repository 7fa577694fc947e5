// Read by rope.cpp and the rope kernels. in: x, offsets or nothing, periods or nothing. out: y.
#pragma once

#include <cstdint>

namespace mlxtape::ops {

struct RopeArgs {
  std::int64_t batch, heads, tokens, cols;  // x [batch, heads, tokens, cols]
  std::int64_t head_step, token_step;       // from one to the next, of x and y
  std::int64_t half;                        // pairs
  std::int64_t offset;
  std::int64_t offsets;  // how many: 0, 1 or batch
  double log2_base;
  double scale;
  std::int32_t traditional;
  std::int32_t back;  // turn by −θ
};
static_assert(sizeof(RopeArgs) == 96, "host and device must agree");

}  // namespace mlxtape::ops
