#include "mlxtape/formats/gguf_types.h"

#include <algorithm>
#include <array>

#include "formats/gguf_blocks.h"
#include "mlxtape/base/error.h"

namespace mlxtape::formats {

namespace {

constexpr GgufAffine affine(int bits, int group, DType scales) { return {bits, group, scales}; }

constexpr std::array kTypes{
    GgufTypeInfo{GgufType::kF32, "F32", 1, 4, DType::kF32, {}},
    GgufTypeInfo{GgufType::kF16, "F16", 1, 2, DType::kF16, {}},
    GgufTypeInfo{GgufType::kQ40, "Q4_0", 32, 18, {}, affine(4, 32, DType::kF16)},
    GgufTypeInfo{GgufType::kQ41, "Q4_1", 32, 20, {}, affine(4, 32, DType::kF16)},
    GgufTypeInfo{GgufType::kQ50, "Q5_0", 32, 22, {}, affine(5, 32, DType::kF16)},
    GgufTypeInfo{GgufType::kQ51, "Q5_1", 32, 24, {}, affine(5, 32, DType::kF16)},
    GgufTypeInfo{GgufType::kQ80, "Q8_0", 32, 34, {}, affine(8, 32, DType::kF16)},
    GgufTypeInfo{GgufType::kQ2K, "Q2_K", 256, 84, {}, affine(2, 16, DType::kF32)},
    GgufTypeInfo{GgufType::kQ3K, "Q3_K", 256, 110, {}, affine(3, 16, DType::kF32)},
    GgufTypeInfo{GgufType::kQ4K, "Q4_K", 256, 144, {}, affine(4, 32, DType::kF32)},
    GgufTypeInfo{GgufType::kQ5K, "Q5_K", 256, 176, {}, affine(5, 32, DType::kF32)},
    GgufTypeInfo{GgufType::kQ6K, "Q6_K", 256, 210, {}, affine(6, 16, DType::kF32)},
    GgufTypeInfo{GgufType::kIq4Nl, "IQ4_NL", 32, 18, {}, affine(8, 32, DType::kF16)},
    // Its products have 24 bits with zero taken off before, and 25 with it taken off behind: no exact affine form.
    GgufTypeInfo{GgufType::kIq4Xs, "IQ4_XS", 256, 136, {}, {}},
    GgufTypeInfo{GgufType::kI8, "I8", 1, 1, DType::kI8, {}},
    GgufTypeInfo{GgufType::kI16, "I16", 1, 2, DType::kI16, {}},
    GgufTypeInfo{GgufType::kI32, "I32", 1, 4, DType::kI32, {}},
    GgufTypeInfo{GgufType::kI64, "I64", 1, 8, DType::kI64, {}},
    GgufTypeInfo{GgufType::kF64, "F64", 1, 8, DType::kF64, {}},
    GgufTypeInfo{GgufType::kBf16, "BF16", 1, 2, DType::kBF16, {}},
    GgufTypeInfo{GgufType::kMxfp4, "MXFP4", 32, 17, {}, {}},
    GgufTypeInfo{GgufType::kNvfp4, "NVFP4", 64, 36, {}, {}},
};

struct Refused {
  std::uint32_t number;
  const char* name;
  bool in_memory;  // a type of llama.cpp's own arithmetic, which no file has
};
constexpr std::array kRefused{
    Refused{9, "Q8_1", true},     Refused{15, "Q8_K", true},     Refused{16, "IQ2_XXS", false},
    Refused{17, "IQ2_XS", false}, Refused{18, "IQ3_XXS", false}, Refused{19, "IQ1_S", false},
    Refused{21, "IQ3_S", false},  Refused{22, "IQ2_S", false},   Refused{29, "IQ1_M", false},
    Refused{34, "TQ1_0", false},  Refused{35, "TQ2_0", false},   Refused{41, "Q1_0", false},
};

std::int64_t blocks_in(const GgufTypeInfo& info, std::size_t bytes) {
  MT_ASSERT(bytes % static_cast<std::size_t>(info.bytes) == 0);
  return static_cast<std::int64_t>(bytes) / info.bytes;
}

const std::uint8_t* start_of(std::span<const std::byte> bytes) {
  // NOLINTNEXTLINE(cppcoreguidelines-pro-type-reinterpret-cast): bytes as the numbers they hold
  return reinterpret_cast<const std::uint8_t*>(bytes.data());
}

struct Scales {
  std::array<float, 16> s{}, m{};
};

const BlockLayout& layout_of(GgufType type) {
  const BlockLayout* layout = block_layout(type);
  MT_ASSERT(layout != nullptr);
  return *layout;
}

}  // namespace

const GgufTypeInfo* find_gguf_type(std::uint32_t number) {
  const auto* found = std::find_if(kTypes.begin(), kTypes.end(), [&](const GgufTypeInfo& info) {
    return static_cast<std::uint32_t>(info.type) == number;
  });
  return found == kTypes.end() ? nullptr : found;
}

const GgufTypeInfo& info_of(GgufType type) {
  const GgufTypeInfo* info = find_gguf_type(static_cast<std::uint32_t>(type));
  MT_ASSERT(info != nullptr);
  return *info;
}

std::string gguf_type_fault(std::uint32_t number) {
  for (const Refused& one : kRefused) {
    if (one.number != number) continue;
    const std::string name = std::string("is ") + one.name;
    if (one.in_memory) return name + ", a type that llama.cpp has in memory and no file has";
    return name +
           ", which is not supported: use a file of another type, for example Q4_K_M or Q8_0";
  }
  return "is of type " + std::to_string(number) + ", which is unknown";
}

void dequantize(GgufType type, std::span<const std::byte> blocks, std::span<float> out) {
  const GgufTypeInfo& info = info_of(type);
  const std::int64_t count = blocks_in(info, blocks.size());
  MT_ASSERT(static_cast<std::int64_t>(out.size()) == count * info.block);
  if (info.dtype) {
    if (count > 0) convert(blocks.data(), *info.dtype, out.data(), DType::kF32, out.size());
    return;
  }
  const BlockLayout& layout = layout_of(type);
  const std::uint8_t* block = start_of(blocks);
  float* to = out.data();
  std::array<std::uint8_t, kMaxBlock> q{};
  Scales at;
  for (std::int64_t i = 0; i < count; ++i, block += info.bytes) {
    layout.codes(block, q.data());
    layout.scales(block, at.s.data(), at.m.data());
    for (std::int64_t k = 0; k < info.block; ++k) {
      const auto group = static_cast<std::size_t>(k / layout.group);
      const float code = static_cast<float>(q[static_cast<std::size_t>(k)] - layout.zero);
      const float product = at.s[group] * code;
      *to++ = layout.has_min ? product + at.m[group] : product;
    }
  }
}

void affine_codes(GgufType type, std::span<const std::byte> blocks,
                  std::span<std::uint32_t> codes) {
  const GgufTypeInfo& info = info_of(type);
  const std::int64_t count = blocks_in(info, blocks.size());
  MT_ASSERT(info.affine.has_value());
  const BlockLayout& layout = layout_of(type);
  MT_ASSERT(static_cast<std::int64_t>(codes.size()) == count * info.block * layout.bits / 32);
  const std::uint8_t* block = start_of(blocks);
  std::uint32_t* to = codes.data();
  std::array<std::uint8_t, kMaxBlock> q{};
  const auto bits = static_cast<unsigned>(layout.bits);
  for (std::int64_t i = 0; i < count; ++i, block += info.bytes) {
    layout.codes(block, q.data());
    std::uint64_t held = 0;  // bits that make no whole word yet
    unsigned held_bits = 0;
    for (std::int64_t k = 0; k < info.block; ++k) {
      held |= static_cast<std::uint64_t>(q[static_cast<std::size_t>(k)]) << held_bits;
      held_bits += bits;
      if (held_bits < 32) continue;
      *to++ = static_cast<std::uint32_t>(held);
      held >>= 32U;
      held_bits -= 32;
    }
  }
}

void affine_scales(GgufType type, std::span<const std::byte> blocks, std::span<float> scales,
                   std::span<float> biases) {
  const GgufTypeInfo& info = info_of(type);
  const std::int64_t count = blocks_in(info, blocks.size());
  MT_ASSERT(info.affine.has_value());
  const BlockLayout& layout = layout_of(type);
  const auto groups = static_cast<std::size_t>(info.block / layout.group);
  const std::size_t all = static_cast<std::size_t>(count) * groups;
  MT_ASSERT(scales.empty() || scales.size() == all);
  MT_ASSERT(biases.empty() || biases.size() == all);
  const std::uint8_t* block = start_of(blocks);
  Scales at;
  for (std::size_t i = 0; i < all; i += groups, block += info.bytes) {
    layout.scales(block, at.s.data(), at.m.data());
    for (std::size_t j = 0; j < groups; ++j) {
      if (!scales.empty()) scales[i + j] = at.s[j];
      if (biases.empty()) continue;
      biases[i + j] = layout.has_min ? at.m[j] : static_cast<float>(-layout.zero) * at.s[j];
    }
  }
}

}  // namespace mlxtape::formats
