// Elements as unsigned integers in the order of sort.h, for the Metal kernels: a smaller number has a smaller key, −0 and +0
// have the same, every NaN has the largest there is. A kind of elements is known by its bits, which are moved and never read
// as numbers. An entry is a key above the element's index: no two are equal, so that any way to sort entries is a stable
// way to sort elements.
#pragma once

#include <metal_stdlib>
using namespace metal;

inline uint float_key(uint bits, uint infinity, uint sign) {
  const uint all = sign | (sign - 1);
  if ((bits & (sign - 1)) > infinity) return all;
  if (bits == sign) return sign;
  return (bits & sign) != 0 ? ~bits & all : bits | sign;
}

struct OfF32 {
  enum { kBits = 32, kHasNan = true };
  static inline uint key(uint bits) { return float_key(bits, 0x7f800000u, 0x80000000u); }
};
struct OfF16 {
  enum { kBits = 16, kHasNan = true };
  static inline uint key(uint bits) { return float_key(bits, 0x7c00u, 0x8000u); }
};
struct OfBF16 {
  enum { kBits = 16, kHasNan = true };
  static inline uint key(uint bits) { return float_key(bits, 0x7f80u, 0x8000u); }
};
struct OfI32 {
  enum { kBits = 32, kHasNan = false };
  static inline uint key(uint bits) { return bits ^ 0x80000000u; }
};
struct OfU32 {
  enum { kBits = 32, kHasNan = false };
  static inline uint key(uint bits) { return bits; }
};

// All bits that a key has.
template <typename K>
inline uint all_bits() {
  return 0xffffffffu >> (32 - uint(K::kBits));
}

// down: the largest number has the smallest key; NaN has the largest still.
template <typename K>
inline uint key_in_order(uint bits, bool down) {
  const uint key = K::key(bits);
  if (!down || (K::kHasNan && key == all_bits<K>())) return key;
  return ~key & all_bits<K>();
}
