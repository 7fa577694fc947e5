// How a step is cut on CUDA, and what blocks leave behind. A block has up to kStepRows queries that share a key head,
// and a split of the keys. How many splits there may be follows from the shape, and with it the grid; how long they are
// from the sequence's length, so that short and long sequences keep all blocks equally busy.
#pragma once

#include <algorithm>
#include <cstdint>

#include "attention_step_args.h"
#include "backends/cuda/device/launch.cuh"
#include "backends/cuda/device/partials.cuh"
#include "backends/cuda/device/rows.cuh"
#include "backends/cuda/device/vectors.cuh"

namespace mlxtape::ops {

constexpr int kStepWarps = 4;
constexpr int kStepThreads = kStepWarps * cuda::kWarp;
constexpr int kStepRows = 8;
constexpr int kStepKeys = 16 * kStepWarps;  // splits are multiples of it
constexpr int kMostSplits = 256;
constexpr float kStepLog2E = 1.44269504F;

struct StepCut {
  int group, rows;    // heads that share keys; their queries, row t·group + member
  int tiles, splits;  // of the rows, of the keys
};

inline StepCut cut_of(const AttentionStepArgs& args) {
  const std::int64_t group = args.heads / args.key_heads, rows = args.tokens * group;
  const std::int64_t tiles = cuda::blocks_for(rows, kStepRows);
  // Two blocks fit on a multiprocessor where channels are many. Where heads alone are enough for all of
  // them, a few splits even out sequences of different lengths.
  const int room = cuda::kMultiprocessors * (std::max(args.dim, args.value_dim) > 128 ? 2 : 4);
  const std::int64_t wanted = room / (args.batch * args.key_heads * tiles);
  const std::int64_t splits = std::min(std::clamp<std::int64_t>(wanted, 4, kMostSplits),
                                       cuda::blocks_for(args.capacity, kStepKeys));
  return {static_cast<int>(group), static_cast<int>(rows), static_cast<int>(tiles),
          static_cast<int>(splits)};
}

// What blocks leave: of each key head, split and row the largest score and the sum of the weights relative to it, in
// powers of two, and the values' sum.
struct StepParts {
  float2* stats;  // [B·Hk, splits, rows]
  float* sums;    // [B·Hk, splits, rows, Dv]
};
inline std::int64_t part_rows(const AttentionStepArgs& args, const StepCut& cut) {
  return args.batch * args.key_heads * cut.splits * cut.rows;
}

// Keys [first, last) of a sequence count for one of its queries; the new ones are those from `before` on.
struct StepSpan {
  int first, before, last;
  int each, used;  // keys of a split, splits that have any

  __device__ __forceinline__ StepSpan(const AttentionStepArgs& args, const StepCut& cut,
                                      const std::int32_t* lengths, std::int64_t b) {
    const auto tokens = static_cast<int>(args.tokens), window = static_cast<int>(args.window);
    before = min(max(lengths[b], 0), static_cast<int>(args.capacity) - tokens);
    first = window == 0 ? 0 : max(before + 1 - window, 0);
    last = before + tokens;
    const int share = (last - first + cut.splits - 1) / cut.splits;
    each = (share + kStepKeys - 1) / kStepKeys * kStepKeys;
    used = (last - first + each - 1) / each;
  }
};

// Where a block is. Keys are counted from its first one on: it has `count`, the new ones are those from `fresh` on.
struct StepPlace {
  std::int64_t b, kh;
  std::int64_t part;  // of row 0 among the parts
  int tile, from, count, fresh;

  __device__ __forceinline__ StepPlace(const AttentionStepArgs& args, const StepCut& cut,
                                       const std::int32_t* lengths) {
    const auto block = static_cast<int>(blockIdx.x), place = block / cut.tiles;
    tile = block % cut.tiles;
    const int head = place / cut.splits, split = place % cut.splits;
    b = head / args.key_heads;
    kh = head % args.key_heads;
    part = std::int64_t{place} * cut.rows;
    const StepSpan span(args, cut, lengths, b);
    from = span.first + split * span.each;
    count = min(span.last - from, span.each);
    fresh = span.before - from;
  }
};

// Keys [start, stop) of a block count for row r.
struct StepRange {
  int start, stop;
};
__device__ __forceinline__ StepRange range_of(const AttentionStepArgs& args, const StepCut& cut,
                                              const StepPlace& p, int r) {
  const int stop = p.fresh + r / cut.group + 1;
  return {args.window == 0 ? 0 : stop - static_cast<int>(args.window), min(stop, p.count)};
}

// The rows of keys or values that a block reads: old ones from the cache, new ones from where they came.
template <class T>
struct StepRowsOf {
  T* cache;
  const T* given;
  std::int64_t step, given_step;
  int fresh;

  __device__ __forceinline__ StepRowsOf(const AttentionStepArgs& args, const StepPlace& p, T* all,
                                        const T* news, const std::int64_t (&strides)[3],
                                        std::int64_t channels)
      : cache(all + ((p.b * args.capacity + p.from) * args.key_heads + p.kh) * channels),
        given(news + p.b * strides[0] + p.kh * strides[2]),
        step(args.key_heads * channels),
        given_step(strides[1]),
        fresh(p.fresh) {}
  __device__ __forceinline__ const T* row(int j) const {
    const bool old = j < fresh;  // chosen without a branch
    return (old ? cache : given) + (old ? j : j - fresh) * (old ? step : given_step);
  }
  __device__ __forceinline__ void store_new(int count, int channels) const {
    for (int j = max(fresh, 0); j < count; ++j) {
      for (int c = threadIdx.x; c < channels; c += kStepThreads) cache[j * step + c] = row(j)[c];
    }
  }
};

// What the warps of a block have for each row, joined in their order. An odd pitch spreads rows over the banks.
template <int kChannels>
struct StepRoom {
  float sums[kStepWarps][kStepRows][kChannels + 1];
  float most[kStepWarps][kStepRows], sum[kStepWarps][kStepRows];

  __device__ __forceinline__ void leave(const StepCut& cut, const StepPlace& p, int channels,
                                        const StepParts& parts) {
    __syncthreads();
    for (int i = 0; i < kStepRows; ++i) {
      const int r = p.tile * kStepRows + i;
      if (r >= cut.rows) return;
      float largest = -INFINITY, total = 0, weight[kStepWarps];
#pragma unroll
      for (int w = 0; w < kStepWarps; ++w) largest = fmaxf(largest, most[w][i]);
      const float shift = largest == -INFINITY ? 0 : largest;
#pragma unroll
      for (int w = 0; w < kStepWarps; ++w) {
        weight[w] = exp2f(most[w][i] - shift);
        total = fmaf(weight[w], sum[w][i], total);
      }
      for (int c = threadIdx.x; c < channels; c += kStepThreads) {
        float v = 0;
#pragma unroll
        for (int w = 0; w < kStepWarps; ++w) v = fmaf(weight[w], sums[w][i][c], v);
        parts.sums[(p.part + r) * channels + c] = v;
      }
      if (threadIdx.x == 0) parts.stats[p.part + r] = {largest, total};
    }
  }
};

}  // namespace mlxtape::ops
