// gated_delta_rule in chunks: what needs no state, for all chunks at once.
#pragma once

#include "backends/cuda/device/products.cuh"
#include "gated_delta_rule_chunks_tiles.cuh"
#include "mlxtape/core/registry.h"

namespace mlxtape::ops::chunks {

// ---- how a chunk's tokens meet; a block has a chunk of a key head ----

constexpr int kMeetThreads = 256;
constexpr int kPitch = kChunk + 8;  // of f32 [64][64]: a half-warp's pairs in different banks

template <class T>
struct MeetRoom {
  alignas(128) T q[kRows], k[kRows];
  T v[kRows];  // then U₀, in tiles [64][slice]
  T m[kPairs];
  union {
    alignas(16) float below[kChunk * kPitch];  // −diag(β)·N
    T w[kRows];
  };
  union {
    // (I + diag(β)·N)⁻¹, up to its diagonal's blocks of 16; beyond the blocks of 32, what is between two products.
    alignas(16) float solve[kChunk * kPitch];
    T q_hat[kRows];
  };
  Numbers numbers[2];
  float scale[kChunk];  // β·e
  Fades fades;
};

// q and k as the formula has them: a warp has 8 rows of each.
template <class T>
__device__ void trim(const GatedDeltaRuleArgs& args, const T* q, const T* k, const bool* mask,
                     std::int64_t entry, std::int64_t first, std::int64_t key_head, int count,
                     Factors& factors, T* to_q, T* to_k) {
  const int lane = threadIdx.x % cuda::kWarp, warp = threadIdx.x / cuda::kWarp;
  constexpr int kEach = kWidth / cuda::kWarp, kMine = kChunk / (kMeetThreads / cuda::kWarp);
  uint2 bits[2][kMine];
  bool on[kMine];
#pragma unroll
  for (int r = 0; r < kMine; ++r) {
    const int t = warp * kMine + r;
    on[r] = t < count && (mask == nullptr || mask[entry * args.sequence_tokens + first + t]);
  }
#pragma unroll
  for (int which = 0; which < 2; ++which) {
    const auto& strides = which == 0 ? args.q : args.k;
    const T* from =
        (which == 0 ? q : k) + entry * strides[0] + key_head * strides[2] + lane * kEach;
    from += (first + warp * kMine) * strides[1];
    if (reinterpret_cast<std::uintptr_t>(from) % 8 == 0 && strides[1] % 4 == 0) {
#pragma unroll
      for (int r = 0; r < kMine; ++r) {
        bits[which][r] = {0, 0};
        if (on[r]) bits[which][r] = __ldg(reinterpret_cast<const uint2*>(from + r * strides[1]));
      }
    } else {
#pragma unroll
      for (int r = 0; r < kMine; ++r) {
        bits[which][r] = {0, 0};
        const T* row = from + r * strides[1];
        if (!on[r]) continue;
        bits[which][r] = {
            static_cast<unsigned>(row[0].bits) | static_cast<unsigned>(row[1].bits) << 16U,
            static_cast<unsigned>(row[2].bits) | static_cast<unsigned>(row[3].bits) << 16U};
      }
    }
  }
#pragma unroll
  for (int which = 0; which < 2; ++which) {
#pragma unroll
    for (int r = 0; r < kMine; ++r) {
      const int t = warp * kMine + r;
      const float2 low = cuda::both_of<T>(bits[which][r].x),
                   high = cuda::both_of<T>(bits[which][r].y);
      float factor = 1;
      if (args.normalise != 0) {
        const float squares =
            fmaf(low.x, low.x, low.y * low.y) + fmaf(high.x, high.x, high.y * high.y);
        factor = rsqrtf(cuda::lanes_sum<cuda::kWarp>(squares) + args.eps);
      }
      if (!on[r]) factor = 0;
      if (lane == 0) (which == 0 ? factors.q : factors.k)[t] = factor;
      if (which == 0) factor *= args.scale;
      *reinterpret_cast<uint2*>((which == 0 ? to_q : to_k) + place<kWidth>(t, lane * kEach)) = {
          cuda::two_of<T>(low.x * factor, low.y * factor),
          cuda::two_of<T>(high.x * factor, high.y * factor)};
    }
  }
}

// c [16, 64] = rows 16·row on of left·kᵀ, in blocks of 16 up to the diagonal.
template <class T>
__device__ void meet_keys(const Lane& lane, const T* left, const T* k, int row, float (&c)[8][4]) {
  const Tile<kWidth> l(left), r(k);
#pragma unroll
  for (int n = 0; n < 8; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) c[n][i] = 0;
  }
#pragma unroll
  for (int d = 0; d < kWidth; d += 16) {
    unsigned a[4];
    l.a(a, lane, row * 16, d);
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      if (n > row) continue;
      unsigned b[4];
      r.b_turned(b, lane, d, n * 16);
      multiply_add_two<T>(c[2 * n], c[2 * n + 1], a, b);
    }
  }
}

