// Of the general CUDA kernels of gated_delta_rule: sizes, and what a block works on.
#pragma once

#include <cstdint>

#include "backends/cuda/device/vectors.cuh"
#include "gated_delta_rule_args.h"

namespace mlxtape::ops::heads {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / cuda::kWarp;
constexpr int kChunk = 16;
constexpr int kSegment = 8;  // chunks between the states that a walk back keeps
constexpr int kTokens = kSegment * kChunk;

// ---- sizes ----

struct Sizes {
  int dk, nk, pk;  // key channels; in whole units; from row to row of [tokens, Dk]
  int nv, pv;  // value channels of a slice, a whole number of units; from row to row of […, slice]
  int slices;

  __host__ __device__ explicit Sizes(const GatedDeltaRuleArgs& args) {
    dk = static_cast<int>(args.key_dim);
    nk = (dk + 15) / 16 * 16;
    // 4 past a multiple of 8 (rows of a first factor) and 8 past one of 32 (of a second) keep the lanes of a load
    // in different banks.
    pk = nk + 4;
    const int dv = static_cast<int>(args.value_dim);
    const int most = nk > 192   ? 16
                     : nk > 128 ? 32
                                : 64;  // what shared memory has room for, going back
    slices = (dv + most - 1) / most;
    nv = dv < most ? (dv + 15) / 16 * 16 : most;
    pv = nv + 8;
  }
  __host__ __device__ int keys() const { return kChunk * pk; }
  __host__ __device__ int values() const { return kChunk * pv; }
  __host__ __device__ int by_key() const { return nk * pv; }    // a slice of the state, [Dk, slice]
  __host__ __device__ int by_value() const { return nv * pk; }  // and [slice, Dk]
};

constexpr int kPair = kChunk + 4;  // from row to row of [tokens, tokens]

// ---- the block's place ----

template <class T>
struct Inputs {
  const T *q, *k, *v;
  const float *decay, *beta;
  const bool* mask;
  const void* starts;
  const float* initial;
};

template <class T>
struct Head {
  const GatedDeltaRuleArgs& args;
  const Inputs<T>& in;
  std::int64_t sequence, head, key_head, first, count;
  int slice, from, width;  // its value channels

  __device__ Head(const GatedDeltaRuleArgs& a, const Inputs<T>& inputs, const Sizes& size,
                  unsigned block)
      : args(a), in(inputs) {
    // In 32 bits: a division in 64 is a call, around which registers run short.
    const auto slices = static_cast<unsigned>(size.slices),
               heads = static_cast<unsigned>(args.value_heads);
    slice = static_cast<int>(block % slices);
    head = block / slices % heads;
    sequence = block / slices / heads;
    key_head = static_cast<unsigned>(head) / (heads / static_cast<unsigned>(args.key_heads));
    from = slice * size.nv;
    width = min(size.nv, static_cast<int>(args.value_dim) - from);
    if (args.start_bytes == 0) {
      first = sequence * args.sequence_tokens;
      count = args.sequence_tokens;
    } else {
      first = start(sequence);
      count = start(sequence + 1) - first;
    }
  }
  // Where packed sequences begin, whatever stands there: never falling, from 0 to the last token.
  __device__ std::int64_t start(std::int64_t s) const {
    if (s == args.sequences) return args.tokens;
    std::int64_t most = 0;
    for (std::int64_t i = 1; i <= s; ++i) {
      const std::int64_t given = args.start_bytes == 4
                                     ? static_cast<const std::int32_t*>(in.starts)[i]
                                     : static_cast<const std::int64_t*>(in.starts)[i];
      most = max(most, min(given, args.tokens));
    }
    return most;
  }
  __device__ const T* row(const T* base, const std::int64_t (&strides)[3], std::int64_t t,
                          std::int64_t h) const {
    return args.start_bytes == 0 ? base + sequence * strides[0] + t * strides[1] + h * strides[2]
                                 : base + (first + t) * strides[1] + h * strides[2];
  }
  __device__ bool off(std::int64_t t) const { return in.mask != nullptr && !in.mask[first + t]; }
  __device__ bool there(std::int64_t t) const { return t < count && !off(t); }
  __device__ std::int64_t by_head(std::int64_t t) const {
    return (first + t) * args.value_heads + head;
  }
  __device__ std::int64_t state() const {
    return ((sequence * args.value_heads + head) * args.value_dim + from) * args.key_dim;
  }
};

}  // namespace mlxtape::ops::heads
