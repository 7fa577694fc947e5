// What the kernels of gated_delta_rule in chunks of 64 tokens have in common: how arrays lie, and what is in them. The
// algebra: docs/decisions, on the delta rule.
//
// Arrays between the kernels lie in tiles, one after another: [64 tokens][128], [64][64] or [128][128] of 16 bits,
// each as it will lie in shared memory, so that one bulk copy fetches it. Within a row the pieces of 16 bytes are
// exchanged by the row's last three bits: ldmatrix then finds 8 rows in different banks.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "backends/cuda/device/launch.cuh"
#include "backends/cuda/device/mma16.cuh"
#include "backends/cuda/device/rows.cuh"
#include "backends/cuda/device/vectors.cuh"
#include "gated_delta_rule_args.h"
#include "mlxtape/base/checked.h"

namespace mlxtape::ops::chunks {

constexpr int kWidth = 128;  // of keys and values
constexpr int kChunk = 64;
constexpr int kRows = kChunk * kWidth;   // elements of a tile [64][128]
constexpr int kPairs = kChunk * kChunk;  // [64][64]
constexpr int kState = kWidth * kWidth;  // [128][128]

// Element (r, c) of a tile of rows of kCols. Two rows of 32 share what others have alone.
template <int kCols>
__device__ __forceinline__ int place(int r, int c) {
  const int with = kCols == 32 ? r >> 1 & 3 : r & 7;
  return r * kCols + (((c >> 3) ^ with) << 3) + (c & 7);
}

// ---- fragments ----

// v = high + low, both of 16 bits.
template <class T>
__device__ __forceinline__ void split(float first, float second, unsigned& high, unsigned& low) {
  high = cuda::two_of<T>(first, second);
  const float2 kept = cuda::both_of<T>(high);
  low = cuda::two_of<T>(first - kept.x, second - kept.y);
}

// Where a lane's rows of ldmatrix are: straight for load_a and load_b, crossed where they are turned (mma16.cuh).
struct Lane {
  unsigned straight_row, straight_piece, crossed_row, crossed_piece;
  int g, t4;
  __device__ Lane() {
    const unsigned lane = threadIdx.x % cuda::kWarp;
    straight_row = lane % 16;
    straight_piece = ((lane / 16) ^ (lane % 8)) * 16;
    crossed_row = lane % 8 + lane / 16 * 8;
    crossed_piece = ((lane / 8 % 2) ^ (lane % 8)) * 16;
    g = static_cast<int>(lane / 4);
    t4 = static_cast<int>(lane % 4);
  }
  // Addresses made before are not kept for later, where registers are short.
  __device__ void forget() {
    asm volatile(""
                 : "+r"(straight_piece), "+r"(crossed_piece), "+r"(straight_row), "+r"(crossed_row),
                   "+r"(g), "+r"(t4));
  }
};

// A tile in shared memory as a factor. a: [16 rows, 16] from (row, column) on; b: two [16, 8] side by side, from rows
// of the depth; turned: the tile is the other way round.
template <int kCols>
struct Tile {
  unsigned base;
  __device__ explicit Tile(const void* at) : base(cuda::shared_address(at)) {}
  __device__ unsigned straight(const Lane& lane, int row, int col) const {
    return base + (static_cast<unsigned>(row) + lane.straight_row) * (kCols * 2) +
           ((static_cast<unsigned>(col) * 2) ^ lane.straight_piece);
  }
  __device__ unsigned crossed(const Lane& lane, int row, int col) const {
    if constexpr (kCols == 32) {
      const unsigned at = threadIdx.x % cuda::kWarp;
      return base + (static_cast<unsigned>(row) + lane.crossed_row) * (kCols * 2) +
             ((static_cast<unsigned>(col) * 2) ^ (((at / 8 % 2) ^ (at / 2 % 4)) * 16));
    }
    return base + (static_cast<unsigned>(row) + lane.crossed_row) * (kCols * 2) +
           ((static_cast<unsigned>(col) * 2) ^ lane.crossed_piece);
  }
  __device__ void a(unsigned (&r)[4], const Lane& lane, int m, int k) const {
    cuda::load_matrices_at(r, straight(lane, m, k));
  }
  __device__ void a_turned(unsigned (&r)[4], const Lane& lane, int m, int k) const {
    cuda::load_turned_at(r, crossed(lane, k, m));
  }
  __device__ void b(unsigned (&r)[4], const Lane& lane, int k, int n) const {
    cuda::load_turned_at(r, straight(lane, k, n));
  }
  __device__ void b_turned(unsigned (&r)[4], const Lane& lane, int k, int n) const {
    cuda::load_matrices_at(r, crossed(lane, n, k));
  }
};

template <class T>
__device__ __forceinline__ void multiply_add_two(float (&c0)[4], float (&c1)[4],
                                                 const unsigned (&a)[4], const unsigned (&b)[4]) {
  cuda::multiply_add16<T>(c0, a, b[0], b[1]);
  cuda::multiply_add16<T>(c1, a, b[2], b[3]);
}

// Shared memory to device memory, by the copy engine; this thread waits for it.
__device__ __forceinline__ void bulk_store(void* to, const void* from, unsigned bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to),
               "r"(cuda::shared_address(from)), "r"(bytes)
               : "memory");
}
__device__ __forceinline__ void commit_stores() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
__device__ __forceinline__ void wait_stores_read() {
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}
__device__ __forceinline__ void wait_stores() {
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}
// What this thread wrote to shared memory is seen by the copy engine.
__device__ __forceinline__ void publish_shared() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// ---- what is made ----

