// Arguments of the kernels that move memory without knowing any op: every backend has them.
// copy_<unsigned type of the element's size>: a strided tensor -> another of the same shape.
// zero_u8: every byte of a contiguous tensor 0.
// move_u8: a contiguous tensor -> a contiguous one.
// fill_<unsigned type of the element's size>: every element of a contiguous tensor the same bits.
// add_into_<type of the sum>: out[0] += in[0], both contiguous.
#pragma once

#ifndef __METAL_VERSION__
#include <cstdint>
#endif

namespace mlxtape {

// Axes in the order of the target's strides, largest first, so that the last one is written along; no axis
// of size 1, and none that could be one with its neighbour in both tensors. Rank 0: one element.
struct CopyArgs {
  int64_t rank;
  int64_t shape[8];
  int64_t from[8];  // strides in elements
  int64_t to[8];
};
static_assert(sizeof(CopyArgs) == 200, "host and device must agree");

struct BytesArgs {
  uint64_t bytes;
};

struct FillArgs {
  int64_t size;
  uint64_t bits;  // the element's are the lowest
};

struct AddIntoArgs {
  int64_t size;
  int64_t from;  // DType of what is added
};
static_assert(sizeof(FillArgs) == 16 && sizeof(AddIntoArgs) == 16, "host and device must agree");

}  // namespace mlxtape
