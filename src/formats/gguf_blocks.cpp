#include "formats/gguf_blocks.h"

#include <cmath>

namespace mlxtape::formats {

namespace {

using Byte = std::uint8_t;

unsigned bits_of(Byte byte, unsigned from, unsigned mask) { return byte >> from & mask; }

// 16 bytes: number i is the low half of byte i, number 16 + i the high half.
void halves(const Byte* bytes, Byte* q) {
  for (int i = 0; i < 16; ++i) {
    q[i] = bytes[i] & 15U;
    q[16 + i] = bytes[i] >> 4U;
  }
}

// ---- blocks of 32 ----

void codes_q40(const Byte* b, Byte* q) { halves(b + 2, q); }
void codes_q41(const Byte* b, Byte* q) { halves(b + 4, q); }

// The fifth bits are a word of 32, the first number's lowest.
void fifth_bits(const Byte* word, Byte* q) {
  for (int i = 0; i < 32; ++i) {
    q[i] = static_cast<Byte>(q[i] | bits_of(word[i / 8], static_cast<unsigned>(i % 8), 1) << 4U);
  }
}
void codes_q50(const Byte* b, Byte* q) {
  halves(b + 6, q);
  fifth_bits(b + 2, q);
}
void codes_q51(const Byte* b, Byte* q) {
  halves(b + 8, q);
  fifth_bits(b + 4, q);
}
// Signed bytes, moved up by 128.
void codes_q80(const Byte* b, Byte* q) {
  for (int i = 0; i < 32; ++i) q[i] = static_cast<Byte>(b[2 + i] ^ 0x80U);
}
void codes_iq4_nl(const Byte* b, Byte* q) {
  halves(b + 2, q);
  for (int i = 0; i < 32; ++i) q[i] = kIq4Codes[q[i]];
}

void scale_first(const Byte* b, float* s, float* m) {
  static_cast<void>(m);
  s[0] = half_at(b);
}
void scale_and_min_first(const Byte* b, float* s, float* m) {
  s[0] = half_at(b);
  m[0] = half_at(b + 2);
}

// ---- K types: blocks of 256 whose scales are quantised too ----

// 64 bytes of 2 bits: of each half of the block, number 32·k + i is in bits 2k and 2k + 1 of byte i.
void quarters(const Byte* bytes, Byte* q) {
  for (int i = 0; i < 256; ++i) {
    const auto shift = static_cast<unsigned>(i % 128 / 32) * 2;
    q[i] = static_cast<Byte>(bits_of(bytes[32 * (i / 128) + i % 32], shift, 3));
  }
}

void codes_q2k(const Byte* b, Byte* q) { quarters(b + 16, q); }
void scales_q2k(const Byte* b, float* s, float* m) {
  const float d = half_at(b + 80), low = half_at(b + 82);
  for (int j = 0; j < 16; ++j) {
    s[j] = d * static_cast<float>(b[j] & 15U);
    m[j] = -(low * static_cast<float>(b[j] >> 4U));
  }
}

void codes_q3k(const Byte* b, Byte* q) {
  quarters(b + 32, q);
  for (int i = 0; i < 256; ++i) {
    q[i] = static_cast<Byte>(q[i] | bits_of(b[i % 32], static_cast<unsigned>(i / 32), 1) << 2U);
  }
}
void scales_q3k(const Byte* b, float* s, float* m) {
  static_cast<void>(m);
  const Byte* quantized = b + 96;
  const float d = half_at(b + 108);
  for (int j = 0; j < 16; ++j) {
    const unsigned low = bits_of(quantized[j % 8], static_cast<unsigned>(j / 8) * 4, 15);
    const unsigned high = bits_of(quantized[8 + j % 4], static_cast<unsigned>(j / 4) * 2, 3);
    s[j] = d * static_cast<float>(static_cast<int>(low | high << 4U) - 32);
  }
}

// 12 bytes hold 8 scales and 8 minima of 6 bits.
void scales_of_six_bits(const Byte* b, float* s, float* m) {
  const float d = half_at(b), low = half_at(b + 2);
  const Byte* p = b + 4;
  for (int j = 0; j < 8; ++j) {
    unsigned scale = 0, min = 0;
    if (j < 4) {
      scale = p[j] & 63U;
      min = p[j + 4] & 63U;
    } else {
      scale = (p[j + 4] & 15U) | bits_of(p[j - 4], 6, 3) << 4U;
      min = bits_of(p[j + 4], 4, 15) | bits_of(p[j], 6, 3) << 4U;
    }
    s[j] = d * static_cast<float>(scale);
    m[j] = -(low * static_cast<float>(min));
  }
}

// 128 bytes of 4 bits: of each 64 numbers, the first 32 are low halves and the others high halves of the same 32 bytes.
void halves_of_32(const Byte* bytes, Byte* q) {
  for (int i = 0; i < 256; ++i) {
    const auto shift = static_cast<unsigned>(i / 32 % 2) * 4;
    q[i] = static_cast<Byte>(bits_of(bytes[32 * (i / 64) + i % 32], shift, 15));
  }
}
void codes_q4k(const Byte* b, Byte* q) { halves_of_32(b + 16, q); }
void codes_q5k(const Byte* b, Byte* q) {
  halves_of_32(b + 48, q);
  for (int i = 0; i < 256; ++i) {
    q[i] =
        static_cast<Byte>(q[i] | bits_of(b[16 + i % 32], static_cast<unsigned>(i / 32), 1) << 4U);
  }
}

void codes_q6k(const Byte* b, Byte* q) {
  for (int i = 0; i < 256; ++i) {
    const int half = i / 128, r = i % 128;
    const unsigned low = bits_of(b[64 * half + r % 64], static_cast<unsigned>(r / 64) * 4, 15);
    const unsigned high =
        bits_of(b[128 + 32 * half + r % 32], static_cast<unsigned>(r / 32) * 2, 3);
    q[i] = static_cast<Byte>(low | high << 4U);
  }
}
void scales_q6k(const Byte* b, float* s, float* m) {
  static_cast<void>(m);
  const float d = half_at(b + 208);
  for (int j = 0; j < 16; ++j) {
    s[j] = d * static_cast<float>(static_cast<std::int8_t>(b[192 + j]));
  }
}

void codes_iq4_xs(const Byte* b, Byte* q) {
  for (int i = 0; i < 256; ++i) {
    const auto shift = static_cast<unsigned>(i % 32 / 16) * 4;
    q[i] = kIq4Codes[bits_of(b[8 + 16 * (i / 32) + i % 16], shift, 15)];
  }
}
void scales_iq4_xs(const Byte* b, float* s, float* m) {
  static_cast<void>(m);
  const float d = half_at(b);
  const unsigned high = half_bits(b + 2);
  for (unsigned j = 0; j < 8; ++j) {
    const unsigned scale = bits_of(b[4 + j / 2], j % 2 * 4, 15) | (high >> 2 * j & 3U) << 4U;
    s[j] = d * static_cast<float>(static_cast<int>(scale) - 32);
  }
}

// ---- floats of 4 bits: twice their value, plus 12, so that all are whole numbers from 0 to 24 ----

constexpr std::array<Byte, 16> kTwiceE2m1{12, 13, 14, 15, 16, 18, 20, 24,
                                          12, 11, 10, 9,  8,  6,  4,  0};

void codes_mxfp4(const Byte* b, Byte* q) {
  halves(b + 1, q);
  for (int i = 0; i < 32; ++i) q[i] = kTwiceE2m1[q[i]];
}
void scales_mxfp4(const Byte* b, float* s, float* m) {
  static_cast<void>(m);
  s[0] = std::ldexp(1.0F, static_cast<int>(b[0]) - 128);  // half of 2^(e − 127)
}

void codes_nvfp4(const Byte* b, Byte* q) {
  for (int i = 0; i < 64; ++i) {
    const auto shift = static_cast<unsigned>(i % 16 / 8) * 4;
    q[i] = kTwiceE2m1[bits_of(b[4 + 8 * (i / 16) + i % 8], shift, 15)];
  }
}
// Scales are floats of 4 bits of exponent and 3 of mantissa; the sign is not used, and what would be NaN is 0.
void scales_nvfp4(const Byte* b, float* s, float* m) {
  static_cast<void>(m);
  for (int j = 0; j < 4; ++j) {
    const int exponent = static_cast<int>(bits_of(b[j], 3, 15));
    const auto mantissa = static_cast<float>(b[j] & 7U);
    const bool none = b[j] == 0x7F;
    const float value =
        exponent == 0 ? std::ldexp(mantissa, -9) : std::ldexp(8 + mantissa, exponent - 10);
    s[j] = none ? 0.0F : value / 2;
  }
}

constexpr std::array kLayouts{
    BlockLayout{GgufType::kQ40, 4, 32, 8, false, codes_q40, scale_first},
    BlockLayout{GgufType::kQ41, 4, 32, 0, true, codes_q41, scale_and_min_first},
    BlockLayout{GgufType::kQ50, 5, 32, 16, false, codes_q50, scale_first},
    BlockLayout{GgufType::kQ51, 5, 32, 0, true, codes_q51, scale_and_min_first},
    BlockLayout{GgufType::kQ80, 8, 32, 128, false, codes_q80, scale_first},
    BlockLayout{GgufType::kQ2K, 2, 16, 0, true, codes_q2k, scales_q2k},
    BlockLayout{GgufType::kQ3K, 3, 16, 4, false, codes_q3k, scales_q3k},
    BlockLayout{GgufType::kQ4K, 4, 32, 0, true, codes_q4k, scales_of_six_bits},
    BlockLayout{GgufType::kQ5K, 5, 32, 0, true, codes_q5k, scales_of_six_bits},
    BlockLayout{GgufType::kQ6K, 6, 16, 32, false, codes_q6k, scales_q6k},
    BlockLayout{GgufType::kIq4Nl, 8, 32, 128, false, codes_iq4_nl, scale_first},
    BlockLayout{GgufType::kIq4Xs, 8, 32, 128, false, codes_iq4_xs, scales_iq4_xs},
    BlockLayout{GgufType::kMxfp4, 5, 32, 12, false, codes_mxfp4, scales_mxfp4},
    BlockLayout{GgufType::kNvfp4, 5, 16, 12, false, codes_nvfp4, scales_nvfp4},
};

}  // namespace

const std::array<Byte, 16> kIq4Codes{1,   24,  45,  63,  79,  93,  106, 118,
                                     129, 141, 153, 166, 181, 197, 217, 241};

const BlockLayout* block_layout(GgufType type) {
  for (const BlockLayout& layout : kLayouts) {
    if (layout.type == type) return &layout;
  }
  return nullptr;
}

}  // namespace mlxtape::formats
