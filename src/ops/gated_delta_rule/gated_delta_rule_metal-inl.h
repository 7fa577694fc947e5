// What the Metal kernels of gated_delta_rule share: where things lie, a chunk, and the walk through them. Forward it is all
// there is; back it makes again what the gradients are made from.
#pragma once

#include "gated_delta_rule_args.h"

// One launch of a walk.
struct DeltaWalk {
  int64_t first_pair;  // of the groups': sequence · value heads + head
  int64_t segment;     // of 128 tokens
  int64_t segments;    // whose states are kept of a pair
  int64_t slices;      // groups that a pair's values are cut into
};

#ifdef __METAL_VERSION__

#include "backends/metal/device/exp.h"
#include "backends/metal/device/fragments.h"

constant bool has_mask [[function_constant(0)]];
constant bool has_initial [[function_constant(1)]];
constant bool has_final [[function_constant(2)]];  // wanted, or back: given
constant bool has_dy [[function_constant(3)]];
constant bool fours [[function_constant(4)]];  // rows of a state are whole packs

enum { kDeltaSegment = 128, kDeltaSquare = 20 };  // tokens; from row to row of [tokens, tokens]
enum { kDeltaForward, kDeltaScan, kDeltaAgain };  // what a walk is for

// ---- where things lie ----

struct DeltaHead {
  long pair, sequence, head, key_head;
  long first, count;  // tokens, among all
};
// Where packed sequences begin, whatever stands there: never falling, from 0 to the last token.
inline long delta_start(constant GatedDeltaRuleArgs& args, device const uchar* starts, long s) {
  if (s == args.sequences) return args.tokens;
  long most = 0;
  for (long i = 1; i <= s; ++i) {
    const long given = args.start_bytes == 4 ? long(((device const int*)starts)[i])
                                             : ((device const long*)starts)[i];
    most = max(most, min(given, long(args.tokens)));
  }
  return most;
}
inline DeltaHead delta_head(constant GatedDeltaRuleArgs& args, device const uchar* starts,
                            long pair) {
  DeltaHead h;
  h.pair = pair;
  h.sequence = pair / args.value_heads;
  h.head = pair % args.value_heads;
  h.key_head = h.head / (args.value_heads / args.key_heads);
  if (args.start_bytes == 0) {
    h.first = h.sequence * args.sequence_tokens;
    h.count = args.sequence_tokens;
  } else {
    h.first = delta_start(args, starts, h.sequence);
    h.count = delta_start(args, starts, h.sequence + 1) - h.first;
  }
  return h;
}
inline long delta_row(constant GatedDeltaRuleArgs& args, DeltaHead h, constant int64_t* strides,
                      long t, long head) {
  return args.start_bytes == 0 ? h.sequence * strides[0] + t * strides[1] + head * strides[2]
                               : (h.first + t) * strides[1] + head * strides[2];
}
// Place of token t in what has one number for each token and value head.
inline long delta_by_head(constant GatedDeltaRuleArgs& args, DeltaHead h, long t) {
  return (h.first + t) * args.value_heads + h.head;
}
inline bool delta_off(device const uchar* mask, DeltaHead h, long t) {
  return has_mask && mask[h.first + t] == 0;
}
inline bool delta_there(device const uchar* mask, DeltaHead h, long t) {
  return t < h.count && !delta_off(mask, h, t);
}
inline long delta_segments(DeltaHead h) { return (h.count + kDeltaSegment - 1) / kDeltaSegment; }
inline uint in_eights(long n) { return (uint(n) + 7) / 8 * 8; }

template <typename T>
struct DeltaInputs {
  device const T *q, *k;
  device const float *decay, *beta;
  device const uchar* mask;
};

// The decay of channel j of what stands at `at` by token and value head.
template <typename T>
inline float delta_decay(constant GatedDeltaRuleArgs& args, DeltaInputs<T> in, long at, uint j) {
  const float v = args.per_channel != 0 ? in.decay[at * args.key_dim + j] : in.decay[at];
  return args.log_decay != 0 ? precise::exp(v) : v;
}

// ---- a chunk, by the whole group ----

// In threadgroup memory. First [tokens, Dk]: q, k as the formula has them, g; 0, 0, 1 where there is no token; then e∘q, e∘k
// and A_Ct∘k_t behind the last token in their places.
struct DeltaChunk {
  threadgroup float *q, *k, *g;
  threadgroup float *m, *n, *inverse;  // [tokens, tokens]; of I + N·diag(β)
  threadgroup float* last;             // [Dk]: e of the last token
  threadgroup float* beta;
};
struct DeltaThread {
  uint index, lane, simd, simds;
};

