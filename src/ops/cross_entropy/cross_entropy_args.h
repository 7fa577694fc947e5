// Read by cross_entropy.cpp and the cross_entropy kernels: one layout, every compiler.
#pragma once

#ifndef __METAL_VERSION__
#include <cstdint>
#endif

struct CrossEntropyArgs {
  int64_t rows;
  int64_t cols;
  int64_t dloss_step;  // 1 where there is a dloss a row, 0 where one serves all
  float smoothing;
  int32_t wants_gradient;  // 0 or 1: of the forward
};
static_assert(sizeof(CrossEntropyArgs) == 32, "host and device must agree");
