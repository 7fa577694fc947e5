// Kernels of host_kernels.metal, registered beside ours when a test first asks for them.
#pragma once

#include <cstdint>

#include "mlxtape/core/registry.h"

namespace mlxtape::test {

struct ScaleArgs {
  float by;
  std::int32_t n;
};

const Kernel& host_scale();      // in x; out y = by·x
const Kernel& host_constants();  // out four f32: what the function constants were
const Kernel& host_parts();      // args: groups; out u32 [groups, 32], each its group's number
const Kernel& host_slow();       // as host_parts, and seems to take 0.01 s a group
const Kernel& host_table();      // in x...; out the sum of all, 64 f32 each; args: how many
const Kernel& host_shared();     // out 64 f32 turned round by way of threadgroup memory
const Kernel& host_too_wide();   // asks for more threads than there may be
const Kernel& host_stray();      // binds memory that the call does not have
const char* host_source();       // the text of them all

}  // namespace mlxtape::test
