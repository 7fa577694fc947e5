// Indices of any integer type as places along an axis.
#pragma once

#include <cstdint>
#include <type_traits>

#include "mlxtape/base/dtype.h"

namespace mlxtape::cpu {

// The place that an index names, counted from the end where it is negative; not in [0, length) when it names
// none, whatever the index.
template <class I>
std::uint64_t place_of(I index, std::int64_t length) {
  if constexpr (std::is_signed_v<I>) {
    return static_cast<std::uint64_t>(index < 0 ? index + length : std::int64_t{index});
  } else {
    return index;
  }
}

// Calls body(a value of the C++ type) for the integer types, which are all that the host lets through.
template <class Body>
void with_index_type(std::int64_t type, const Body& body) {
  visit(static_cast<DType>(type), [&](auto zero) {
    using I = decltype(zero);
    if constexpr (std::is_integral_v<I> && !std::is_same_v<I, bool>) body(zero);
  });
}

}  // namespace mlxtape::cpu
