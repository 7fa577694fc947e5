// Read by scan.cpp and the scan kernels. in: x. out: y.
#pragma once

#ifndef __METAL_VERSION__
#include <cstdint>
#endif

namespace mlxtape::ops {

struct ScanArgs {
  int64_t outer, count, inner;  // x [outer, count, inner], summed along count
  int32_t reverse, exclusive;
};
static_assert(sizeof(ScanArgs) == 32, "host and device must agree");

}  // namespace mlxtape::ops
