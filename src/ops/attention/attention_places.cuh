// Where the blocks of attention's kernels are, and which keys count there.
#pragma once

#include <algorithm>
#include <cstdint>

#include "attention_args.h"
#include "backends/cuda/device/launch.cuh"
#include "backends/cuda/device/mma16.cuh"
#include "backends/cuda/device/rows.cuh"
#include "backends/cuda/device/vectors.cuh"
#include "mlxtape/core/registry.h"

namespace mlxtape::ops {

template <class T>
struct AttentionInputs {
  const T *q, *k, *v;
  const void* mask;
  const float* sinks;
  const void *starts, *key_starts;
};

struct Sequence {
  std::int64_t batch, query, queries, key, keys;
};

__device__ __forceinline__ std::int64_t start_at(const AttentionArgs& args, const void* starts,
                                                 std::int64_t n, std::int64_t low,
                                                 std::int64_t high) {
  if (n == args.sequences) return high;
  const std::int64_t given = args.start_bytes == 4 ? static_cast<const std::int32_t*>(starts)[n]
                                                   : static_cast<const std::int64_t*>(starts)[n];
  return min(max(given, low), high);
}

// The sequence that block number `block` of `rows` tokens each falls into, and its first token there; −1: none.
template <int kRows, class T>
__device__ __forceinline__ std::int64_t find(const AttentionArgs& args,
                                             const AttentionInputs<T>& in, std::int64_t block,
                                             bool by_keys, Sequence& s) {
  if (args.sequences == 0) {
    const std::int64_t all = by_keys ? args.keys : args.queries;
    const std::int64_t each = (all + kRows - 1) / kRows;
    s = {block / each, 0, args.queries, 0, args.keys};
    return block % each * kRows;
  }
  std::int64_t query = 0, key = 0;
  for (std::int64_t n = 0; n < args.sequences; ++n) {
    const std::int64_t next_query = start_at(args, in.starts, n + 1, query, args.queries);
    const std::int64_t next_key = start_at(args, in.key_starts, n + 1, key, args.keys);
    const std::int64_t count = by_keys ? next_key - key : next_query - query;
    const std::int64_t blocks = (count + kRows - 1) / kRows;
    if (block < blocks) {
      s = {0, query, next_query - query, key, next_key - key};
      return block * kRows;
    }
    block -= blocks;
    query = next_query;
    key = next_key;
  }
  return -1;
}
inline std::int64_t blocks_of(const AttentionArgs& args, bool by_keys, int rows) {
  const std::int64_t all = by_keys ? args.keys : args.queries;
  return args.sequences == 0 ? args.batch * cuda::blocks_for(all, rows)
                             : all / rows + args.sequences;
}

__device__ __forceinline__ std::int64_t last_key(const AttentionArgs& args, const Sequence& s,
                                                 std::int64_t t) {
  if (args.causal == 0) return s.keys;
  return min(max(t + s.keys - s.queries + 1, std::int64_t{0}), s.keys);
}
__device__ __forceinline__ std::int64_t first_key(const AttentionArgs& args, const Sequence& s,
                                                  std::int64_t t) {
  if (args.window == 0) return 0;
  return min(max(t + s.keys - s.queries + 1 - args.window, std::int64_t{0}), last_key(args, s, t));
}

// A score as it counts: with the mask added, or −inf.
template <class T>
__device__ __forceinline__ float counted(const AttentionArgs& args, const AttentionInputs<T>& in,
                                         const Sequence& s, std::int64_t t, std::int64_t h,
                                         std::int64_t j, float score) {
  constexpr float kNever = -INFINITY;
  if (j < first_key(args, s, t) || j >= last_key(args, s, t)) return kNever;
  if (args.mask_kind == AttentionMask::kNone) return score;
  const std::int64_t at =
      s.batch * args.mask[0] + h * args.mask[1] + t * args.mask[2] + j * args.mask[3];
  if (args.mask_kind == AttentionMask::kBool) {
    return static_cast<const bool*>(in.mask)[at] ? score : kNever;
  }
  score += args.mask_kind == AttentionMask::kF32 ? static_cast<const float*>(in.mask)[at]
                                                 : cuda::widen(static_cast<const T*>(in.mask)[at]);
  return score < kLeastScore ? kNever : score;
}

// dk and dv of a block of keys. Where keys are too few to fill the device, the heads that share them are cut into
// `count` parts, a block each, whose sums are joined in order.
template <class T>
struct KeyGradients {
  T *dk, *dv;
  float* parts;  // [count, B·S·Hk, D + Dv]; null: none
  int count;

  // Two neighbouring channels of row number `row`, of dk or, behind dim, of dv.
  __device__ __forceinline__ void store(const AttentionArgs& args, int part, std::int64_t row,
                                        int c, float first, float second) const {
    const auto dim = static_cast<int>(args.dim), value_dim = static_cast<int>(args.value_dim);
    if (parts != nullptr) {
      const std::int64_t rows = args.batch * args.keys * args.key_heads;
      float* to = parts + (part * rows + row) * (dim + value_dim) + c;
      *reinterpret_cast<float2*>(to) = {first, second};
    } else if (c < dim) {
      *reinterpret_cast<unsigned*>(dk + row * dim + c) = cuda::two_of<T>(first, second);
    } else {
      *reinterpret_cast<unsigned*>(dv + row * value_dim + c - dim) = cuda::two_of<T>(first, second);
    }
  }
};
inline int key_parts(const AttentionArgs& args, int keys) {
  const std::int64_t blocks = blocks_of(args, true, keys) * args.key_heads;
  const std::int64_t group = args.heads / std::max<std::int64_t>(args.key_heads, 1);
  int parts = 1;
  while (blocks * parts < 2 * cuda::kMultiprocessors && group % (2 * parts) == 0) parts *= 2;
  return parts;
}

template <class T>
AttentionInputs<T> inputs_of(const KernelCall& call) {
  return {call.input<T>(0),     call.input<T>(1), call.input<T>(2), call.in[3],
          call.input<float>(4), call.in[5],       call.in[6]};
}

}  // namespace mlxtape::ops
