// Indices of tensors too large for 32 bits, at the price of 32 where they are not.
#pragma once

#include <cstdint>

namespace mlxtape::cuda {

// n / by and what is left, both at least 0: 64-bit division takes five times as long as 32-bit.
__device__ __forceinline__ std::int64_t divide(std::int64_t n, std::int64_t by,
                                               std::int64_t& left) {
  if (((n | by) >> 32) == 0) {
    const unsigned q = static_cast<unsigned>(n) / static_cast<unsigned>(by);
    left = static_cast<unsigned>(n) - q * static_cast<unsigned>(by);
    return q;
  }
  left = n % by;
  return n / by;
}

}  // namespace mlxtape::cuda
