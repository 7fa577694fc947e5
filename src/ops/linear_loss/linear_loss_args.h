// Read by linear_loss.cpp and the linear_loss kernels: one layout, every compiler.
#pragma once

#ifndef __METAL_VERSION__
#include <cstdint>
#endif

struct LinearLossArgs {
  int64_t size;
  int32_t from_f32;  // 1: the input is f32 whatever the output is
  int32_t unused;
};
static_assert(sizeof(LinearLossArgs) == 16, "host and device must agree");
