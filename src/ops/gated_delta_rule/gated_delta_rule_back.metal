// Metal kernels of gated_delta_rule, backward (formula: mlxtape/ops/gated_delta_rule.h; the chunks: gated_delta_rule.cpu.cpp).
//
// One walk keeps the state before every 128 tokens. Then, from the last 128 tokens on, four kernels: the walk again, which
// keeps the state before each chunk and R; the walk back, which keeps the gradient behind each chunk and dR; all that queries,
// keys and decays owe to a chunk, by a group for each chunk and value head, since sums over the values are no walk; and
// the sums over value heads that share a key head. With the inverse that forward uses,
//   ρ = (I + N·diag(β))⁻ᵀ·(β·dU) = β·dR,  dR = dU − Nᵀ·ρ,  dβ_t = dR_t·R_t
// Eight value heads are under way at a time, so that scratch memory does not grow with their number: for heads of 128 64 KB for
// each of them and 128 tokens, and 1.4 MB for each.
//
// Bound by arithmetic: a chunk is 300 products of matrices for each simdgroup.
#include "gated_delta_rule_metal-inl.h"

#ifdef __METAL_VERSION__

// ---- the walk back ----

// carried: [pairs, Dk, Dv], the state's gradient between two segments; behind: [pairs, chunks, Dk, Dv], behind each
// chunk; dr: [pairs, 128 tokens, Dv].
template <typename T, int kWidth>
[[kernel, max_total_threads_per_threadgroup(256)]] void gated_delta_rule_walk_back(
    device const T* q [[buffer(0)]], device const T* k [[buffer(1)]],
    device const T* dy [[buffer(2)]], device const float* decay [[buffer(3)]],
    device const float* beta [[buffer(4)]], device const uchar* mask [[buffer(5)]],
    device const uchar* starts [[buffer(6)]], device const float* d_final [[buffer(7)]],
    device T* dv_out [[buffer(8)]], device float* d_initial [[buffer(9)]],
    device float* carried [[buffer(10)]], device float* behind [[buffer(11)]],
    device float* dr [[buffer(12)]], constant GatedDeltaRuleArgs& args [[buffer(13)]],
    constant DeltaWalk& walk [[buffer(14)]], DELTA_PLACE) {
  DELTA_ROOM;
  const uint whole = group + first_group;
  const long number = whole / uint(walk.slices);
  const DeltaHead h = delta_head(args, starts, walk.first_pair + number);
  const uint dk = uint(args.key_dim), nk = in_eights(dk);
  const uint dv = uint(args.value_dim), nv = in_eights(dv);
  const uint row = fragment_row(lane), column = fragment_column(lane);
  const uint start = (whole % uint(walk.slices) * simds + simd) * 8;
  const bool has = start < nv;
  // A sequence without tokens has one segment with no chunk.
  const long last = max(delta_segments(h), 1l) - 1;
  const bool is_in = walk.segment <= last;
  device float* mine = carried + number * nk * nv;

  simdgroup_float8x8 ds[kParts], left, dys[kBlocks], du[kBlocks], weighed[kBlocks], rho[kBlocks];
  for (int f = 0; f < kParts; ++f) {
    float part[2] = {0, 0};
    for (uint e = 0; e < 2; ++e) {
      const uint j = 8 * uint(f) + row, i = start + column + e;
      if (walk.segment < last) {
        if (j < nk && has) part[e] = mine[j * nv + i];
      } else if (has_final && j < dk && i < dv) {
        part[e] = d_final[(h.pair * dv + i) * dk + j];
      }
    }
    set_fragment(ds[f], part[0], part[1]);
  }
  const long from = walk.segment * kDeltaSegment;
  const long tokens = is_in ? min(h.count - from, long(kDeltaSegment)) : 0;
  for (long chunk = (tokens + kChunk - 1) / kChunk - 1; chunk >= 0; --chunk) {
    const long t0 = from + chunk * kChunk;
    delta_open<T, kWidth>(args, in, h, t0, c, at);
    if (!has) continue;
    device float* to = behind + (number * (kDeltaSegment / kChunk) + chunk) * nk * nv + start;
    for (int f = 0; f < kParts; ++f) {
      if (uint(f) * 8 >= nk) break;
      simdgroup_store(ds[f], to + uint(f) * 8 * nv, ulong(nv));
    }
    for (int b = 0; b < kBlocks; ++b) {
      const long t = t0 + 8 * b + row;
      const bool there = has_dy && delta_there(mask, h, t);
      float part[2] = {0, 0};
      for (uint e = 0; e < 2; ++e) {
        const uint i = start + column + e;
        if (there && i < dv) part[e] = widen(dy[delta_by_head(args, h, t) * dv + i]);
      }
      set_fragment(dys[b], part[0], part[1]);
      set_fragment(du[b], 0, 0);
      set_fragment(rho[b], 0, 0);
    }
    delta_upper<kBlocks>(c.m, dys, du);
    for (int b = 0; b < kBlocks; ++b) {
      for (int f = 0; f < kParts; ++f) {
        if (uint(f) * 8 >= nk) break;
        simdgroup_load(left, (threadgroup const float*)c.g + 8 * (uint(b) * kPitch + uint(f)),
                       ulong(kPitch));
        simdgroup_multiply_accumulate(du[b], left, ds[f], du[b]);
      }
      const float2 made = fragment_pair(du[b]);
      const float by = c.beta[8 * uint(b) + row];
      set_fragment(weighed[b], by * made[0], by * made[1]);
    }
    delta_upper<kBlocks>(c.inverse, weighed, rho);
    for (int b = 0; b < kBlocks; ++b) {
      const long t = t0 + 8 * b + row;
      const float2 made = fragment_pair(rho[b]);
      for (uint e = 0; e < 2; ++e) {
        const uint i = start + column + e;
        if (t < h.count && i < dv) dv_out[delta_by_head(args, h, t) * dv + i] = narrow<T>(made[e]);
      }
      scale_fragment(rho[b], -1, -1);
    }
    delta_upper<kBlocks>(c.n, rho, du);
    for (int b = 0; b < kBlocks; ++b) {
      simdgroup_store(du[b], dr + (number * kDeltaSegment + t0 - from + 8 * b) * long(nv) + start,
                      ulong(nv));
    }
    for (int f = 0; f < kParts; ++f) {
      if (uint(f) * 8 >= nk) break;
      const float fade = c.last[8 * uint(f) + row];
      scale_fragment(ds[f], fade, fade);
      for (int b = 0; b < kBlocks; ++b) {
        const uint place = 8 * (uint(b) * kPitch + uint(f));
        simdgroup_load(left, (threadgroup const float*)c.q + place, ulong(kPitch), ulong2(0, 0),
                       true);
        simdgroup_multiply_accumulate(ds[f], left, dys[b], ds[f]);
        simdgroup_load(left, (threadgroup const float*)c.k + place, ulong(kPitch), ulong2(0, 0),
                       true);
        simdgroup_multiply_accumulate(ds[f], left, rho[b], ds[f]);
      }
    }
  }
  for (int f = 0; f < kParts; ++f) {
    if (uint(f) * 8 >= nk || !has || !is_in) break;
    if (walk.segment > 0) simdgroup_store(ds[f], mine + uint(f) * 8 * nv + start, ulong(nv));
    if (walk.segment > 0 || !has_initial) continue;
    const float2 made = fragment_pair(ds[f]);
    for (uint e = 0; e < 2; ++e) {
      const uint j = 8 * uint(f) + row, i = start + column + e;
      if (j < dk && i < dv) d_initial[(h.pair * dv + i) * dk + j] = made[e];
    }
  }
}

