// What attention's 16-bit kernels do with the sums of a product in registers, where a warp has 16 rows: of the rows
// lane / 4 (i = 0, 1) and 8 below (i = 2, 3), and of each 8 columns, the two from lane % 4 · 2 on.
#pragma once

#include "attention_args.h"
#include "attention_places.cuh"
#include "backends/cuda/device/mma16.cuh"
#include "backends/cuda/device/vectors.cuh"

namespace mlxtape::ops {

constexpr float kLog2E = 1.44269504F, kLn2 = 0.693147181F;

// The sums of one product as the first factor of the next.
template <class T, int kTiles>
__device__ __forceinline__ void as_factor(unsigned (&a)[kTiles / 2][4],
                                          const float (&sums)[kTiles][4]) {
#pragma unroll
  for (int i = 0; i < kTiles / 2; ++i) {
    a[i][0] = cuda::two_of<T>(sums[2 * i][0], sums[2 * i][1]);
    a[i][1] = cuda::two_of<T>(sums[2 * i][2], sums[2 * i][3]);
    a[i][2] = cuda::two_of<T>(sums[2 * i + 1][0], sums[2 * i + 1][1]);
    a[i][3] = cuda::two_of<T>(sums[2 * i + 1][2], sums[2 * i + 1][3]);
  }
}

// A score, in powers of two, of query t and key j, which count by their places, with what the mask does to it.
template <class T>
__device__ __forceinline__ float masked(const AttentionArgs& args, const AttentionInputs<T>& in,
                                        const Sequence& s, std::int64_t t, std::int64_t h,
                                        std::int64_t j, float score) {
  if (args.mask_kind == AttentionMask::kNone) return score;
  const std::int64_t at =
      s.batch * args.mask[0] + h * args.mask[1] + t * args.mask[2] + j * args.mask[3];
  if (args.mask_kind == AttentionMask::kBool) {
    return static_cast<const bool*>(in.mask)[at] ? score : -INFINITY;
  }
  score += kLog2E * (args.mask_kind == AttentionMask::kF32
                         ? static_cast<const float*>(in.mask)[at]
                         : cuda::widen(static_cast<const T*>(in.mask)[at]));
  return score < kLog2E * kLeastScore ? -INFINITY : score;
}

// The keys of a row: [first, last).
struct Span {
  int first, last;
};
__device__ __forceinline__ Span span_of(const AttentionArgs& args, const Sequence& s,
                                        std::int64_t t) {
  return {static_cast<int>(first_key(args, s, t)), static_cast<int>(last_key(args, s, t))};
}

// Whether all of `columns` keys from `first` on count for both rows, and nothing is to be added.
__device__ __forceinline__ bool all_count(const AttentionArgs& args, const Span (&span)[2],
                                          int first, int columns) {
  return args.mask_kind == AttentionMask::kNone && first >= max(span[0].first, span[1].first) &&
         first + columns <= min(span[0].last, span[1].last);
}

// Products to scores in powers of two, −inf where a key does not count. row(i): the query of this thread's rows,
// i = 0 and 1; first: the key of column 0. kMasked: there may be a mask.
template <bool kMasked = true, int kTiles, class T, class Row>
__device__ __forceinline__ void count(float (&sums)[kTiles][4], const AttentionArgs& args,
                                      const AttentionInputs<T>& in, const Sequence& s,
                                      std::int64_t h, int first, const Span (&span)[2],
                                      const Row& row) {
  const int column = first + threadIdx.x % 4 * 2;
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int j = column + n * 8 + i % 2;
      float v = -INFINITY;
      if (j >= span[i / 2].first && j < span[i / 2].last) {
        v = sums[n][i] * (args.scale * kLog2E);
        if constexpr (kMasked) v = masked(args, in, s, row(i / 2), h, j, v);
      }
      sums[n][i] = v;
    }
  }
}

// 2^x, 0 where it would be smaller than 2^-126.
__device__ __forceinline__ float power_of_two(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// The softmax of two rows so far, of which this thread has some columns, in powers of two. Weights are relative to a score
// that is the largest so far or up to 2^8 below it: what is summed up is rescaled when a row begins and then hardly ever,
// and weights up to 256 are as exact as weights up to 1.
struct Softening {
  static constexpr float kSlack = 8;
  float most[2] = {-INFINITY, -INFINITY};
  float sum[2] = {};  // over this thread's columns
  float keep[2];      // what sums so far are to be multiplied with

  // Scores to weights in their place; times factor ≥ 0 they are powers of two.
  template <int kTiles>
  __device__ __forceinline__ void next(float (&scores)[kTiles][4], float factor) {
    float largest[2] = {-INFINITY, -INFINITY};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
        largest[i] = fmaxf(largest[i], fmaxf(scores[n][2 * i], scores[n][2 * i + 1]));
      }
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      largest[i] = fmaxf(largest[i], __shfl_xor_sync(cuda::kAll, largest[i], 1));
      largest[i] = fmaxf(largest[i], __shfl_xor_sync(cuda::kAll, largest[i], 2)) * factor;
      keep[i] = 1;
      if (largest[i] > most[i] + kSlack) {
        keep[i] = power_of_two(most[i] - largest[i]);
        sum[i] *= keep[i];
        most[i] = largest[i];
      }
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float shift = most[i] == -INFINITY ? 0 : most[i];
      float total[2] = {};
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float& score = scores[n][2 * i + e];
          score = power_of_two(fmaf(score, factor, -shift));
          total[e] += score;
        }
      }
      sum[i] += total[0] + total[1];
    }
  }
};

__device__ __forceinline__ float over_lanes_of_row(float v) {
  v += __shfl_xor_sync(cuda::kAll, v, 1);
  return v + __shfl_xor_sync(cuda::kAll, v, 2);
}

// What a row's sums are multiplied with at the end, and its lse. sink: −inf where there is none.
struct Total {
  float factor, lse;
};
__device__ __forceinline__ Total total_of(float most, float sum, float sink) {
  sink *= kLog2E;
  const float shift = fmaxf(most, sink);
  if (shift == -INFINITY) return {0, -INFINITY};
  const float keep = exp2f(most - shift);
  const float all = fmaf(sum, keep, exp2f(sink - shift));
  return {keep / all, kLn2 * shift + logf(all)};
}

// Long rows first, so that the short ones fill the end.
__device__ __forceinline__ unsigned from_the_end(unsigned heads) {
  return gridDim.x / heads - 1 - blockIdx.x / heads;
}

}  // namespace mlxtape::ops