// (I − below)⁻¹: blocks of 16 on the diagonal by substitution, a lane for a column, while the other warps do `other`;
// then blocks of 16 and of 32 below them, B⁻¹·C·A⁻¹ each. Ends with a barrier, behind which this thread's copies are
// seen.
template <class Other>
__device__ __forceinline__ void invert(const float* below, float* solve, const Other& other) {
  const int lane = threadIdx.x % cuda::kWarp, warp = threadIdx.x / cuda::kWarp;
  if (warp < 4) {
    const int at = warp * 16, column = lane % 16;
    float x[16];
#pragma unroll
    for (int r = 0; r < 16; ++r) {
      float sums[4] = {r == column ? 1.0F : 0.0F, 0, 0, 0};
#pragma unroll
      for (int s = 0; s < r; s += 4) {
        const float4 left = *reinterpret_cast<const float4*>(below + (at + r) * kPitch + at + s);
        sums[0] = fmaf(left.x, x[s], sums[0]);
        if (s + 1 < r) sums[1] = fmaf(left.y, x[s + 1], sums[1]);
        if (s + 2 < r) sums[2] = fmaf(left.z, x[s + 2], sums[2]);
        if (s + 3 < r) sums[3] = fmaf(left.w, x[s + 3], sums[3]);
      }
      x[r] = (sums[0] + sums[1]) + (sums[2] + sums[3]);
      if (lane < 16) solve[(at + r) * kPitch + at + column] = x[r];
      if (lane >= 16 && warp % 2 == 0) solve[(at + r) * kPitch + at + 16 + column] = 0;
    }
  } else {
    other();
  }
  __syncthreads();
  float* between = solve + 32;
  const int block = threadIdx.x / 128 * 32, r = threadIdx.x % 128 / 8, c = threadIdx.x % 8 * 2;
  {
    float sum0 = 0, sum1 = 0;
#pragma unroll
    for (int s = 0; s < 16; ++s) {
      const float left = below[(block + 16 + r) * kPitch + block + s];
      const float2 right =
          *reinterpret_cast<const float2*>(solve + (block + s) * kPitch + block + c);
      sum0 = fmaf(left, right.x, sum0);
      sum1 = fmaf(left, right.y, sum1);
    }
    *reinterpret_cast<float2*>(between + (block / 2 + r) * kPitch + c) = {sum0, sum1};
  }
  __syncthreads();
  {
    float sum0 = 0, sum1 = 0;
#pragma unroll
    for (int s = 0; s < 16; ++s) {
      const float left = solve[(block + 16 + r) * kPitch + block + 16 + s];
      const float2 right = *reinterpret_cast<const float2*>(between + (block / 2 + s) * kPitch + c);
      sum0 = fmaf(left, right.x, sum0);
      sum1 = fmaf(left, right.y, sum1);
    }
    *reinterpret_cast<float2*>(solve + (block + 16 + r) * kPitch + block + c) = {sum0, sum1};
  }
  __syncthreads();
  cuda::product(false, {below + 32 * kPitch, kPitch, 1}, {solve, kPitch, 1}, between, kPitch, 32,
                32, 32);
  __syncthreads();
  cuda::product(false, {solve + 32 * kPitch + 32, kPitch, 1}, {between, kPitch, 1},
                solve + 32 * kPitch, kPitch, 32, 32, 32);
  cuda::wait_copies<0>();
  __syncthreads();
}

