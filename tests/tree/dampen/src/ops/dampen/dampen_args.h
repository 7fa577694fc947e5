// Read by dampen.cpp and the dampen kernels: one layout, every compiler.
#pragma once

#ifndef __METAL_VERSION__
#include <cstdint>
#endif

struct DampenArgs {
  int64_t rows;
  int64_t cols;
};
static_assert(sizeof(DampenArgs) == 16, "host and device must agree");
