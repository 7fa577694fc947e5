// Indices of any integer type as places along an axis.
#pragma once

#include <cstdint>
#include <type_traits>

#include "mlxtape/base/dtype.h"

namespace mlxtape::cuda {

// The place that an index names, counted from the end where it is negative; not in [0, length) when it names
// none, whatever the index.
template <class I>
__device__ __forceinline__ std::uint64_t place_of(I index, std::int64_t length) {
  if constexpr (std::is_signed_v<I>) {
    return static_cast<std::uint64_t>(index < 0 ? index + length : std::int64_t{index});
  } else {
    return index;
  }
}

// The same for an index of a type known at run time: where it is read once, and not worth a kernel for each.
__device__ __forceinline__ std::uint64_t place_of(const void* indices, DType type, std::int64_t i,
                                                  std::int64_t length) {
  switch (type) {
    case DType::kU8: return place_of(static_cast<const std::uint8_t*>(indices)[i], length);
    case DType::kU16: return place_of(static_cast<const std::uint16_t*>(indices)[i], length);
    case DType::kU32: return place_of(static_cast<const std::uint32_t*>(indices)[i], length);
    case DType::kU64: return place_of(static_cast<const std::uint64_t*>(indices)[i], length);
    case DType::kI8: return place_of(static_cast<const std::int8_t*>(indices)[i], length);
    case DType::kI16: return place_of(static_cast<const std::int16_t*>(indices)[i], length);
    case DType::kI32: return place_of(static_cast<const std::int32_t*>(indices)[i], length);
    default: return place_of(static_cast<const std::int64_t*>(indices)[i], length);
  }
}

}  // namespace mlxtape::cuda