struct Numbers {
  float e[kChunk], f[kChunk], beta[kChunk], g[kChunk];  // e_t, A_Ct, β_t, g_t
};
struct Factors {
  float q[kChunk], k[kChunk];  // what a row was multiplied with to normalise it
};

inline std::int64_t chunks_of(const GatedDeltaRuleArgs& args) {
  return args.sequences * ceil_div(args.sequence_tokens, kChunk);
}

template <class T>
struct Made {
  Numbers* numbers;  // [chunks, heads]
  Factors* factors;  // [chunks, key heads]
  T *q, *k;          // [chunks, key heads] tiles [64][128], as the formula has them
  T* w;              // [chunks, heads] tiles [64][128]
  T* u;  // [chunks, heads]: U₀, tiles [64][slice]; the walk that keeps leaves Uᵀ in its place, [128][64]
  T* m;  // [chunks, heads] tiles [64][64]
  // Of the gradient alone.
  T* q_hat;              // tiles [64][128]
  T* solve;              // tiles [64][64], two for each: what is left after rounding is the second
  T *states, *d_states;  // tiles [128 values][128 keys]: before, and the gradient behind each chunk

  static std::size_t bytes(const GatedDeltaRuleArgs& args, bool back) {
    Made made(args, nullptr, back);
    return made.end;
  }
  Made(const GatedDeltaRuleArgs& args, void* memory, bool back) {
    const std::int64_t pairs = chunks_of(args) * args.value_heads;
    const std::int64_t key_pairs = chunks_of(args) * args.key_heads;
    const auto base = reinterpret_cast<std::uintptr_t>(memory);
    std::uintptr_t at = base;
    const auto take = [&]<class U>(U*& to, std::int64_t count) {
      to = reinterpret_cast<U*>(at);
      at += (static_cast<std::uintptr_t>(count) * sizeof(U) + 255) / 256 * 256;
    };
    take(numbers, pairs);
    take(factors, key_pairs);
    take(q, key_pairs * kRows);
    take(k, key_pairs * kRows);
    take(w, pairs * kRows);
    take(u, pairs * kRows);
    take(m, pairs * kPairs);
    take(q_hat, back ? pairs * kRows : 0);
    take(solve, back ? pairs * 2 * kPairs : 0);
    take(states, back ? pairs * kState : 0);
    take(d_states, back ? pairs * kState : 0);
    end = at - base;
    // A walk's block takes the more channels, the less must be fetched: half as many where that leaves
    // multiprocessors idle.
    groups = args.sequences * args.value_heads * 2 <= cuda::kMultiprocessors / 2 ? 2 : 4;
  }
  std::size_t end;
  int groups;  // of 16 value channels, in a block of a walk
};

// A_ti = g_{i+1}···g_t, i ≤ t, in factors: within 16 tokens as it is, else as within(t)·after(block before t's, i).
struct Fades {
  float after[4][kChunk];  // [b][i]: from behind i to the end of the b-th 16 tokens
  float within[kChunk];    // from the beginning of its 16 tokens to t
  float near[kChunk][17];  // [t][i mod 16]

  // By threads that count from 0.
  __device__ void fill(const float* g, int thread, int threads) {
    for (int at = thread; at < 4 * kChunk; at += threads) {
      const int i = at % kChunk, b = 3 - at / kChunk;
      if (b >= i / 16) {
        float even = 1, odd = 1;
        const int end = b * 16 + 16;
        int t = i + 1;
#pragma unroll 4
        for (; t + 1 < end; t += 2) {
          even *= g[t];
          odd *= g[t + 1];
        }
        if (t < end) even *= g[t];
        after[b][i] = even * odd;
      }
      if (b == 0) {
        float a = 1;
        near[i][i % 16] = 1;
        for (int t = i + 1; t < (i / 16 + 1) * 16; ++t) {
          a *= g[t];
          near[t][i % 16] = a;
        }
      } else if (b == 1) {
        float a = 1;
        for (int t = i / 16 * 16; t <= i; ++t) a *= g[t];
        within[i] = a;
      }
    }
  }
  __device__ float e(const float* g, int t) const {
    return t < 16 ? within[t] : within[t] * after[t / 16 - 1][0] * g[0];
  }
  __device__ float f(int i) const { return after[3][i]; }
};

}  // namespace mlxtape::ops::chunks