// c [16, 64] = rows from `tokens` on of solve·diag(scale) times columns of a tile [64][128], the first factor in two
// parts of 16 bits.
template <class T>
__device__ __forceinline__ void apply_solve(const Lane& lane, const float* solve,
                                            const float* scale, const T* tile, int tokens, int col,
                                            float (&c)[8][4]) {
  const Tile<kWidth> right(tile);
#pragma unroll
  for (int n = 0; n < 8; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) c[n][i] = 0;
  }
#pragma unroll 1
  for (int l = 0; l <= tokens; l += 16) {
    unsigned high[4], low[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int t = tokens + lane.g + i % 2 * 8, s = l + 2 * lane.t4 + i / 2 * 8;
      const float2 value = *reinterpret_cast<const float2*>(solve + t * kPitch + s);
      const float2 by = *reinterpret_cast<const float2*>(scale + s);
      split<T>(value.x * by.x, value.y * by.y, high[i], low[i]);
    }
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      unsigned b[4];
      right.b(b, lane, l, col + n * 16);
      multiply_add_two<T>(c[2 * n], c[2 * n + 1], low, b);
      multiply_add_two<T>(c[2 * n], c[2 * n + 1], high, b);
    }
  }
}

template <class T, bool kBack>
__global__ void __launch_bounds__(kMeetThreads, 2)
    meet(GatedDeltaRuleArgs args, const T* q, const T* k, const T* v, const float* decay,
         const float* beta, const bool* mask, Made<T> made) {
  cuda::wait_turn();
  extern __shared__ __align__(128) char memory[];
  auto& room = *reinterpret_cast<MeetRoom<T>*>(memory);
  const auto key_heads = static_cast<unsigned>(args.key_heads);
  const unsigned group = static_cast<unsigned>(args.value_heads) / key_heads;
  const auto per_sequence = static_cast<unsigned>((args.sequence_tokens + kChunk - 1) / kChunk);
  const unsigned key_head = blockIdx.x % key_heads, chunk = blockIdx.x / key_heads;
  const std::int64_t entry = chunk / per_sequence;
  const std::int64_t first = std::int64_t{chunk % per_sequence} * kChunk;
  const std::int64_t start = entry * args.sequence_tokens + first;
  const int count = static_cast<int>(min(std::int64_t{kChunk}, args.sequence_tokens - first));
  const int warp = threadIdx.x / cuda::kWarp;
  const Lane lane;
  const int g = lane.g, t4 = lane.t4;
  const auto there = [&](int t) {
    return t < count && (mask == nullptr || mask[start + t]);
  };
  const auto fetch_values = [&](unsigned head) {
    const T* from = v + entry * args.v[0] + first * args.v[1] + head * args.v[2];
#pragma unroll 1
    for (int i = threadIdx.x; i < kChunk * kWidth / 8; i += kMeetThreads) {
      const int t = i / (kWidth / 8), c = i % (kWidth / 8) * 8;
      const bool on = there(t);
      cuda::copy_later(room.v + place<kWidth>(t, c), from + (on ? t : 0) * args.v[1] + c, on);
    }
    cuda::commit_copies();
  };
  // A thread of the fifth or sixth warp has a token's numbers.
  const int token = static_cast<int>(threadIdx.x) - 128;
  const bool mine = token >= 0 && token < kChunk;
  float next_g = 1, next_beta = 0;
  const auto fetch_numbers = [&](unsigned head) {
    if (!mine) return;
    const bool on = there(token);
    const std::int64_t at = (start + token) * args.value_heads + head;
    next_g = on ? decay[at] : 0;
    next_beta = on ? beta[at] : 0;
    if (args.log_decay == 0 && !on) next_g = 1;
  };
  const auto keep_numbers = [&](Numbers& numbers) {
    if (!mine) return;
    numbers.g[token] = args.log_decay != 0 ? expf(next_g) : next_g;
    numbers.beta[token] = next_beta;
  };

  fetch_values(key_head * group);
  fetch_numbers(key_head * group);
  trim(args, q, k, mask, entry, first, key_head, count, made.factors[blockIdx.x], room.q, room.k);
  keep_numbers(room.numbers[0]);
  publish_shared();
  __syncthreads();
  if (threadIdx.x == 0) {
    bulk_store(made.q + std::int64_t{blockIdx.x} * kRows, room.q, sizeof(room.q));
    bulk_store(made.k + std::int64_t{blockIdx.x} * kRows, room.k, sizeof(room.k));
    commit_stores();
  }
  room.fades.fill(room.numbers[0].g, static_cast<int>(threadIdx.x), kMeetThreads);
  // Rows 16·(warp mod 4) on of K·Kᵀ (the first four warps) and Q·Kᵀ: the same for every value head.
  const int row = warp % 4;
  float met[8][4];
  meet_keys(lane, warp < 4 ? room.k : room.q, room.k, row, met);
  __syncthreads();

  // In W, U₀ and Q̂ a warp has 16 tokens and half of the channels; later tokens have more to do.
  const int half = warp / 4, tokens = (half == 0 ? row : 3 - row) * 16;
  for (unsigned member = 0; member < group; ++member) {
    const unsigned head = key_head * group + member;
    const std::int64_t pair = std::int64_t{chunk} * args.value_heads + head;
    const bool more = member + 1 < group;
    Numbers& numbers = room.numbers[member & 1U];
    Numbers& next = room.numbers[(member & 1U) ^ 1U];
    if (more) fetch_numbers(head + 1);
    if (threadIdx.x < kChunk) {
      const int t = threadIdx.x;
      const float e = room.fades.e(numbers.g, t), f = room.fades.f(t), b = numbers.beta[t];
      numbers.e[t] = e;
      room.scale[t] = e * b;
      Numbers& out = made.numbers[pair];
      out.e[t] = e;
      out.f[t] = f;
      out.beta[t] = b;
      out.g[t] = numbers.g[t];
    }
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      if (n > 2 * row + 1) continue;
      const bool far = n < 2 * row;
      const int s = n * 8 + 2 * t4;
      float2 after = {1, 1};
      if (far) after = *reinterpret_cast<const float2*>(&room.fades.after[row - 1][s]);
#pragma unroll
      for (int i = 0; i < 4; i += 2) {
        const int t = row * 16 + g + i * 4;
        float one, other;
        if (far) {
          one = room.fades.within[t] * after.x;
          other = room.fades.within[t] * after.y;
        } else {
          one = room.fades.near[t][s % 16];
          other = room.fades.near[t][s % 16 + 1];
        }
        one *= met[n][i];
        other *= met[n][i + 1];
        if (warp < 4) {
          const float b = -numbers.beta[t];
          *reinterpret_cast<float2*>(room.below + t * kPitch + s) = {s < t ? b * one : 0,
                                                                     s + 1 < t ? b * other : 0};
        } else {
          *reinterpret_cast<unsigned*>(room.m + place<kChunk>(t, s)) =
              cuda::two_of<T>(s <= t ? one : 0, s + 1 <= t ? other : 0);
        }
      }
    }
    if (more) keep_numbers(next);
    publish_shared();
    __syncthreads();
    if (threadIdx.x == 0) {
      bulk_store(made.m + pair * kPairs, room.m, sizeof(room.m));
      commit_stores();
    }
    invert(room.below, room.solve, [&] {
      if (more) room.fades.fill(next.g, static_cast<int>(threadIdx.x) - 128, 128);
    });

    float c[8][4];
    // W = solve·diag(β·e)·K, where N was.
    apply_solve(lane, room.solve, room.scale, room.k, tokens, half * 64, c);
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      T* to = room.w + place<kWidth>(tokens + g, half * 64 + n * 8 + 2 * t4);
      *reinterpret_cast<unsigned*>(to) = cuda::two_of<T>(c[n][0], c[n][1]);
      *reinterpret_cast<unsigned*>(to + 8 * kWidth) = cuda::two_of<T>(c[n][2], c[n][3]);
    }
    publish_shared();
    // U₀ = solve·diag(β)·V
    apply_solve(lane, room.solve, numbers.beta, room.v, tokens, half * 64, c);
    if constexpr (kBack) {
      for (int i = threadIdx.x; i < kPairs / 8; i += kMeetThreads) {
        const int r = i / 8, s = i % 8 * 8;
        uint4 high, low;
        const auto* from = reinterpret_cast<const float4*>(room.solve + r * kPitch + s);
        const float4 one = from[0], other = from[1];
        split<T>(one.x, one.y, high.x, low.x);
        split<T>(one.z, one.w, high.y, low.y);
        split<T>(other.x, other.y, high.z, low.z);
        split<T>(other.z, other.w, high.w, low.w);
        T* to = made.solve + pair * 2 * kPairs + place<kChunk>(r, s);
        *reinterpret_cast<uint4*>(to) = high;
        *reinterpret_cast<uint4*>(to + kPairs) = low;
      }
    }
    __syncthreads();
    if (threadIdx.x == 0) {
      bulk_store(made.w + pair * kRows, room.w, sizeof(room.w));
      commit_stores();
    }
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      if (made.groups == 2) {
        T* to =
            room.v + (half * 2 + n / 4) * kChunk * 32 + place<32>(tokens + g, n % 4 * 8 + 2 * t4);
        *reinterpret_cast<unsigned*>(to) = cuda::two_of<T>(c[n][0], c[n][1]);
        *reinterpret_cast<unsigned*>(to + 8 * 32) = cuda::two_of<T>(c[n][2], c[n][3]);
      } else {
        T* to = room.v + half * kPairs + place<kChunk>(tokens + g, n * 8 + 2 * t4);
        *reinterpret_cast<unsigned*>(to) = cuda::two_of<T>(c[n][0], c[n][1]);
        *reinterpret_cast<unsigned*>(to + 8 * kChunk) = cuda::two_of<T>(c[n][2], c[n][3]);
      }
    }
    if constexpr (kBack) {
      // Q̂ = e∘Q − M·W, where solve was.
#pragma unroll
      for (int n = 0; n < 8; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) c[n][i] = 0;
      }
      const Tile<kChunk> pairs(room.m);
      const Tile<kWidth> w(room.w);
