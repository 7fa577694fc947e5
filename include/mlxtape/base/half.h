// F16 and BF16: the two 16-bit floats, as storage types. Arithmetic is done in f32.
//
// Conversions round to nearest, ties to even; a value past the largest finite one becomes
// infinity; NaN stays NaN. From double and from 64-bit integers the value is rounded once
// (through a 24-bit value rounded to odd, which keeps "a little more" and "a little less"
// apart from an exact tie).
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

namespace mlxtape {

namespace detail {

constexpr std::uint16_t bf16_bits(float value) {
  const auto u = std::bit_cast<std::uint32_t>(value);
  if ((u & 0x7fffffffU) > 0x7f800000U) return static_cast<std::uint16_t>((u >> 16U) | 0x40U);
  return static_cast<std::uint16_t>((u + 0x7fffU + ((u >> 16U) & 1U)) >> 16U);
}

constexpr float bf16_value(std::uint16_t bits) {
  return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16U);
}

constexpr std::uint16_t f16_bits(float value) {
  const auto u = std::bit_cast<std::uint32_t>(value);
  const std::uint32_t sign = (u >> 16U) & 0x8000U;
  const std::uint32_t magnitude = u & 0x7fffffffU;
  if (magnitude > 0x7f800000U) {  // NaN: keep the top of its payload, make it quiet
    return static_cast<std::uint16_t>(sign | 0x7e00U | ((magnitude >> 13U) & 0x3ffU));
  }
  if (magnitude >= 0x47800000U) return static_cast<std::uint16_t>(sign | 0x7c00U);  // >= 2^16
  std::uint32_t half = 0;          // the result's bits before rounding
  std::uint32_t below = 0;         // the bits cut off, left-aligned in 32 bits
  if (magnitude >= 0x38800000U) {  // normal: 2^-14 and up
    half = (magnitude - 0x38000000U) >> 13U;
    below = magnitude << 19U;
  } else {  // subnormal: units of 2^-24
    const std::uint32_t exponent = magnitude >> 23U;
    if (exponent < 102) return static_cast<std::uint16_t>(sign);  // under half of 2^-24
    const std::uint32_t mantissa = (magnitude & 0x7fffffU) | 0x800000U;
    const std::uint32_t shift = 126 - exponent;  // 14 to 24
    half = mantissa >> shift;
    below = mantissa << (32 - shift);
  }
  if (below > 0x80000000U || (below == 0x80000000U && (half & 1U) != 0)) ++half;
  return static_cast<std::uint16_t>(sign | half);
}

constexpr float f16_value(std::uint16_t bits) {
  const std::uint32_t sign = (bits & 0x8000U) << 16U;
  const std::uint32_t rest = bits & 0x7fffU;
  if (rest >= 0x7c00U) return std::bit_cast<float>(sign | 0x7f800000U | ((rest & 0x3ffU) << 13U));
  if (rest >= 0x400U) return std::bit_cast<float>(sign | ((rest << 13U) + 0x38000000U));
  const float magnitude = static_cast<float>(rest) * 0x1p-24F;
  return std::bit_cast<float>(sign | std::bit_cast<std::uint32_t>(magnitude));
}

// The f32 that is value if that is exact, else the neighbour with an odd last bit.
inline float round_to_odd(double value) {
  if (!std::isfinite(value)) return static_cast<float>(value);
  if (std::abs(value) > std::numeric_limits<float>::max()) {  // FLT_MAX is odd
    return static_cast<float>(std::copysign(std::numeric_limits<float>::max(), value));
  }
  const auto nearest = static_cast<float>(value);
  if (static_cast<double>(nearest) == value) return nearest;
  if ((std::bit_cast<std::uint32_t>(nearest) & 1U) != 0) return nearest;
  const float towards = value > static_cast<double>(nearest)
                            ? std::numeric_limits<float>::infinity()
                            : -std::numeric_limits<float>::infinity();
  return std::nextafter(nearest, towards);
}

inline float round_to_odd(std::uint64_t value) {
  const int excess = 40 - std::countl_zero(value);  // bits beyond 24
  if (excess <= 0) return static_cast<float>(value);
  const std::uint64_t lost = value & ((std::uint64_t{1} << static_cast<unsigned>(excess)) - 1);
  const std::uint64_t top = value >> static_cast<unsigned>(excess);
  return std::ldexp(static_cast<float>(top | (lost != 0 ? 1U : 0U)), excess);
}

inline float round_to_odd(std::int64_t value) {
  const std::uint64_t magnitude =
      value < 0 ? ~static_cast<std::uint64_t>(value) + 1 : static_cast<std::uint64_t>(value);
  return value < 0 ? -round_to_odd(magnitude) : round_to_odd(magnitude);
}

}  // namespace detail

struct BF16 {
  std::uint16_t bits = 0;

  BF16() = default;
  constexpr explicit BF16(float value) : bits(detail::bf16_bits(value)) {}
  explicit BF16(double value) : BF16(detail::round_to_odd(value)) {}
  explicit BF16(std::int64_t value) : BF16(detail::round_to_odd(value)) {}
  explicit BF16(std::uint64_t value) : BF16(detail::round_to_odd(value)) {}
  constexpr explicit operator float() const { return detail::bf16_value(bits); }
  constexpr explicit operator double() const { return detail::bf16_value(bits); }
};
static_assert(sizeof(BF16) == 2);

struct F16 {
  std::uint16_t bits = 0;

  F16() = default;
  constexpr explicit F16(float value) : bits(detail::f16_bits(value)) {}
  explicit F16(double value) : F16(detail::round_to_odd(value)) {}
  explicit F16(std::int64_t value) : F16(detail::round_to_odd(value)) {}
  explicit F16(std::uint64_t value) : F16(detail::round_to_odd(value)) {}
  constexpr explicit operator float() const { return detail::f16_value(bits); }
  constexpr explicit operator double() const { return detail::f16_value(bits); }
};
static_assert(sizeof(F16) == 2);

}  // namespace mlxtape
