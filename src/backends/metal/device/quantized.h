// Rows of quantised weights, w = s·q + b with one s and b for each group of codes q, and their products with few rows of x:
// what a thread adds up, from words of codes as they lie. A product of a thread's codes is split, s·Σ q·x + b·Σ x: two
// multiplications for eight of them instead of one for each.
#pragma once

#include "backends/metal/device/vectors.h"

// The codes that a lane takes at a time, which are whole words.
template <int kBits>
struct QuantizedCodes {
  enum { kCount = kBits % 2 == 0 ? 16 : 32, kWords = kCount * kBits / 32 };
  uint word[kWords];
};

// Code i, which must be known when this is compiled. Conversions of integers are slow: the code becomes the lowest bits of
// 2^23 + q, which is exact.
template <int kBits>
inline float quantized_code(thread const QuantizedCodes<kBits>& codes, int i) {
  enum { kMask = (1 << kBits) - 1 };
  const int bit = i * kBits, first = bit / 32, at = bit % 32;
  uint low = codes.word[first] >> at;
  if (at + kBits > 32) low |= codes.word[first + 1] << (32 - at);
  return as_type<float>((low & uint(kMask)) | 0x4b000000u) - 8388608.0f;
}

// Weights as they are stored: codes [rows, k·bits/32], scales and biases [rows, k/group], of type T or f32.
struct Quantized {
  device const uint* codes;
  device const uchar* scales;
  device const uchar* biases;
  uint k, group_shift;
  bool wide;  // scales and biases are f32
};
template <typename T>
inline float quantized_param(device const uchar* p, bool wide, long i) {
  return wide ? ((device const float*)p)[i] : widen(((device const T*)p)[i]);
}

// Eight elements; packs: they begin at a multiple of 16 bytes.
template <typename X>
inline void load_eight(device const X* p, bool packs, thread float* v) {
  if (packs) {
    for (int i = 0; i < 8; i += Pack<X>::kCount) Pack<X>::unpack(load_pack(p + i), v + i);
  } else {
    for (int i = 0; i < 8; ++i) v[i] = widen(p[i]);
  }
}

// Sums of kRows rows of weights by kFew rows of x.
template <int kRows, int kFew>
struct QuantizedSums {
  float v[kRows][kFew];
};

// This lane's part of the products of rows [first, first + kRows) with those of x, step apart. Rows from `rows` on are done as
// the last one, rows of x from `few` on as the first one.
template <typename T, int kBits, typename X, int kRows, int kFew>
inline void quantized_products(thread const Quantized& w, long first, long rows, device const X* x,
                               long step, uint few, bool packs, uint lane,
                               thread QuantizedSums<kRows, kFew>& sums) {
  enum { kCount = QuantizedCodes<kBits>::kCount, kWords = QuantizedCodes<kBits>::kWords };
  for (int r = 0; r < kRows; ++r) {
    for (int m = 0; m < kFew; ++m) sums.v[r][m] = 0;
  }
  for (uint k = lane * kCount; k < w.k; k += 32 * kCount) {
    QuantizedCodes<kBits> codes[kRows];
    float s[kRows], b[kRows];
    for (int r = 0; r < kRows; ++r) {
      const long row = min(first + r, rows - 1);
      device const uint* from = w.codes + row * (w.k / 32 * kBits) + k / 8 * kBits / 4;
      for (int i = 0; i < kWords; ++i) codes[r].word[i] = from[i];
      const long group = row * (w.k >> w.group_shift) + (k >> w.group_shift);
      s[r] = quantized_param<T>(w.scales, w.wide, group);
      b[r] = quantized_param<T>(w.biases, w.wide, group);
    }
    for (int from = 0; from < kCount; from += 8) {
      float q[kRows][8];
      for (int r = 0; r < kRows; ++r) {
        for (int i = 0; i < 8; ++i) q[r][i] = quantized_code(codes[r], from + i);
      }
      for (int m = 0; m < kFew; ++m) {
        float v[8];
        load_eight(x + (uint(m) < few ? m : 0) * step + k + from, packs, v);
        float all = 0;
        for (int i = 0; i < 8; ++i) all += v[i];
        for (int r = 0; r < kRows; ++r) {
          float dot = 0;
          for (int i = 0; i < 8; ++i) dot = fma(q[r][i], v[i], dot);
          sums.v[r][m] = fma(s[r], dot, fma(b[r], all, sums.v[r][m]));
        }
      }
    }
  }
}

// The sums of all lanes: lane r·kFew + m gets that of row r with row m of x.
template <int kRows, int kFew>
inline float quantized_sum(thread const QuantizedSums<kRows, kFew>& sums, uint lane) {
  float mine = 0;
  for (int r = 0; r < kRows; ++r) {
    for (int m = 0; m < kFew; ++m) {
      const float v = simd_sum(sums.v[r][m]);
      if (lane == uint(r * kFew + m)) mine = v;
    }
  }
  return mine;
}
