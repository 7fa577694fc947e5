// Read by dropout.cpp and the dropout kernels. in: x, the key [2] u32. out: y, and a copy of the key or
// nothing.
#pragma once

#ifndef __METAL_VERSION__
#include <cstdint>
#endif

struct DropoutArgs {
  int64_t count;  // elements
  uint32_t last;  // kept where the word is at most this
  float scale;    // of what is kept
};
static_assert(sizeof(DropoutArgs) == 16, "host and device must agree");