#pragma unroll 1
      for (int l = 0; l <= tokens; l += 16) {
        unsigned a[4];
        pairs.a(a, lane, tokens, l);
#pragma unroll
        for (int n = 0; n < 4; ++n) {
          unsigned b[4];
          w.b(b, lane, l, half * 64 + n * 16);
          multiply_add_two<T>(c[2 * n], c[2 * n + 1], a, b);
        }
      }
#pragma unroll
      for (int n = 0; n < 8; ++n) {
#pragma unroll
        for (int i = 0; i < 4; i += 2) {
          const int t = tokens + g + i * 4, at = place<kWidth>(t, half * 64 + n * 8 + 2 * t4);
          const float2 query = cuda::both_of<T>(*reinterpret_cast<const unsigned*>(room.q + at));
          *reinterpret_cast<unsigned*>(room.q_hat + at) = cuda::two_of<T>(
              fmaf(numbers.e[t], query.x, -c[n][i]), fmaf(numbers.e[t], query.y, -c[n][i + 1]));
        }
      }
    }
    publish_shared();
    __syncthreads();
    if (threadIdx.x == 0) {
      bulk_store(made.u + pair * kRows, room.v, sizeof(room.v));
      if constexpr (kBack) bulk_store(made.q_hat + pair * kRows, room.q_hat, sizeof(room.q_hat));
      commit_stores();
      if (more) wait_stores_read();
    }
    if (more) {
      __syncthreads();
      fetch_values(head + 1);
    }
  }
  if (threadIdx.x == 0) wait_stores();
}

template <class T, bool kBack>
void launch_meet(const KernelCall& call, const GatedDeltaRuleArgs& args, const Made<T>& made) {
  cuda::launch(meet<T, kBack>, chunks_of(args) * args.key_heads, kMeetThreads,
               static_cast<int>(sizeof(MeetRoom<T>)), 1, static_cast<cudaStream_t>(call.queue),
               args, call.input<T>(0), call.input<T>(1), call.input<T>(2), call.input<float>(3),
               call.input<float>(4), call.input<bool>(5), made);
}

}  // namespace mlxtape::ops::chunks
