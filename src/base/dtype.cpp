#include "mlxtape/base/dtype.h"

#include <limits>
#include <type_traits>

namespace mlxtape {

namespace {

template <class T>
constexpr bool kIsHalf = std::is_same_v<T, F16> || std::is_same_v<T, BF16>;

template <class To, class From>
To float_to_integer(From value) {
  // 2^digits is exact in any float; the largest integer itself may not be.
  const From end = std::ldexp(From{1}, std::numeric_limits<To>::digits);
  if (value != value) return 0;
  if (value >= end) return std::numeric_limits<To>::max();
  if (value <= (std::is_signed_v<To> ? -end : From{0})) return std::numeric_limits<To>::min();
  return static_cast<To>(value);
}

template <class To, class From>
To convert_one(From value) {
  if constexpr (std::is_same_v<To, From>) {
    return value;
  } else if constexpr (kIsHalf<From>) {
    return convert_one<To>(static_cast<float>(value));
  } else if constexpr (std::is_same_v<To, bool>) {
    return value != From{0};
  } else if constexpr (kIsHalf<To>) {
    if constexpr (std::is_floating_point_v<From>)
      return To(value);
    else if constexpr (std::is_signed_v<From>)
      return To(static_cast<std::int64_t>(value));
    else
      return To(static_cast<std::uint64_t>(value));
  } else if constexpr (std::is_floating_point_v<From> && std::is_integral_v<To>) {
    return float_to_integer<To>(value);
  } else {
    return static_cast<To>(value);
  }
}

}  // namespace

void convert(const void* from, DType from_type, void* to, DType to_type, std::size_t n) {
  visit(from_type, [&](auto from_zero) {
    visit(to_type, [&](auto to_zero) {
      using From = decltype(from_zero);
      using To = decltype(to_zero);
      const auto* source = static_cast<const From*>(from);
      auto* target = static_cast<To*>(to);
      for (std::size_t i = 0; i < n; ++i) target[i] = convert_one<To>(source[i]);
    });
  });
}

}  // namespace mlxtape
