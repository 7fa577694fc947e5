// Tensor types of GGUF files: how each packs numbers into blocks, how blocks become numbers or affine groups, and back.
//
// Layout     A block holds `block` neighbours of a row in `bytes` bytes; a row is a whole number of blocks. All values are
//            little-endian.
// Formula    Every quantised type is w = s·(q − zero) or w = s·q + m, with one s (and m) for each `group` neighbours, and
//            all of it in f32. As an affine group (mlxtape/ops/quantize.h) that is scale s, bias −zero·s or m.
// Exactness  dequantize gives what the Python package gguf gives, bit for bit. An affine form is given only where s·q + b in f32
//            is w for every block: with scales in f16 for Q4_0, Q4_1, Q5_0, Q5_1, Q8_0 and IQ4_NL, in f32 for Q2_K to
//            Q6_K. A zero may lose its sign there.
//
// Threads    Functions: any.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>

#include "mlxtape/base/dtype.h"

namespace mlxtape::formats {

enum class GgufType : std::uint32_t {
  kF32 = 0,
  kF16 = 1,
  kQ40 = 2,
  kQ41 = 3,
  kQ50 = 6,
  kQ51 = 7,
  kQ80 = 8,
  kQ2K = 10,
  kQ3K = 11,
  kQ4K = 12,
  kQ5K = 13,
  kQ6K = 14,
  kIq4Nl = 20,
  kIq4Xs = 23,
  kI8 = 24,
  kI16 = 25,
  kI32 = 26,
  kI64 = 27,
  kF64 = 28,
  kBf16 = 30,
  kMxfp4 = 39,
  kNvfp4 = 40,
};

// An affine form: codes of `bits` bits with a scale and a bias of type `scales` for each `group` neighbours.
struct GgufAffine {
  int bits = 0, group = 0;
  DType scales = DType::kF16;
};

struct GgufTypeInfo {
  GgufType type;
  const char* name;                  // "Q4_K", as llama.cpp writes it
  std::int64_t block;                // numbers in a block
  std::int64_t bytes;                // of a block
  std::optional<DType> dtype;        // of types that are plain numbers
  std::optional<GgufAffine> affine;  // of types that have an exact one
};

// Null where this is no type that a file can be read with; gguf_type_fault then says why.
const GgufTypeInfo* find_gguf_type(std::uint32_t number);
const GgufTypeInfo& info_of(GgufType type);
// "is IQ2_XXS, which is not supported": continues a sentence about a tensor.
std::string gguf_type_fault(std::uint32_t number);

// Whole blocks to numbers: blocks.size() is n·bytes, out.size() n·block.
void dequantize(GgufType type, std::span<const std::byte> blocks, std::span<float> out);

// Of types with an affine form. codes: a row's as one stream of bits, the first in the lowest bits of the first word.
void affine_codes(GgufType type, std::span<const std::byte> blocks, std::span<std::uint32_t> codes);
// scales and biases in f32, one for each group; in f16 they are exact where the affine form says so. Either may be empty.
void affine_scales(GgufType type, std::span<const std::byte> blocks, std::span<float> scales,
                   std::span<float> biases);

// The types that numbers can be written in: F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0. Rounds as the Python package gguf
// does, bit for bit.
bool can_quantize(GgufType type);
void quantize(GgufType type, std::span<const float> numbers, std::span<std::byte> blocks);

// Affine groups as blocks: 4 bits as Q4_1, 5 bits as Q5_1, 8 bits as Q8_0; none for other bits.
std::optional<GgufType> gguf_type_of_affine(int bits);
// Are the blocks the same numbers? Scales and biases must be f16 values, and for Q8_0 each bias −128 times its scale.
bool affine_fits(GgufType type, std::span<const float> scales, std::span<const float> biases);
// Of groups that fit. group: 32, 64 or 128.
void blocks_of_affine(GgufType type, int group, std::span<const std::uint32_t> codes,
                      std::span<const float> scales, std::span<const float> biases,
                      std::span<std::byte> blocks);

}  // namespace mlxtape::formats