template <typename T, int kWidth>
inline void delta_load(constant GatedDeltaRuleArgs& args, DeltaInputs<T> in, DeltaHead h, long t0,
                       DeltaChunk c, DeltaThread at) {
  constexpr uint kChunk = kWidth > 128 ? 8 : 16, kPitch = kWidth + 4;
  const uint dk = uint(args.key_dim), nk = in_eights(args.key_dim);
  for (uint i = at.simd; i < kChunk; i += at.simds) {
    const bool there = delta_there(in.mask, h, t0 + i);
    const long by_head = there ? delta_by_head(args, h, t0 + i) : 0;
    device const T* q = in.q + (there ? delta_row(args, h, args.q, t0 + i, h.key_head) : 0);
    device const T* k = in.k + (there ? delta_row(args, h, args.k, t0 + i, h.key_head) : 0);
    float vq[kWidth / 32], vk[kWidth / 32];
    float qq = 0, kk = 0;
    for (uint l = 0; l < kWidth / 32; ++l) {
      const uint j = at.lane + 32 * l;
      const bool real = there && j < dk;
      vq[l] = real ? widen(q[j]) : 0.0f;
      vk[l] = real ? widen(k[j]) : 0.0f;
      qq = fma(vq[l], vq[l], qq);
      kk = fma(vk[l], vk[l], kk);
      if (j < nk) c.g[i * kPitch + j] = real ? delta_decay(args, in, by_head, j) : 1.0f;
    }
    float fq = args.scale, fk = 1;
    if (args.normalise != 0) {
      qq = simd_sum(qq);
      kk = simd_sum(kk);
      fq = there ? fq / sqrt(qq + args.eps) : 0.0f;
      fk = there ? fk / sqrt(kk + args.eps) : 0.0f;
    }
    for (uint l = 0; l < kWidth / 32; ++l) {
      const uint j = at.lane + 32 * l;
      if (j >= nk) continue;
      c.q[i * kPitch + j] = vq[l] * fq;
      c.k[i * kPitch + j] = vk[l] * fk;
    }
    if (at.lane == 0) c.beta[i] = there ? in.beta[by_head] : 0.0f;
  }
}

// M and N where a token has one decay: products, and the decays between two tokens behind them.
template <int kWidth>
inline void delta_meet(uint nk, DeltaChunk c, DeltaThread at) {
  constexpr uint kBlocks = kWidth > 128 ? 1 : 2, kPitch = kWidth + 4;
  const uint row = fragment_row(at.lane), column = fragment_column(at.lane);
  simdgroup_float8x8 a, b, sums;
  for (uint part = at.simd; part < 2 * kBlocks * kBlocks; part += at.simds) {
    const bool of_keys = part % 2 == 1;
    const uint t0 = part / 2 / kBlocks * 8, i0 = part / 2 % kBlocks * 8;
    threadgroup const float* left = (of_keys ? c.k : c.q) + t0 * kPitch;
    set_fragment(sums, 0, 0);
    for (uint j = 0; j < nk && i0 <= t0; j += 8) {
      simdgroup_load(a, left + j, ulong(kPitch));
      simdgroup_load(b, (threadgroup const float*)c.k + i0 * kPitch + j, ulong(kPitch),
                     ulong2(0, 0), true);
      simdgroup_multiply_accumulate(sums, a, b, sums);
    }
    const float2 made = fragment_pair(sums);
    const uint t = t0 + row;
    for (uint e = 0; e < 2; ++e) {
      const uint i = i0 + column + e;
      float fade = 1;
      for (uint s = t; s > i; --s) fade *= c.g[s * kPitch];
      (of_keys ? c.n : c.m)[t * kDeltaSquare + i] =
          i < t || (i == t && !of_keys) ? made[e] * fade : 0.0f;
    }
  }
}

// M and N where each channel has its own: a simdgroup follows a key from its token on as it fades.
template <int kWidth>
inline void delta_meet_by_channel(uint nk, DeltaChunk c, DeltaThread at) {
  constexpr uint kChunk = kWidth > 128 ? 8 : 16, kPitch = kWidth + 4;
  for (uint i = at.simd; i < kChunk; i += at.simds) {
    float key[kWidth / 32];
    for (uint l = 0; l < kWidth / 32; ++l) {
      const uint j = at.lane + 32 * l;
      key[l] = j < nk ? c.k[i * kPitch + j] : 0.0f;
    }
    for (uint t = 0; t < kChunk; ++t) {
      float with_q = 0, with_k = 0;
      if (t >= i) {
        for (uint l = 0; l < kWidth / 32; ++l) {
          const uint j = at.lane + 32 * l;
          if (j >= nk) continue;
          if (t > i) key[l] *= c.g[t * kPitch + j];
          with_q = fma(c.q[t * kPitch + j], key[l], with_q);
          with_k = fma(c.k[t * kPitch + j], key[l], with_k);
        }
      }
      with_q = simd_sum(with_q);
      with_k = simd_sum(with_k);
      if (at.lane == 0) {
        c.m[t * kDeltaSquare + i] = with_q;
        c.n[t * kDeltaSquare + i] = t > i ? with_k : 0.0f;
      }
    }
  }
}

