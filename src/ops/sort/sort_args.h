// Read by sort.cpp and the sort kernels. in: x [rows, cols]. out: values or nothing, indices u32, both
// [rows, cols].
#pragma once

#include <cstdint>

namespace mlxtape::ops {

struct SortArgs {
  std::int64_t rows, cols;
};
static_assert(sizeof(SortArgs) == 16, "host and device must agree");

}  // namespace mlxtape::ops
