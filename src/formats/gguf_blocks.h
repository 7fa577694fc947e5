// How the blocks of each quantised type are laid out: what gguf_types.cpp and gguf_affine.cpp share.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "mlxtape/base/half.h"
#include "mlxtape/formats/gguf_types.h"

namespace mlxtape::formats {

inline constexpr std::int64_t kMaxBlock = 256;

// w = s·(q − zero), or s·q + m where the type has minima. q is unsigned and below 2^bits.
struct BlockLayout {
  GgufType type;
  int bits;   // of q, as `codes` gives it
  int group;  // numbers with the same s and m
  int zero;
  bool has_min;
  void (*codes)(const std::uint8_t* block, std::uint8_t* q);
  void (*scales)(const std::uint8_t* block, float* s, float* m);  // m is touched only if has_min
};

// Null where the type is plain numbers.
const BlockLayout* block_layout(GgufType type);

// The 16 values of IQ4_NL and IQ4_XS, plus 128.
extern const std::array<std::uint8_t, 16> kIq4Codes;

inline std::uint16_t half_bits(const std::uint8_t* at) {
  return static_cast<std::uint16_t>(at[0] | at[1] << 8U);
}
inline float half_at(const std::uint8_t* at) { return detail::f16_value(half_bits(at)); }

}  // namespace mlxtape::formats