// ---- what a chunk's queries, keys and decays owe ----

// A group has a chunk of a value head. The sums over values, dM, dN, X, Z and H, are products with the state before and the
// gradient behind; then a thread has a key channel and goes back over the tokens. The sums' names are those of the
// formulas in the CPU's file. 29 KB of threadgroup memory; about 80 registers.
template <typename T, int kWidth>
[[kernel, max_total_threads_per_threadgroup(256)]] void gated_delta_rule_owed(
    device const T* q [[buffer(0)]], device const T* k [[buffer(1)]],
    device const T* dy [[buffer(2)]], device const float* decay [[buffer(3)]],
    device const float* beta [[buffer(4)]], device const uchar* mask [[buffer(5)]],
    device const uchar* starts [[buffer(6)]], device const float* rows [[buffer(7)]],
    device const float* behind [[buffer(8)]], device const float* rest [[buffer(9)]],
    device const float* dr [[buffer(10)]], device float* d_decay [[buffer(11)]],
    device float* d_beta [[buffer(12)]], device float* dq [[buffer(13)]],
    device float* dk_out [[buffer(14)]], constant GatedDeltaRuleArgs& args [[buffer(15)]],
    constant DeltaWalk& walk [[buffer(16)]], DELTA_PLACE) {
  constexpr uint kChunk = kWidth > 128 ? 8 : 16, kPitch = kWidth + 4;
  constexpr uint kChunks = kDeltaSegment / kChunk;
  constexpr int kBlocks = kChunk / 8, kEach = kWidth / 64;  // of the keys' blocks, a simdgroup's
  threadgroup float first[kChunk * kPitch];                 // dY, then X, then dg
  threadgroup float second[kChunk * kPitch];                // U, then H
  threadgroup float third[kChunk * kPitch];                 // −ρ, then Z
  threadgroup float dm[kChunk * kDeltaSquare], dn[kChunk * kDeltaSquare];
  threadgroup float along[kWidth];  // Σ_rows dS∘S
  threadgroup float factor_q[kChunk], factor_k[kChunk];
  DeltaInputs<T> in;
  in.q = q;
  in.k = k;
  in.decay = decay;
  in.beta = beta;
  in.mask = mask;
  const uint whole = group + first_group;
  const long number = whole / kChunks;
  const DeltaHead h = delta_head(args, starts, walk.first_pair + number);
  const long from = walk.segment * kDeltaSegment, t0 = from + whole % kChunks * kChunk;
  const uint dk = uint(args.key_dim), nk = in_eights(dk);
  const uint dv = uint(args.value_dim), nv = in_eights(dv);
  const uint row = fragment_row(lane), column = fragment_column(lane);
  const bool is_in = t0 < h.count;  // the same for the whole group

  for (uint i = simd; is_in && i < kChunk; i += simds) {
    const long t = t0 + i;
    const bool there = delta_there(mask, h, t);
    const long by_head = there ? delta_by_head(args, h, t) : 0;
    const float by = there ? beta[by_head] : 0.0f;
    const long kept = (number * kDeltaSegment + t - from) * long(nv);
    float dot = 0;
    for (uint j = lane; j < nv; j += 32) {
      const float r = rest[kept + j], d = dr[kept + j];
      dot = fma(r, d, dot);
      first[i * kPitch + j] = has_dy && there && j < dv ? widen(dy[by_head * dv + j]) : 0.0f;
      second[i * kPitch + j] = by * r;
      third[i * kPitch + j] = -by * d;
    }
    dot = simd_sum(dot);
    if (lane == 0 && t < h.count) d_beta[delta_by_head(args, h, t)] = there ? dot : 0.0f;
    float fq = args.scale, fk = 1;
    if (args.normalise != 0) {
      const long at_q = there ? delta_row(args, h, args.q, t, h.key_head) : 0;
      const long at_k = there ? delta_row(args, h, args.k, t, h.key_head) : 0;
      float qq = 0, kk = 0;
      for (uint j = lane; there && j < dk; j += 32) {
        const float vq = widen(q[at_q + j]), vk = widen(k[at_k + j]);
        qq = fma(vq, vq, qq);
        kk = fma(vk, vk, kk);
      }
      fq /= sqrt(simd_sum(qq) + args.eps);
      fk /= sqrt(simd_sum(kk) + args.eps);
    }
    if (lane == 0) {
      factor_q[i] = fq;
      factor_k[i] = fk;
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);

  simdgroup_float8x8 a, b, other, sums[kEach][3][kBlocks];
  for (uint part = simd; is_in && part < 2 * kBlocks * kBlocks; part += simds) {
    const uint b0 = part / 2 / kBlocks * 8, i0 = part / 2 % kBlocks * 8;
    threadgroup const float* left = part % 2 == 0 ? first : third;
    set_fragment(sums[0][0][0], 0, 0);
    for (uint i = 0; i < nv; i += 8) {
      simdgroup_load(a, left + b0 * kPitch + i, ulong(kPitch));
      simdgroup_load(b, (threadgroup const float*)second + i0 * kPitch + i, ulong(kPitch),
                     ulong2(0, 0), true);
      simdgroup_multiply_accumulate(sums[0][0][0], a, b, sums[0][0][0]);
    }
    simdgroup_store(sums[0][0][0], (part % 2 == 0 ? dm : dn) + b0 * kDeltaSquare + i0,
                    ulong(kDeltaSquare));
  }
  device const float* before = rows + long(whole) * nk * nv;
  device const float* after = behind + long(whole) * nk * nv;
  for (int n = 0; n < kEach; ++n) {
    const uint j0 = 8 * (simd + 8 * uint(n));
    for (int l = 0; l < 3; ++l) {
      for (int t = 0; t < kBlocks; ++t) set_fragment(sums[n][l][t], 0, 0);
    }
    if (!is_in || j0 >= nk) continue;
    float common[2] = {0, 0};
    for (uint i = 0; i < nv; i += 8) {
      simdgroup_load(b, before + j0 * nv + i, ulong(nv), ulong2(0, 0), true);
      simdgroup_load(other, after + j0 * nv + i, ulong(nv), ulong2(0, 0), true);
      const float2 s = fragment_pair(b), ds = fragment_pair(other);
      for (int e = 0; e < 2; ++e) common[e] = fma(s[e], ds[e], common[e]);
      for (int t = 0; t < kBlocks; ++t) {
        const uint place = 8 * uint(t) * kPitch + i;
        simdgroup_load(a, (threadgroup const float*)first + place, ulong(kPitch));
        simdgroup_multiply_accumulate(sums[n][0][t], a, b, sums[n][0][t]);
        simdgroup_load(a, (threadgroup const float*)second + place, ulong(kPitch));
        simdgroup_multiply_accumulate(sums[n][1][t], a, other, sums[n][1][t]);
        simdgroup_load(a, (threadgroup const float*)third + place, ulong(kPitch));
        simdgroup_multiply_accumulate(sums[n][2][t], a, b, sums[n][2][t]);
      }
    }
    for (uint e = 0; e < 2; ++e) {
      const float sum = column_sum(common[e]);
      if (row == 0) along[j0 + column + e] = sum;
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (int n = 0; n < kEach; ++n) {
    const uint j0 = 8 * (simd + 8 * uint(n));
    if (!is_in || j0 >= nk) continue;
    for (int t = 0; t < kBlocks; ++t) {
      const uint place = 8 * uint(t) * kPitch + j0;
      simdgroup_store(sums[n][0][t], first + place, ulong(kPitch));
      simdgroup_store(sums[n][1][t], second + place, ulong(kPitch));
      simdgroup_store(sums[n][2][t], third + place, ulong(kPitch));
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);

  for (uint j = index; is_in && j < dk; j += 256) {
    float keys[kChunk], g[kChunk], e[kChunk], here[kChunk];
    float start = along[j];
    for (uint t = 0; t < kChunk; ++t) {
      const bool there = delta_there(mask, h, t0 + t);
      keys[t] = 0;
      g[t] = 1;
      if (there) {
        keys[t] = factor_k[t] * widen(k[delta_row(args, h, args.k, t0 + t, h.key_head) + j]);
        g[t] = delta_decay(args, in, delta_by_head(args, h, t0 + t), j);
      }
      e[t] = t == 0 ? g[t] : e[t - 1] * g[t];
      here[t] = second[t * kPitch + j];
    }
    for (uint t = kChunk; t-- > 0;) {
      const bool there = delta_there(mask, h, t0 + t);
      const float next = t + 1 < kChunk ? g[t + 1] : 1.0f;
      const float query =
          there ? factor_q[t] * widen(q[delta_row(args, h, args.q, t0 + t, h.key_head) + j]) : 0.0f;
      const float x = first[t * kPitch + j], z = third[t * kPitch + j];
      start = fma(next, start, fma(query, x, keys[t] * z));
      float sum_q = e[t] * x, sum_k = e[t] * z;
      float sum_g = t == 0 ? start : start * e[t - 1];
      float fade = 1;
      for (uint i = t; i-- > 0;) {
        const float vm = dm[t * kDeltaSquare + i], vn = dn[t * kDeltaSquare + i];
        here[i] = fma(next, here[i], fma(vm, query, vn * keys[t]));
        const float before_t = keys[i] * fade, now = g[t] * before_t;
        sum_q = fma(vm, now, sum_q);
        sum_k = fma(vn, now, sum_k);
        sum_g = fma(here[i], before_t, sum_g);
        fade *= g[i];
      }
      const float vm = dm[t * kDeltaSquare + t];
      sum_q = fma(vm, keys[t], sum_q);
      sum_k += fma(vm, query, next * here[t]);
      first[t * kPitch + j] = sum_g;
      if (t0 + t >= h.count) continue;
      const long share = (number * kDeltaSegment + t0 + t - from) * dk + j;
      dq[share] = there ? sum_q : 0.0f;
      dk_out[share] = there ? sum_k : 0.0f;
      if (args.per_channel != 0) {
        const float made = args.log_decay != 0 ? sum_g * g[t] : sum_g;
        d_decay[delta_by_head(args, h, t0 + t) * dk + j] = there ? made : 0.0f;
      }
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (uint i = simd; is_in && args.per_channel == 0 && i < kChunk; i += simds) {
    float sum = 0;
    for (uint j = lane; j < dk; j += 32) sum += first[i * kPitch + j];
    sum = simd_sum(sum);
    if (lane != 0 || t0 + i >= h.count) continue;
    const long by_head = delta_by_head(args, h, t0 + i);
    const float made = args.log_decay != 0 ? sum * delta_decay(args, in, by_head, 0) : sum;
    d_decay[by_head] = delta_off(mask, h, t0 + i) ? 0.0f : made;
  }
}

// dq and dk of a token and key head from all value heads that share it; a simdgroup each.
template <typename T>
[[kernel, max_total_threads_per_threadgroup(256)]] void gated_delta_rule_join(
    device const T* q [[buffer(0)]], device const T* k [[buffer(1)]],
    device const uchar* mask [[buffer(2)]], device const uchar* starts [[buffer(3)]],
    device const float* shares_q [[buffer(4)]], device const float* shares_k [[buffer(5)]],
    device T* dq [[buffer(6)]], device T* dk_out [[buffer(7)]],
    constant GatedDeltaRuleArgs& args [[buffer(8)]], constant DeltaWalk& walk [[buffer(9)]],
    DELTA_PLACE) {
  enum { kEach = 8 };  // channels of a lane
  const uint whole = (group + first_group) * simds + simd;
  const long members = args.value_heads / args.key_heads;
  const long number = whole / kDeltaSegment * members;  // of the first of them
  const DeltaHead h = delta_head(args, starts, walk.first_pair + number);
  const long t = walk.segment * kDeltaSegment + whole % kDeltaSegment;
  const uint dk = uint(args.key_dim);
  const bool there = delta_there(mask, h, t);
  for (int which = 0; which < 2; ++which) {
    device const float* shares = which == 0 ? shares_q : shares_k;
    float sum[kEach], value[kEach];
    float squares = 0, along = 0;
    for (uint l = 0; l < kEach; ++l) {
      const uint j = lane + 32 * l;
      sum[l] = 0;
      value[l] = 0;
      if (j >= dk || !there) continue;
      for (long m = 0; m < members; ++m) {
        sum[l] += shares[((number + m) * kDeltaSegment + whole % kDeltaSegment) * dk + j];
      }
      if (args.normalise != 0) {
        value[l] = which == 0 ? widen(q[delta_row(args, h, args.q, t, h.key_head) + j])
                              : widen(k[delta_row(args, h, args.k, t, h.key_head) + j]);
      }
      squares = fma(value[l], value[l], squares);
      along = fma(value[l], sum[l], along);
    }
    float factor = which == 0 ? args.scale : 1.0f, less = 0;
    if (args.normalise != 0) {
      const float r = 1 / sqrt(simd_sum(squares) + args.eps);
      less = simd_sum(along) * r * r;
      factor *= r;
    }
    for (uint l = 0; l < kEach; ++l) {
      const uint j = lane + 32 * l;
      if (j >= dk || t >= h.count) continue;
      // Where the mask is false the sums are 0, whatever x is.
      const float made = there ? factor * fma(-less, value[l], sum[l]) : 0.0f;
      (which == 0 ? dq : dk_out)[((h.first + t) * args.key_heads + h.key_head) * dk + j] =
          narrow<T>(made);
    }
  }
}

// ---- names ----

#define MAKE(name, ...) template [[host_name(name)]] [[kernel]] decltype(__VA_ARGS__) __VA_ARGS__;
#define MAKE_WIDTH(width, kWidth, type, T)                                                     \
  MAKE("gated_delta_rule_scan" width "_" type, gated_delta_rule_walk<T, kWidth, kDeltaScan>)   \
  MAKE("gated_delta_rule_again" width "_" type, gated_delta_rule_walk<T, kWidth, kDeltaAgain>) \
  MAKE("gated_delta_rule_back" width "_" type, gated_delta_rule_walk_back<T, kWidth>)          \
  MAKE("gated_delta_rule_owed" width "_" type, gated_delta_rule_owed<T, kWidth>)
#define MAKE_TYPE(type, T)        \
  MAKE_WIDTH("64", 64, type, T)   \
  MAKE_WIDTH("128", 128, type, T) \
  MAKE_WIDTH("256", 256, type, T) \
  MAKE("gated_delta_rule_join_" type, gated_delta_rule_join<T>)
MAKE_TYPE("f32", float)
MAKE_TYPE("f16", half)
MAKE_TYPE("bf16", bf16)

#else

#include <algorithm>
#include <string>

#include "backends/metal/launch.h"

namespace mlxtape::ops::delta {

namespace {

using metal::Launch;

constexpr std::int64_t kThreads = 256;
constexpr std::int64_t kSegment = 128;    // tokens between the states that a walk back keeps
constexpr std::int64_t kHeadsAtOnce = 8;  // value heads that are under way
constexpr std::int64_t kMostSimds = 4;  // of a walk's group: so few heads are cut into more groups

constexpr const char* kScan[] = {"gated_delta_rule_scan64", "gated_delta_rule_scan128",
                                 "gated_delta_rule_scan256"};
constexpr const char* kAgain[] = {"gated_delta_rule_again64", "gated_delta_rule_again128",
                                  "gated_delta_rule_again256"};
constexpr const char* kBack[] = {"gated_delta_rule_back64", "gated_delta_rule_back128",
                                 "gated_delta_rule_back256"};
constexpr const char* kOwed[] = {"gated_delta_rule_owed64", "gated_delta_rule_owed128",
                                 "gated_delta_rule_owed256"};

// What the kernels leave for each other, of the pairs that are under way.
struct Kept {
  std::int64_t pairs, segments;
  float* states;         // [pairs, segments, Dk, Dv]
  float *rows, *behind;  // [pairs, chunks of a segment, Dk, Dv]
  float* carried;        // [pairs, Dk, Dv]
  float *rest, *dr;      // [pairs, tokens of a segment, Dv]
  float *dq, *dk;        // [pairs, tokens of a segment, Dk]
  float* end;

  Kept(const GatedDeltaRuleArgs& args, float* memory) {
    const Sizes size(args, kMostSimds);
    const std::int64_t group = args.value_heads / args.key_heads;
    const std::int64_t longest = args.start_bytes == 0 ? args.sequence_tokens : args.tokens;
    const std::int64_t chunks = kSegment / size.chunk, state = size.nk * size.nv;
    pairs = std::min(args.sequences * args.value_heads,
                     std::max<std::int64_t>(1, kHeadsAtOnce / group) * group);
    segments = std::max<std::int64_t>(1, ceil_div(longest, kSegment));
    states = memory;
    rows = states + pairs * segments * state;
    behind = rows + pairs * chunks * state;
    carried = behind + pairs * chunks * state;
    rest = carried + pairs * state;
    dr = rest + pairs * kSegment * size.nv;
    dq = dr + pairs * kSegment * size.nv;
    dk = dq + pairs * kSegment * size.dk;
    end = dk + pairs * kSegment * size.dk;
  }
};

std::size_t backward_workspace(const void* p) {
  float* const base = nullptr;
  const Kept kept(*static_cast<const GatedDeltaRuleArgs*>(p), base);
  return static_cast<std::size_t>(kept.end - base) * sizeof(float);
}

// One run of eight value heads or fewer.
template <class T>
struct Backward {
  const KernelCall& call;
  const GatedDeltaRuleArgs& args;
  Sizes size;
  Kept kept;
  std::int64_t first_pair, pairs;

  // in: q, k, v, decay, beta, mask, starts, initial, dy, d_final; all but the third, and those behind starts, alike.
  Launch launch(const char* name, std::int64_t third) const {
    Launch made(call, metal::kernel<T>(name));
    made.constant(0, call.in[5] != nullptr)
        .constant(1, call.in[7] != nullptr)
        .constant(2, call.in[9] != nullptr)
        .constant(3, call.in[8] != nullptr)
        .input(0, call.in[0])
        .input(1, call.in[1])
        .input(2, call.in[static_cast<std::size_t>(third)])
        .input(3, call.in[3])
        .input(4, call.in[4])
        .input(5, call.in[5])
        .input(6, call.in[6]);
    return made;
  }
  // Of so many tokens of each pair.
  void cost(Launch& made, std::int64_t tokens, double products) const {
    const double each = static_cast<double>(size.dk + size.dv) * 2 * (sizeof(T) + 4);
    const double states = static_cast<double>(2 * size.nk * size.nv) * sizeof(float) /
                          static_cast<double>(size.chunk);
    made.in_parts()
        .operations(operations_of(size, tokens * pairs, products))
        .traffic(static_cast<double>(tokens * pairs) * (each + states));
  }

  void walk(bool scans, const DeltaWalk& where) const {
    Launch made = launch(scans ? kScan[size.width] : kAgain[size.width], 2);
    made.input(7, call.in[7])
        .input(8, nullptr)
        .input(9, nullptr)
        .output(10, kept.states)
        .output(11, scans ? nullptr : kept.rows)
        .output(12, scans ? nullptr : kept.rest)
        .bytes(13, args)
        .bytes(14, where);
    cost(made, scans ? kept.segments * kSegment : kSegment, 2);
    made.groups(pairs * size.slices).threads(size.simds * metal::kSimd).run();
  }

  void walk_back(const DeltaWalk& where) const {
    Launch made = launch(kBack[size.width], 8);
    made.input(7, call.in[9])
        .output(8, call.out[2])
        .output(9, call.out[5])
        .output(10, kept.carried)
        .output(11, kept.behind)
        .output(12, kept.dr)
        .bytes(13, args)
        .bytes(14, where);
    cost(made, kSegment, 3);
    made.groups(pairs * size.slices).threads(size.simds * metal::kSimd).run();
  }

  void owed(const DeltaWalk& where) const {
    Launch made = launch(kOwed[size.width], 8);
    made.input(7, kept.rows)
        .input(8, kept.behind)
        .input(9, kept.rest)
        .input(10, kept.dr)
        .output(11, call.out[3])
        .output(12, call.out[4])
        .output(13, kept.dq)
        .output(14, kept.dk)
        .bytes(15, args)
        .bytes(16, where);
    cost(made, kSegment, 5);
    made.groups(pairs * (kSegment / size.chunk)).threads(kThreads).run();
  }

  void join(const DeltaWalk& where) const {
    const std::int64_t heads = pairs / (args.value_heads / args.key_heads);
    Launch made(call, metal::kernel<T>("gated_delta_rule_join"));
    made.constant(0, call.in[5] != nullptr)
        .input(0, call.in[0])
        .input(1, call.in[1])
        .input(2, call.in[5])
        .input(3, call.in[6])
        .input(4, kept.dq)
        .input(5, kept.dk)
        .output(6, call.out[0])
        .output(7, call.out[1])
        .bytes(8, args)
        .bytes(9, where);
    cost(made, kSegment, 0);
    made.groups(heads * kSegment / (kThreads / metal::kSimd)).threads(kThreads).run();
  }

  void run() const {
    DeltaWalk where{first_pair, 0, kept.segments, size.slices};
    walk(true, where);
    for (where.segment = kept.segments - 1; where.segment >= 0; --where.segment) {
      walk(false, where);
      walk_back(where);
      owed(where);
      join(where);
    }
  }
};

template <class T>
void backward(const KernelCall& call) {
  const auto& args = call.as<GatedDeltaRuleArgs>();
  const Kept kept(args, static_cast<float*>(call.workspace));
  const std::int64_t all = args.sequences * args.value_heads;
  for (std::int64_t first = 0; first < all; first += kept.pairs) {
    Backward<T>{call, args, Sizes(args, kMostSimds), kept, first, std::min(kept.pairs, all - first)}
        .run();
  }
}

}  // namespace

void register_back(KernelRegistry& registry) {
  registry.add(Backend::kMetal, "gated_delta_rule_bwd_f32", backward<float>, backward_workspace);
  registry.add(Backend::kMetal, "gated_delta_rule_bwd_f16", backward<F16>, backward_workspace);
  registry.add(Backend::kMetal, "gated_delta_rule_bwd_bf16", backward<BF16>, backward_workspace);
}

}  // namespace mlxtape::ops::delta

#endif
