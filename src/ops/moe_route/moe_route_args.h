// Read by moe_route.cpp and the moe_route kernels: one layout, every compiler.
#pragma once

#ifndef __METAL_VERSION__
#include <cstdint>
#endif

struct MoeRouteArgs {
  int64_t rows;     // T
  int64_t experts;  // E
  int64_t k;
  int64_t full;  // 1: scores of the full softmax, with lse; 0: renormalised
};
static_assert(sizeof(MoeRouteArgs) == 32, "host and device must agree");
