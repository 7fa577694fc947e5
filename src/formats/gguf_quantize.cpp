// Numbers and affine groups to blocks. K types are made by a search that their format does not fix, so none is written.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>

#include "formats/gguf_blocks.h"
#include "mlxtape/base/error.h"
#include "mlxtape/formats/gguf_types.h"

namespace mlxtape::formats {

namespace {

constexpr int kBlock = 32;
using Codes = std::array<std::uint8_t, kBlock>;

void put_half(std::uint8_t* at, float value) {
  const std::uint16_t bits = detail::f16_bits(value);
  at[0] = static_cast<std::uint8_t>(bits & 0xFFU);
  at[1] = static_cast<std::uint8_t>(bits >> 8U);
}

void put_halves(std::uint8_t* at, const Codes& q) {
  for (std::size_t i = 0; i < 16; ++i) {
    at[i] = static_cast<std::uint8_t>((q[i] & 15U) | (q[16 + i] & 15U) << 4U);
  }
}

void put_fifth_bits(std::uint8_t* at, const Codes& q) {
  std::fill(at, at + 4, std::uint8_t{0});
  for (std::size_t i = 0; i < kBlock; ++i) {
    at[i / 8] = static_cast<std::uint8_t>(at[i / 8] | (q[i] >> 4U & 1U) << (i % 8));
  }
}

// A block of the five types from its codes, scale and minimum; what the type does not have is not used.
void put_block(GgufType type, const Codes& q, float d, float m, std::uint8_t* to) {
  put_half(to, d);
  switch (type) {
    case GgufType::kQ40: return put_halves(to + 2, q);
    case GgufType::kQ41: put_half(to + 2, m); return put_halves(to + 4, q);
    case GgufType::kQ50: put_fifth_bits(to + 2, q); return put_halves(to + 6, q);
    case GgufType::kQ51:
      put_half(to + 2, m);
      put_fifth_bits(to + 4, q);
      return put_halves(to + 8, q);
    default:  // Q8_0: signed bytes
      for (std::size_t i = 0; i < kBlock; ++i) to[2 + i] = static_cast<std::uint8_t>(q[i] ^ 0x80U);
  }
}

// What does not fit a byte or is NaN is cut to it: such weights are refused before they are written.
std::uint8_t cut(float value, float most) {
  return static_cast<std::uint8_t>(value > 0 ? std::min(value, most) : 0.0F);
}

float inverse(float d) { return d == 0 ? 0 : 1 / d; }

// Codes around `zero`: the number of the largest magnitude has the code 0.
void quantize_symmetric(GgufType type, const float* w, float zero, std::uint8_t* to) {
  float edge = w[0];
  for (int i = 1; i < kBlock; ++i) {
    if (std::abs(w[i]) > std::abs(edge)) edge = w[i];
  }
  const float d = edge / -zero, id = inverse(d);
  Codes q{};
  for (std::size_t i = 0; i < kBlock; ++i) {
    const float scaled = w[i] * id;
    q[i] = cut(std::trunc(scaled + (zero + 0.5F)), 2 * zero - 1);
  }
  put_block(type, q, d, 0, to);
}

void quantize_with_min(GgufType type, const float* w, float most, std::uint8_t* to) {
  const auto [low, high] = std::minmax_element(w, w + kBlock);
  const float d = (*high - *low) / most, id = inverse(d);
  Codes q{};
  for (std::size_t i = 0; i < kBlock; ++i) {
    const float scaled = (w[i] - *low) * id;
    q[i] = cut(std::trunc(scaled + 0.5F), most);
  }
  put_block(type, q, d, *low, to);
}

void quantize_q80(const float* w, std::uint8_t* to) {
  float most = 0;
  for (int i = 0; i < kBlock; ++i) most = std::max(most, std::abs(w[i]));
  const float d = most / 127, id = inverse(d);
  Codes q{};
  for (std::size_t i = 0; i < kBlock; ++i) {
    const float scaled = std::round(w[i] * id);  // half away from 0
    const float kept = scaled >= -127 && scaled <= 127 ? scaled : 0;
    q[i] = static_cast<std::uint8_t>(static_cast<int>(kept) + 128);
  }
  put_block(GgufType::kQ80, q, d, 0, to);
}

void quantize_block(GgufType type, const float* w, std::uint8_t* to) {
  switch (type) {
    case GgufType::kQ40: return quantize_symmetric(type, w, 8, to);
    case GgufType::kQ50: return quantize_symmetric(type, w, 16, to);
    case GgufType::kQ41: return quantize_with_min(type, w, 15, to);
    case GgufType::kQ51: return quantize_with_min(type, w, 31, to);
    default: return quantize_q80(w, to);
  }
}

bool is_half(float value) {
  const float again = detail::f16_value(detail::f16_bits(value));
  return again == value && std::isfinite(value);
}

std::uint8_t* start_of(std::span<std::byte> bytes) {
  // NOLINTNEXTLINE(cppcoreguidelines-pro-type-reinterpret-cast): bytes as the numbers they hold
  return reinterpret_cast<std::uint8_t*>(bytes.data());
}

}  // namespace

bool can_quantize(GgufType type) {
  switch (type) {
    case GgufType::kF32:
    case GgufType::kF16:
    case GgufType::kBf16:
    case GgufType::kQ40:
    case GgufType::kQ41:
    case GgufType::kQ50:
    case GgufType::kQ51:
    case GgufType::kQ80: return true;
    default: return false;
  }
}

void quantize(GgufType type, std::span<const float> numbers, std::span<std::byte> blocks) {
  MT_ASSERT(can_quantize(type));
  const GgufTypeInfo& info = info_of(type);
  MT_ASSERT(numbers.size() % static_cast<std::size_t>(info.block) == 0);
  const std::size_t count = numbers.size() / static_cast<std::size_t>(info.block);
  MT_ASSERT(blocks.size() == count * static_cast<std::size_t>(info.bytes));
  if (info.dtype) {
    if (count > 0) {
      convert(numbers.data(), DType::kF32, blocks.data(), *info.dtype, numbers.size());
    }
    return;
  }
  std::uint8_t* to = start_of(blocks);
  for (std::size_t i = 0; i < count; ++i, to += info.bytes) {
    quantize_block(type, numbers.data() + i * kBlock, to);
  }
}

std::optional<GgufType> gguf_type_of_affine(int bits) {
  if (bits == 4) return GgufType::kQ41;
  if (bits == 5) return GgufType::kQ51;
  if (bits == 8) return GgufType::kQ80;
  return std::nullopt;
}

bool affine_fits(GgufType type, std::span<const float> scales, std::span<const float> biases) {
  for (std::size_t i = 0; i < scales.size(); ++i) {
    const float s = scales[i], b = biases[i];
    if (!is_half(s) || !(type == GgufType::kQ80 ? b == -128 * s : is_half(b))) return false;
  }
  return true;
}

void blocks_of_affine(GgufType type, int group, std::span<const std::uint32_t> codes,
                      std::span<const float> scales, std::span<const float> biases,
                      std::span<std::byte> blocks) {
  const GgufTypeInfo& info = info_of(type);
  const auto bits = static_cast<unsigned>(info.affine->bits);
  const std::size_t count = codes.size() / bits;  // a block of 32 has as many words as bits
  const auto repeat = static_cast<std::size_t>(group / kBlock);
  MT_ASSERT(blocks.size() == count * static_cast<std::size_t>(info.bytes));
  MT_ASSERT(scales.size() * repeat == count && biases.size() == scales.size());
  std::uint8_t* to = start_of(blocks);
  for (std::size_t i = 0; i < count; ++i, to += info.bytes) {
    Codes q{};
    const std::uint32_t* words = codes.data() + i * bits;
    for (unsigned k = 0; k < kBlock; ++k) {
      const unsigned at = k * bits;
      std::uint64_t pair = words[at / 32];
      if (at / 32 + 1 < bits) pair |= static_cast<std::uint64_t>(words[at / 32 + 1]) << 32U;
      q[k] = static_cast<std::uint8_t>(pair >> at % 32 & ((1U << bits) - 1U));
    }
    put_block(type, q, scales[i / repeat], biases[i / repeat], to);
  }
}

}  // namespace mlxtape::formats
