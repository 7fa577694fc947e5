#include "mlxtape/formats/gguf_types.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>

#include "mlxtape/base/half.h"
#include "mlxtape/formats/gguf.h"

namespace mlxtape::formats {
namespace {

using namespace std::string_literals;

const GgufFile& golden() {
  static const GgufFile file(std::string(MLXTAPE_GOLDEN) + "/types.gguf");
  return file;
}

std::vector<float> numbers_of(const GgufTensor& tensor) {
  std::vector<float> numbers(static_cast<std::size_t>(*element_count(tensor.shape)));
  dequantize(tensor.type, golden().bytes(tensor), numbers);
  return numbers;
}

// Of two lists of floats: how many differ in a bit.
std::size_t different_bits(std::span<const float> a, std::span<const float> b) {
  EXPECT_EQ(a.size(), b.size());
  std::size_t count = 0;
  for (std::size_t i = 0; i < a.size() && i < b.size(); ++i) {
    count += std::bit_cast<std::uint32_t>(a[i]) != std::bit_cast<std::uint32_t>(b[i]) ? 1 : 0;
  }
  return count;
}

const char* const kPacked[] = {"Q4_0", "Q4_1", "Q5_0", "Q5_1",   "Q8_0",   "Q2_K",  "Q3_K",
                               "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS", "MXFP4", "NVFP4"};

TEST(GgufTypes, NumbersAreThoseOfThePythonPackage) {
  for (const std::string name : kPacked) {
    const GgufTensor& quantized = golden().tensor(name);
    EXPECT_EQ(info_of(quantized.type).name, name);
    const std::vector<float> want = numbers_of(golden().tensor(name + ".numbers"));
    EXPECT_EQ(different_bits(numbers_of(quantized), want), 0U) << name;
    EXPECT_GT(different_bits(std::vector<float>(want.size()), want), want.size() / 2) << name;
  }
}

// Codes, scales and biases as mlxtape/ops/quantize.h reads them.
std::vector<float> affine_numbers(const GgufTensor& tensor) {
  const GgufTypeInfo& info = info_of(tensor.type);
  const auto bits = static_cast<unsigned>(info.affine->bits);
  const auto group = static_cast<std::size_t>(info.affine->group);
  const auto count = static_cast<std::size_t>(*element_count(tensor.shape));
  std::vector<std::uint32_t> codes(count * bits / 32);
  std::vector<float> scales(count / group), biases(count / group);
  affine_codes(tensor.type, golden().bytes(tensor), codes);
  affine_scales(tensor.type, golden().bytes(tensor), scales, biases);
  std::vector<float> numbers(count);
  for (std::size_t i = 0; i < count; ++i) {
    std::uint64_t pair = codes[i * bits / 32];
    if (i * bits / 32 + 1 < codes.size()) pair |= std::uint64_t{codes[i * bits / 32 + 1]} << 32U;
    const auto q = static_cast<float>(pair >> i * bits % 32 & ((1U << bits) - 1));
    float s = scales[i / group], b = biases[i / group];
    if (info.affine->scales == DType::kF16) {  // then they fit it
      s = detail::f16_value(detail::f16_bits(s));
      b = detail::f16_value(detail::f16_bits(b));
    }
    const float product = s * q;
    numbers[i] = product + b;
  }
  return numbers;
}

TEST(GgufTypes, AffineGroupsAreTheSameNumbers) {
  int forms = 0;
  for (const std::string name : kPacked) {
    const GgufTensor& quantized = golden().tensor(name);
    if (!info_of(quantized.type).affine) continue;
    ++forms;
    EXPECT_EQ(affine_numbers(quantized), numbers_of(quantized)) << name;
  }
  EXPECT_EQ(forms, 11);
}

TEST(GgufTypes, ScalesAndBiasesCanBeHadAlone) {
  const GgufTensor& tensor = golden().tensor("Q4_K");
  std::vector<float> scales(16), biases(16), again(16);
  affine_scales(tensor.type, golden().bytes(tensor), scales, biases);
  affine_scales(tensor.type, golden().bytes(tensor), again, {});
  EXPECT_EQ(again, scales);
  affine_scales(tensor.type, golden().bytes(tensor), {}, again);
  EXPECT_EQ(again, biases);
}

TEST(GgufTypes, NumbersArePackedAsThePythonPackageDoes) {
  for (const std::string name : {"Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "BF16", "F16"}) {
    const GgufTensor& want = golden().tensor(name + ".packed");
    ASSERT_TRUE(can_quantize(want.type)) << name;
    std::vector<std::byte> quantized(want.bytes);
    quantize(want.type, numbers_of(golden().tensor(name + ".from")), quantized);
    EXPECT_EQ(std::memcmp(quantized.data(), golden().bytes(want).data(), want.bytes), 0) << name;
  }
  EXPECT_FALSE(can_quantize(GgufType::kQ4K));
}

std::string packed_of(GgufType type, const std::vector<float>& numbers) {
  std::string blocks(static_cast<std::size_t>(info_of(type).bytes), '\0');
  quantize(type, numbers, std::as_writable_bytes(std::span(blocks)));
  return blocks;
}

TEST(GgufTypes, TiesGoAwayFromZeroAndToTheFirst) {
  std::vector<float> numbers(32, 0.5F);
  numbers[0] = 127;  // the scale is 1
  numbers[1] = -2.5F;
  const std::string q80 = packed_of(GgufType::kQ80, numbers);
  EXPECT_EQ(q80[3], -3);
  EXPECT_EQ(q80[4], 1);
  // Of two numbers of the same size the first has the code 0: the scale has its sign turned around.
  numbers.assign(32, 0);
  numbers[5] = 1;
  numbers[9] = -1;
  EXPECT_EQ(packed_of(GgufType::kQ40, numbers).substr(0, 2), "\x00\xb0"s);  // -1/8 in f16
}

TEST(GgufTypes, WhatWouldBeNanAsAScaleIsZero) {
  std::vector<std::byte> block(36, std::byte{0x22});
  block[1] = std::byte{0x7F};
  std::vector<float> numbers(64);
  dequantize(GgufType::kNvfp4, block, numbers);
  EXPECT_NE(numbers[0], 0);
  EXPECT_EQ(numbers[16], 0);
  EXPECT_NE(numbers[32], 0);
}

TEST(GgufTypes, WhatIsNoNumberIsPackedWithinItsBlock) {
  const float inf = std::numeric_limits<float>::infinity(), nan = std::nanf("");
  for (const GgufType type :
       {GgufType::kQ40, GgufType::kQ41, GgufType::kQ50, GgufType::kQ51, GgufType::kQ80}) {
    for (const float odd : {inf, -inf, nan, 1e-44F, std::numeric_limits<float>::max()}) {
      std::vector<float> numbers(32, odd);
      numbers[3] = 1;
      std::vector<std::byte> quantized(static_cast<std::size_t>(info_of(type).bytes));
      quantize(type, numbers, quantized);  // sanitizers watch it
    }
  }
}

// ---- affine groups of MLX as blocks ----

struct Groups {
  std::vector<std::uint32_t> codes;
  std::vector<float> scales, biases;
};

Groups some_groups(int bits, int group, std::size_t count) {
  Groups g;
  std::uint32_t word = 12345;
  for (std::size_t i = 0; i < count * static_cast<std::size_t>(bits) / 32; ++i) {
    g.codes.push_back(word = word * 1664525 + 1013904223);
  }
  for (std::size_t i = 0; i < count / static_cast<std::size_t>(group); ++i) {
    const float s = static_cast<float>(i % 7 + 1) * (i % 2 == 0 ? -0.0625F : 0.03125F);
    g.scales.push_back(s);
    g.biases.push_back(bits == 8 ? -128 * s : static_cast<float>(i % 5) - 2.5F);
  }
  return g;
}

std::vector<float> numbers_of(const Groups& g, int bits, int group, std::size_t count) {
  std::vector<float> numbers(count);
  const auto width = static_cast<unsigned>(bits);
  for (std::size_t i = 0; i < count; ++i) {
    std::uint64_t pair = g.codes[i * width / 32];
    if (i * width / 32 + 1 < g.codes.size()) {
      pair |= std::uint64_t{g.codes[i * width / 32 + 1]} << 32U;
    }
    const auto q = static_cast<float>(pair >> i * width % 32 & ((1U << width) - 1));
    const std::size_t at = i / static_cast<std::size_t>(group);
    const float product = g.scales[at] * q;
    numbers[i] = product + g.biases[at];
  }
  return numbers;
}

TEST(GgufTypes, AffineGroupsBecomeBlocksOfTheSameNumbers) {
  constexpr std::size_t kCount = 1280;
  for (const int bits : {4, 5, 8}) {
    for (const int group : {32, 64, 128}) {
      const GgufType type = *gguf_type_of_affine(bits);
      const Groups g = some_groups(bits, group, kCount);
      std::vector<std::byte> blocks(kCount / 32 * static_cast<std::size_t>(info_of(type).bytes));
      ASSERT_TRUE(affine_fits(type, g.scales, g.biases));
      blocks_of_affine(type, group, g.codes, g.scales, g.biases, blocks);
      std::vector<float> numbers(kCount);
      dequantize(type, blocks, numbers);
      EXPECT_EQ(numbers, numbers_of(g, bits, group, kCount)) << bits << " " << group;
    }
  }
  for (const int bits : {2, 3, 6}) EXPECT_FALSE(gguf_type_of_affine(bits).has_value());
}

TEST(GgufTypes, ScalesThatAreNoHalvesHaveNoBlocks) {
  const float inf = std::numeric_limits<float>::infinity();
  for (const int bits : {4, 8}) {
    for (const float odd : {1.0F / 3, 70000.0F, 1e-9F, inf, std::nanf("")}) {
      for (const bool scale : {true, false}) {
        const GgufType type = *gguf_type_of_affine(bits);
        Groups g = some_groups(bits, 32, 64);
        (scale ? g.scales : g.biases)[1] = odd;
        EXPECT_FALSE(affine_fits(type, g.scales, g.biases)) << odd;
      }
    }
  }
  Groups g = some_groups(8, 32, 64);
  g.biases[0] = -127 * g.scales[0];
  EXPECT_FALSE(affine_fits(GgufType::kQ80, g.scales, g.biases));
}

}  // namespace
}  // namespace mlxtape::formats
