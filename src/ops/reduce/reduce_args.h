// Read by reduce.cpp and the reduce kernels: one layout, every compiler.
#pragma once

#ifndef __METAL_VERSION__
#include <cstdint>
#endif

// x [outer, count, inner] contiguous, one result for each outer and inner: [outer, inner].
struct ReduceArgs {
  int64_t outer;
  int64_t count;
  int64_t inner;
  double divisor;  // what the sum is divided by
};
static_assert(sizeof(ReduceArgs) == 32, "host and device must agree");
