// Read by sort.cpp and the sort kernels.
#pragma once

#ifndef __METAL_VERSION__
#include <cstdint>
#endif

namespace mlxtape::ops {

// sort_fwd. in: x [rows, cols]. out: values or nothing, indices u32, both [rows, keep]: the first of the order.
struct SortArgs {
  int64_t rows, cols, keep;
  int32_t down;  // largest first; equal ones by index and NaN last all the same
  int32_t unused;
};
static_assert(sizeof(SortArgs) == 32, "host and device must agree");

// Which elements select_fwd looks for, the best first.
enum class Best : int32_t {
  kLargest,  // equal ones by index, NaN last
  kFirst,    // of the order of sort: smallest, equal ones by index, NaN last
  kLast,     // that order from its end: NaN, then the largest, equal ones by index from the end
};

// select_fwd. in: x [rows, cols]. out: values or nothing, indices u32, both [rows, count]: the best, in this order.
// whole, out: [rows, cols]: kFirst at the row's begin or kLast at its end, both as sort has them, and the
// others in the order of their indices.
struct SelectArgs {
  int64_t rows, cols, count;
  Best best;
  int32_t whole;
};
static_assert(sizeof(SelectArgs) == 32, "host and device must agree");

// sort_bwd. in: dy, indices, both [rows, count], no index twice in a row. out: dx [rows, cols], zeros where
// nothing goes to.
struct SortBackwardArgs {
  int64_t rows, cols, count;
};
static_assert(sizeof(SortBackwardArgs) == 24, "host and device must agree");

// argmax_fwd. in: x [outer, count, inner], count ≥ 1. out: indices u32 [outer, inner].
struct ArgmaxArgs {
  int64_t outer, count, inner;
  int64_t smallest;  // look for the smallest
};
static_assert(sizeof(ArgmaxArgs) == 32, "host and device must agree");

constexpr int64_t kMostSelected = 1024;  // count of select_fwd

}  // namespace mlxtape::ops
