// With MLXTAPE_COUNTED_KERNELS a kernel's float is a class that counts its additions, multiplications and divisions, those of
// half and bfloat among them, because they are made of its. Everything else about it is a float's.
#pragma once

#include <bit>
#include <cstdint>
#include <source_location>
#include <type_traits>

#include "backends/metal/emulator/lanes.h"

namespace metal {
using PlainFloat = float;
#ifdef MLXTAPE_COUNTED_KERNELS
MLXTAPE_UNCHECKED constexpr void count_operations(unsigned n) {
  if (!std::is_constant_evaluated()) ::mlxtape::emulator::operations += n;
}
MLXTAPE_UNCHECKED inline void count_function() { ++::mlxtape::emulator::functions; }

struct Counted {
  PlainFloat value;
  Counted() = default;
  template <class T>
    requires std::is_arithmetic_v<T>
  constexpr Counted(T v) : value(PlainFloat(v)) {}
  template <class T>  // function constants
    requires(std::is_class_v<T> && std::is_convertible_v<T, PlainFloat>)
  constexpr explicit Counted(const T& v) : value(v) {}
  constexpr operator PlainFloat() const { return value; }
};
#define MLXTAPE_COUNTED(op)                             \
  constexpr Counted operator op(Counted a, Counted b) { \
    count_operations(1);                                \
    return Counted(a.value op b.value);                 \
  }                                                     \
  template <class T>                                    \
    requires std::is_arithmetic_v<T>                    \
  constexpr Counted operator op(Counted a, T b) {       \
    return a op Counted(b);                             \
  }                                                     \
  template <class T>                                    \
    requires std::is_arithmetic_v<T>                    \
  constexpr Counted operator op(T a, Counted b) {       \
    return Counted(a) op b;                             \
  }                                                     \
  constexpr Counted& operator op##=(Counted & a, Counted b) { return a = a op b; }
MLXTAPE_COUNTED(+)
MLXTAPE_COUNTED(-)
MLXTAPE_COUNTED(*)
MLXTAPE_COUNTED(/)
#undef MLXTAPE_COUNTED
constexpr Counted operator-(Counted a) { return Counted(-a.value); }
#else
constexpr void count_operations(unsigned) {}
inline void count_function() {}
#endif
}  // namespace metal
#ifdef MLXTAPE_COUNTED_KERNELS
#define float ::metal::Counted
#endif
