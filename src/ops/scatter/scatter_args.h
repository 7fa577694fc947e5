// Read by scatter.cpp and the scatter kernels. scatter_put_<unsigned type of the element's size>: in indices, values; out y, which
// has the elements of x. All contiguous.
#pragma once

#ifndef __METAL_VERSION__
#include <cstdint>
#endif

namespace mlxtape::ops {

struct ScatterArgs {
  int64_t outer, count, width;  // indices, values [outer, count, width]
  int64_t length;               // y [outer, length, width]
  int64_t index_type;           // a DType
};
static_assert(sizeof(ScatterArgs) == 40, "host and device must agree");

}  // namespace mlxtape::ops
