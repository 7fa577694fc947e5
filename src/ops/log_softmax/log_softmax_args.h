// Read by log_softmax.cpp and the log_softmax kernels: one layout, every compiler.
#pragma once

#ifndef __METAL_VERSION__
#include <cstdint>
#endif

// The tensor as [outer, cols, inner]: a row is the cols elements, inner apart.
struct LogSoftmaxArgs {
  int64_t outer;
  int64_t cols;
  int64_t inner;
};
static_assert(sizeof(LogSoftmaxArgs) == 24, "host and device must agree");
