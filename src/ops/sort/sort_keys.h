// Numbers as unsigned integers of their own size in the order of sort.h: a smaller number has a smaller key, −0
// and +0 have the same, every NaN has the largest there is. An entry is a key above the element's index:
// no two are equal, so that any way to sort entries is a stable way to sort numbers.
#pragma once

#include <bit>
#include <cstdint>
#include <type_traits>

#include "mlxtape/base/half.h"

namespace mlxtape::ops {

constexpr std::uint32_t key_of(std::uint32_t v) { return v; }
constexpr std::uint32_t key_of(std::int32_t v) {
  return static_cast<std::uint32_t>(v) ^ 0x80000000U;
}
constexpr std::uint32_t key_of(float v) {
  const auto bits = std::bit_cast<std::uint32_t>(v);
  if ((bits & 0x7fffffffU) > 0x7f800000U) return 0xffffffffU;
  if (bits == 0x80000000U) return 0x80000000U;
  return (bits >> 31U) != 0 ? ~bits : bits | 0x80000000U;
}
// infinity: the type's, all bits but the sign
constexpr std::uint16_t half_key(std::uint32_t bits, std::uint32_t infinity) {
  if ((bits & 0x7fffU) > infinity) return 0xffffU;
  if (bits == 0x8000U) return 0x8000U;
  return static_cast<std::uint16_t>((bits >> 15U) != 0 ? ~bits : bits | 0x8000U);
}
constexpr std::uint16_t key_of(F16 v) { return half_key(v.bits, 0x7c00U); }
constexpr std::uint16_t key_of(BF16 v) { return half_key(v.bits, 0x7f80U); }

// down: the largest number has the smallest key; NaN has the largest still.
template <class T>
constexpr auto key_in_order(T v, bool down) {
  const auto key = key_of(v);
  using Key = decltype(key_of(v));
  if (!down) return key;
  constexpr bool has_nan = sizeof(T) == 2 || std::is_same_v<T, float>;
  constexpr auto last = static_cast<Key>(~Key{0});
  return has_nan && key == last ? last : static_cast<Key>(~key);
}

template <class T>
using KeyOf = decltype(key_of(T()));

}  // namespace mlxtape::ops
