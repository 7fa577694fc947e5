// Rows of quantised weights, w = s·q + b with one s and b for each group of codes q, and their products with few rows
// of x: what a thread adds up, from words of codes as they lie. A product of a thread's codes is split,
// s·Σ q·x + b·Σ x: two multiplications for all of them instead of one for each.
#pragma once

#include <type_traits>

#include "backends/cuda/device/vectors.cuh"

namespace mlxtape::cuda {

// Calls body(integral_constant) for the widths there are, which the host has checked.
template <class Body>
void with_bits(int bits, const Body& body) {
  switch (bits) {
    case 2: return body(std::integral_constant<int, 2>());
    case 3: return body(std::integral_constant<int, 3>());
    case 4: return body(std::integral_constant<int, 4>());
    case 5: return body(std::integral_constant<int, 5>());
    case 6: return body(std::integral_constant<int, 6>());
    default: return body(std::integral_constant<int, 8>());
  }
}

// The codes that a thread takes at a time: 8, so that a warp reads whole lines of codes and of x; 32 where 8 are not
// whole words.
template <int kBits>
struct Codes {
  static constexpr int kCount = kBits == 4 || kBits == 8 ? 8 : 32;
  static constexpr int kWords = kCount * kBits / 32;
  unsigned word[kWords];

  __device__ __forceinline__ void load(const unsigned* p) {
#pragma unroll
    for (int i = 0; i < kWords; ++i) word[i] = __ldg(p + i);
  }
  // Code i, which must be known when this is compiled. Conversions of integers are slow: the code becomes the lowest
  // bits of 2^23 + q·2^at, which is exact, and so is q made from it.
  __device__ __forceinline__ float operator[](int i) const {
    constexpr unsigned kMask = (1U << kBits) - 1;
    const int bit = i * kBits, first = bit / 32, at = bit % 32;
    if (at + kBits <= 23) {
      const float v = __uint_as_float((word[first] & (kMask << at)) | 0x4b000000U);
      return fmaf(v, 1.0F / static_cast<float>(1U << at), -static_cast<float>(1U << (23 - at)));
    }
    const unsigned low = at + kBits <= 32
                             ? word[first] >> at
                             : __funnelshift_r(word[first], word[(first + 1) % kWords], at);
    return __uint_as_float((low & kMask) | 0x4b000000U) - 8388608.0F;
  }
};

// Weights as they are stored: codes [N, K·bits/32], scales and biases [N, K/group] of type T, or f32 if wide.
template <class T>
struct Quantized {
  const unsigned* codes;
  const void *scales, *biases;
  int k, bits;
  int group_shift;  // group = 2^group_shift
  bool wide;

  __device__ std::int64_t words() const { return std::int64_t{k} / 32 * bits; }
  __device__ std::int64_t group_of(std::int64_t row, int at) const {
    return row * (k >> group_shift) + (at >> group_shift);
  }
  __device__ float scale(std::int64_t i) const { return param(scales, i); }
  __device__ float bias(std::int64_t i) const { return param(biases, i); }
  __device__ float param(const void* p, std::int64_t i) const {
    return wide ? __ldg(static_cast<const float*>(p) + i) : widen(static_cast<const T*>(p)[i]);
  }
};

inline int shift_of(int group) { return group == 32 ? 5 : group == 64 ? 6 : 7; }

// 8 elements from p on; aligned: p is, to 16 bytes.
template <class T>
__device__ __forceinline__ void load_eight(const T* p, bool aligned, float (&v)[8]) {
  if (!aligned) {
#pragma unroll
    for (int i = 0; i < 8; ++i) v[i] = widen(p[i]);
    return;
  }
#pragma unroll
  for (int i = 0; i < 8; i += kPack<T>) {
    float some[kPack<T>];
    unpack(load_pack_shared(p + i), some);
#pragma unroll
    for (int j = 0; j < kPack<T>; ++j) v[i + j] = some[j];
  }
}

// sum[r][m] += this thread's part of x[m]·w[rows[r]]: codes from rank·kCount on, then every threads·kCount.
template <int kBits, int kRows, int kFew, class T, class X>
__device__ __forceinline__ void quantized_products(const Quantized<T>& w,
                                                   const std::int64_t (&rows)[kRows],
                                                   const X* const (&x)[kFew], bool aligned,
                                                   int rank, int threads,
                                                   float (&sum)[kRows][kFew]) {
  constexpr int kCount = Codes<kBits>::kCount;
#pragma unroll 2
  for (int k = rank * kCount; k < w.k; k += threads * kCount) {
    Codes<kBits> codes[kRows];
    float s[kRows], b[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      codes[r].load(w.codes + rows[r] * w.words() + std::int64_t{k} / 8 * kBits / 4);
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      s[r] = w.scale(w.group_of(rows[r], k));
      b[r] = w.bias(w.group_of(rows[r], k));
    }
#pragma unroll
    for (int from = 0; from < kCount; from += 8) {
#pragma unroll
      for (int m = 0; m < kFew; ++m) {
        float v[8];
        load_eight(x[m] + k + from, aligned, v);
        float all = 0;
#pragma unroll
        for (int i = 0; i < 8; ++i) all += v[i];
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
          float dot = 0;
#pragma unroll
          for (int i = 0; i < 8; ++i) dot = fmaf(codes[r][from + i], v[i], dot);
          sum[r][m] = fmaf(s[r], dot, fmaf(b[r], all, sum[r][m]));
        }
      }
    }
  }
}

// Sums of the lanes of a warp: lane r·kFew + m gets that of sum[r][m], others 0.
template <int kRows, int kFew>
__device__ __forceinline__ float hand_out(const float (&sum)[kRows][kFew]) {
  static_assert(kRows * kFew <= kWarp);
  float mine = 0;
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
#pragma unroll
    for (int m = 0; m < kFew; ++m) {
      const float v = lanes_sum(sum[r][m]);
      if (threadIdx.x % kWarp == r * kFew + m) mine = v;
    }
  }
  return mine;
}

}  // namespace mlxtape::cuda
