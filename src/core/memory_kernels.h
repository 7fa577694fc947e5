// Arguments of the kernels that move memory without knowing any op: every backend has them.
// copy_<unsigned type of the element's size>: a strided tensor -> a contiguous one.
// zero_u8: every byte of a contiguous tensor 0.
// move_u8: a contiguous tensor -> a contiguous one.
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

}  // namespace mlxtape