// Tokens from t0 on: all of the chunk.
template <typename T, int kWidth>
inline void delta_open(constant GatedDeltaRuleArgs& args, DeltaInputs<T> in, DeltaHead h, long t0,
                       DeltaChunk c, DeltaThread at) {
  constexpr uint kChunk = kWidth > 128 ? 8 : 16, kPitch = kWidth + 4;
  const uint nk = in_eights(args.key_dim);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  delta_load<T, kWidth>(args, in, h, t0, c, at);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (args.per_channel != 0) {
    delta_meet_by_channel<kWidth>(nk, c, at);
  } else {
    delta_meet<kWidth>(nk, c, at);
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (at.index < kChunk) {  // a thread has a column of the inverse
    float made[kChunk];
    for (uint t = 0; t < kChunk; ++t) {
      float v = t == at.index ? 1.0f : 0.0f;
      for (uint i = 0; i < t; ++i) v = fma(-c.n[t * kDeltaSquare + i], made[i], v);
      c.inverse[t * kDeltaSquare + at.index] = v;
      made[t] = v * c.beta[t];
    }
  }
  for (uint j = at.index; j < nk; j += at.simds * 32) {
    float keys[kChunk];
    float e = 1;
    for (uint i = 0; i < kChunk; ++i) {
      e *= c.g[i * kPitch + j];
      keys[i] = c.k[i * kPitch + j];
      c.q[i * kPitch + j] *= e;
      c.k[i * kPitch + j] = keys[i] * e;
    }
    c.last[j] = e;
    float behind = 1;
    for (uint i = kChunk; i-- > 0;) {
      const float g = c.g[i * kPitch + j];
      c.g[i * kPitch + j] = behind * keys[i];
      behind *= g;
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
}

// sums[b] += Σ_a square[b, a]·x[a], of the lower or, turned around, the upper triangle's blocks.
template <int kBlocks>
inline void delta_lower(threadgroup const float* square, thread simdgroup_float8x8* x,
                        thread simdgroup_float8x8* sums) {
  simdgroup_float8x8 a;
  for (int b = 0; b < kBlocks; ++b) {
    for (int i = 0; i <= b; ++i) {
      simdgroup_load(a, square + 8 * b * kDeltaSquare + 8 * i, ulong(kDeltaSquare));
      simdgroup_multiply_accumulate(sums[b], a, x[i], sums[b]);
    }
  }
}
template <int kBlocks>
inline void delta_upper(threadgroup const float* square, thread simdgroup_float8x8* x,
                        thread simdgroup_float8x8* sums) {
  simdgroup_float8x8 a;
  for (int b = 0; b < kBlocks; ++b) {
    for (int t = b; t < kBlocks; ++t) {
      simdgroup_load(a, square + 8 * t * kDeltaSquare + 8 * b, ulong(kDeltaSquare), ulong2(0, 0),
                     true);
      simdgroup_multiply_accumulate(sums[b], a, x[t], sums[b]);
    }
  }
}

#define DELTA_PLACE                                                                           \
  constant uint &first_group [[buffer(30)]], uint group [[threadgroup_position_in_grid]],     \
      uint index [[thread_position_in_threadgroup]], uint lane [[thread_index_in_simdgroup]], \
      uint simd [[simdgroup_index_in_threadgroup]], uint simds [[simdgroups_per_threadgroup]]

#define DELTA_ROOM                                                                             \
  constexpr uint kChunk = kWidth > 128 ? 8 : 16, kPitch = kWidth + 4;                          \
  constexpr int kBlocks = kChunk / 8, kParts = kWidth / 8;                                     \
  threadgroup float room_q[kChunk * kPitch], room_k[kChunk * kPitch], room_g[kChunk * kPitch]; \
  threadgroup float room_m[kChunk * kDeltaSquare], room_n[kChunk * kDeltaSquare];              \
  threadgroup float room_inverse[kChunk * kDeltaSquare], room_last[kWidth], room_beta[kChunk]; \
  DeltaChunk c;                                                                                \
  c.q = room_q;                                                                                \
  c.k = room_k;                                                                                \
  c.g = room_g;                                                                                \
  c.m = room_m;                                                                                \
  c.n = room_n;                                                                                \
  c.inverse = room_inverse;                                                                    \
  c.last = room_last;                                                                          \
  c.beta = room_beta;                                                                          \
  DeltaInputs<T> in;                                                                           \
  in.q = q;                                                                                    \
  in.k = k;                                                                                    \
  in.decay = decay;                                                                            \
  in.beta = beta;                                                                              \
  in.mask = mask;                                                                              \
  DeltaThread at;                                                                              \
  at.index = index;                                                                            \
  at.lane = lane;                                                                              \
  at.simd = simd;                                                                              \
  at.simds = simds

// ---- the walk ----

// states: [pairs, segments, Dk, Dv], before every 128 tokens; rows: [pairs, chunks of 128 tokens, Dk, Dv], before each chunk;
// rest: [pairs, 128 tokens, Dv], R. Dk and Dv in whole eights.
template <typename T, int kWidth, int kFor>
[[kernel, max_total_threads_per_threadgroup(256)]] void gated_delta_rule_walk(
    device const T* q [[buffer(0)]], device const T* k [[buffer(1)]],
    device const T* v [[buffer(2)]], device const float* decay [[buffer(3)]],
    device const float* beta [[buffer(4)]], device const uchar* mask [[buffer(5)]],
    device const uchar* starts [[buffer(6)]], device const float* initial [[buffer(7)]],
    device T* y [[buffer(8)]], device float* final_state [[buffer(9)]],
    device float* states [[buffer(10)]], device float* rows [[buffer(11)]],
    device float* rest [[buffer(12)]], constant GatedDeltaRuleArgs& args [[buffer(13)]],
    constant DeltaWalk& walk [[buffer(14)]], DELTA_PLACE) {
  DELTA_ROOM;
  const uint whole = group + first_group;
  const long number = whole / uint(walk.slices);
  const DeltaHead h = delta_head(args, starts, walk.first_pair + number);
  const uint dk = uint(args.key_dim), nk = in_eights(dk);
  const uint dv = uint(args.value_dim), nv = in_eights(dv);
  const uint row = fragment_row(lane), column = fragment_column(lane);
  const uint start = (whole % uint(walk.slices) * simds + simd) * 8;  // of this simdgroup's values
  const bool has = start < nv;
  device float* kept = states + number * walk.segments * nk * nv;

  simdgroup_float8x8 state[kParts], left, w[kBlocks], r[kBlocks], u[kBlocks];
  for (int f = 0; f < kParts; ++f) {
    float part[2] = {0, 0};
    for (uint e = 0; e < 2; ++e) {
      const uint j = 8 * uint(f) + row, i = start + column + e;
      if (kFor == kDeltaAgain) {
        if (j < nk && has) part[e] = kept[walk.segment * nk * nv + j * nv + i];
      } else if (has_initial && j < dk && i < dv) {
        part[e] = initial[(h.pair * dv + i) * dk + j];
      }
    }
    set_fragment(state[f], part[0], part[1]);
  }
  const long from = kFor == kDeltaAgain ? walk.segment * kDeltaSegment : 0;
  const long last = (delta_segments(h) - 1) * kDeltaSegment;  // of the segments, where it begins
  const long to = kFor == kDeltaForward ? h.count
                  : kFor == kDeltaScan  ? last + 1
                                        : min(h.count, from + kDeltaSegment);
  for (long t0 = from; t0 < to; t0 += kChunk) {
    if (kFor == kDeltaScan && t0 % kDeltaSegment == 0 && has) {
      for (int f = 0; f < kParts; ++f) {
        if (uint(f) * 8 >= nk) break;
        simdgroup_store(state[f], kept + (t0 / kDeltaSegment * nk + uint(f) * 8) * nv + start,
                        ulong(nv));
      }
    }
    if (kFor == kDeltaScan && t0 == last) break;
    if (kFor == kDeltaAgain && has) {
      device float* to_rows =
          rows + (number * (kDeltaSegment / kChunk) + (t0 - from) / kChunk) * nk * nv + start;
      for (int f = 0; f < kParts; ++f) {
        if (uint(f) * 8 >= nk) break;
        simdgroup_store(state[f], to_rows + uint(f) * 8 * nv, ulong(nv));
      }
    }
    delta_open<T, kWidth>(args, in, h, t0, c, at);
    if (!has) continue;
    for (int b = 0; b < kBlocks; ++b) {  // W, R and U
      const long t = t0 + 8 * b + row;
      set_fragment(w[b], 0, 0);
      for (int f = 0; f < kParts; ++f) {
        if (uint(f) * 8 >= nk) break;
        simdgroup_load(left, (threadgroup const float*)c.k + 8 * (uint(b) * kPitch + uint(f)),
                       ulong(kPitch));
        simdgroup_multiply_accumulate(w[b], left, state[f], w[b]);
      }
      const float2 said = fragment_pair(w[b]);
      float part[2] = {0, 0};
      const bool there = delta_there(mask, h, t);
      const long place = there ? delta_row(args, h, args.v, t, h.head) : 0;
      for (uint e = 0; e < 2; ++e) {
        const uint i = start + column + e;
        part[e] = (there && i < dv ? widen(v[place + i]) : 0.0f) - said[e];
      }
      set_fragment(w[b], part[0], part[1]);
      set_fragment(r[b], 0, 0);
    }
    delta_lower<kBlocks>(c.inverse, w, r);
    for (int b = 0; b < kBlocks; ++b) {
      const float2 made = fragment_pair(r[b]);
      const float by = c.beta[8 * uint(b) + row];
      set_fragment(u[b], by * made[0], by * made[1]);
      if (kFor == kDeltaAgain) {
        simdgroup_store(r[b],
                        rest + (number * kDeltaSegment + t0 - from + 8 * b) * long(nv) + start,
                        ulong(nv));
      }
    }
    if (kFor == kDeltaForward) {
      for (int b = 0; b < kBlocks; ++b) {
        set_fragment(w[b], 0, 0);
        for (int f = 0; f < kParts; ++f) {
          if (uint(f) * 8 >= nk) break;
          simdgroup_load(left, (threadgroup const float*)c.q + 8 * (uint(b) * kPitch + uint(f)),
                         ulong(kPitch));
          simdgroup_multiply_accumulate(w[b], left, state[f], w[b]);
        }
      }
      delta_lower<kBlocks>(c.m, u, w);
      for (int b = 0; b < kBlocks; ++b) {
        const long t = t0 + 8 * b + row;
        const float2 made = fragment_pair(w[b]);
        for (uint e = 0; e < 2; ++e) {
          const uint i = start + column + e;
          if (t < h.count && i < dv) y[delta_by_head(args, h, t) * dv + i] = narrow<T>(made[e]);
        }
      }
    }
    for (int f = 0; f < kParts; ++f) {
      if (uint(f) * 8 >= nk) break;
      const float fade = c.last[8 * uint(f) + row];
      scale_fragment(state[f], fade, fade);
      for (int b = 0; b < kBlocks; ++b) {
        simdgroup_load(left, (threadgroup const float*)c.g + 8 * (uint(b) * kPitch + uint(f)),
                       ulong(kPitch), ulong2(0, 0), true);
        simdgroup_multiply_accumulate(state[f], left, u[b], state[f]);
      }
    }
  }
  if (kFor == kDeltaForward && has_final) {
    for (int f = 0; f < kParts; ++f) {
      const float2 made = fragment_pair(state[f]);
      for (uint e = 0; e < 2; ++e) {
        const uint j = 8 * uint(f) + row, i = start + column + e;
        if (j < dk && i < dv) final_state[(h.pair * dv + i) * dk + j] = made[e];
      }
    }
  }
}

#else

#include <algorithm>

#include "backends/metal/launch.h"

namespace mlxtape::ops::delta {

struct Sizes {
  std::int64_t dk, dv, nk, nv;  // channels, and in whole eights
  std::int64_t chunk;           // tokens
  std::int64_t simds, slices;   // of a group, and groups of a head
  int width;                    // 0, 1, 2: up to 64, 128, 256

  Sizes(const GatedDeltaRuleArgs& args, std::int64_t most_simds)
      : dk(args.key_dim), dv(args.value_dim), nk(ceil_div(dk, 8) * 8), nv(ceil_div(dv, 8) * 8) {
    const std::int64_t widest = std::max(dk, dv);
    width = widest <= 64 ? 0 : widest <= 128 ? 1 : 2;
    chunk = width == 2 ? 8 : 16;
    simds = std::min(most_simds, nv / 8);
    slices = ceil_div(nv / 8, simds);
  }
};

// Where a launch of so many tokens of value heads meets their states `products` times: with what goes with it.
inline double operations_of(const Sizes& size, std::int64_t tokens, double products) {
  return static_cast<double>(tokens) * 2.5 * products * static_cast<double>(size.nk * size.nv);
}

// gated_delta_rule_back.metal
void register_back(KernelRegistry& registry);

}  // namespace mlxtape::ops::delta

#endif
