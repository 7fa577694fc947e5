// Arguments of the kernels that move memory without knowing any op: every backend has them.
// copy_<unsigned type of the element's size>: a strided tensor -> a contiguous one.
// zero_u8: every byte of a contiguous tensor 0.
// move_u8: a contiguous tensor -> a contiguous one.
// fill_<unsigned type of the element's size>: every element of a contiguous tensor the same bits.
// add_into_<type of the sum>: out[0] += in[0], both contiguous.
#pragma once

#include <cstdint>

namespace mlxtape {

struct CopyArgs {
  std::int64_t rank;
  std::int64_t shape[8];
  std::int64_t strides[8];  // of the source, in elements; the target is contiguous
};
static_assert(sizeof(CopyArgs) == 136, "host and device must agree");

struct BytesArgs {
  std::uint64_t bytes;
};

struct FillArgs {
  std::int64_t size;
  std::uint64_t bits;  // the element's are the lowest
};

struct AddIntoArgs {
  std::int64_t size;
  std::int64_t from;  // DType of what is added
};
static_assert(sizeof(FillArgs) == 16 && sizeof(AddIntoArgs) == 16, "host and device must agree");

}  // namespace mlxtape
