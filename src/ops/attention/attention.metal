// Metal kernels of attention (formula: mlxtape/ops/attention.h).
//
// A group of four simdgroups has 32 queries of a head, each simdgroup eight of them as matrices in registers, with the
// softmax's maximum and sum so far and the values' sums; keys and values go through threadgroup memory, 32, 16 or 8 at a time
// for heads of up to 64, 128 and 256 channels. A row of scores lies in four lanes, and weights are where the next product needs
// them. Tiles of keys that do not count for a simdgroup's queries are not multiplied.
//
// Backward: one kernel for the rows' D, one as forward (dq), and one whose groups have 32 keys and go over the heads that
// share them and their queries (dk, dv): the products with the keys are made twice, so that nothing is added by two
// groups. For heads wider than 128, whose sums would not fit into registers, that kernel runs once for dv and once for dk.
//
// Bound by arithmetic. 17 KB of threadgroup memory. Registers, for heads of 128 in 16 bits: 32 numbers of sums and 16 words of
// queries forward, 32 and 32 for dq, 64 and 32 for dk and dv, and about 40 more.
// Left out: pieces of the keys where queries are few, which is attention_step's business.
#include "attention_args.h"

#ifdef __METAL_VERSION__

#include "backends/metal/device/exp.h"
#include "backends/metal/device/fragments.h"
#include "backends/metal/device/rows.h"

constant bool fours [[function_constant(0)]];  // every four channels can be read at once
constant bool has_sinks [[function_constant(1)]];
constant uint mask_kind [[function_constant(2)]];  // AttentionMask

enum { kAttentionRows = 32 };                               // queries or keys of a group
enum { kAttentionBoth, kAttentionKeys, kAttentionValues };  // which sums a group of keys has

// ---- which keys count ----

struct AttentionSequence {
  long batch, query, queries, key, keys;
};

inline long attention_start(constant AttentionArgs& args, device const uchar* starts, long n,
                            long low, long high) {
  if (n == args.sequences) return high;
  const long given = args.start_bytes == 4 ? long(((device const int*)starts)[n])
                                           : ((device const long*)starts)[n];
  return min(max(given, low), high);
}

// The sequence that a block of 32 tokens falls into, and its first token there; −1: none.
inline long attention_find(constant AttentionArgs& args, device const uchar* starts,
                           device const uchar* key_starts, long block, bool by_keys,
                           thread AttentionSequence& s) {
  s.batch = 0;
  s.query = 0;
  s.queries = args.queries;
  s.key = 0;
  s.keys = args.keys;
  if (args.sequences == 0) {
    const uint all = uint(by_keys ? args.keys : args.queries);
    const uint each = (all + kAttentionRows - 1) / kAttentionRows;
    s.batch = uint(block) / each;
    return long(uint(block) % each) * kAttentionRows;
  }
  long query = 0, key = 0;
  for (long n = 0; n < args.sequences; ++n) {
    const long next_query = attention_start(args, starts, n + 1, query, args.queries);
    const long next_key = attention_start(args, key_starts, n + 1, key, args.keys);
    const long count = by_keys ? next_key - key : next_query - query;
    const long blocks = (count + kAttentionRows - 1) / kAttentionRows;
    if (block < blocks) {
      s.query = query;
      s.queries = next_query - query;
      s.key = key;
      s.keys = next_key - key;
      return block * kAttentionRows;
    }
    block -= blocks;
    query = next_query;
    key = next_key;
  }
  return -1;
}

// Of a query: [first, last).
inline long attention_last(constant AttentionArgs& args, AttentionSequence s, long t) {
  if (args.causal == 0) return s.keys;
  return min(max(t + s.keys - s.queries + 1, 0l), s.keys);
}
inline long attention_first(constant AttentionArgs& args, AttentionSequence s, long t) {
  if (args.window == 0) return 0;
  return min(max(t + s.keys - s.queries + 1 - args.window, 0l), attention_last(args, s, t));
}

// The keys of a query that count by their places; none where there is no query.
struct AttentionRange {
  long first, last;
};
inline AttentionRange attention_range(constant AttentionArgs& args, AttentionSequence s, long t) {
  AttentionRange range;
  range.first = 0;
  range.last = 0;
  if (t < s.queries) {
    range.first = attention_first(args, s, t);
    range.last = attention_last(args, s, t);
  }
  return range;
}

// A score as it counts: with the mask added, or −inf.
template <typename T>
inline float attention_score(constant AttentionArgs& args, device const uchar* mask,
                             AttentionSequence s, AttentionRange range, long t, long h, long j,
                             float score) {
  if (j < range.first || j >= range.last) return -INFINITY;
  if (mask_kind == uint(AttentionMask::kNone)) return score;
  const long at = s.batch * args.mask[0] + h * args.mask[1] + t * args.mask[2] + j * args.mask[3];
  if (mask_kind == uint(AttentionMask::kBool)) return mask[at] != 0 ? score : -INFINITY;
  score += mask_kind == uint(AttentionMask::kF32) ? ((device const float*)mask)[at]
                                                  : widen(((device const T*)mask)[at]);
  return score < kLeastScore ? -INFINITY : score;
}

// ---- rows ----

// Rows of one head: row t of a sequence is at from + t·step.
template <typename T>
struct AttentionRows {
  device const T* from;
  long step;
  uint channels;
};
template <typename T>
inline AttentionRows<T> attention_rows(device const T* base, constant int64_t* strides, long batch,
                                       long token, long head, long channels) {
  AttentionRows<T> rows;
  rows.from = base + batch * strides[0] + token * strides[1] + head * strides[2];
  rows.step = strides[1];
  rows.channels = uint(channels);
  return rows;
}
// Of y or dy, which have no gaps.
template <typename T>
inline AttentionRows<T> attention_dense(device const T* base, constant AttentionArgs& args,
                                        long batch, long token, long head) {
  AttentionRows<T> rows;
  rows.from = base + ((batch * args.queries + token) * args.heads + head) * args.value_dim;
  rows.step = args.heads * args.value_dim;
  rows.channels = uint(args.value_dim);
  return rows;
}

// Rows [first, first + kCount) to threadgroup memory as f32, by the whole group; zeros from `end` on and behind the channels.
template <typename T, int kCount, int kPitch>
inline void attention_tile(AttentionRows<T> rows, long first, long end, threadgroup float* to,
                           uint index) {
  const uint packs = (rows.channels + 7) / 8 * 2;
  for (uint i = index; i < kCount * packs; i += 128) {
    const uint r = i / packs, c = i % packs * 4;
    device const T* row = rows.from + (first + r) * rows.step;
    const bool there = first + r < end;
    float4 v = float4(0.0f);
    if (fours) {
      if (there && c < rows.channels) v = load_four(row + c);
    } else {
      for (uint e = 0; e < 4; ++e) {
        if (there && c + e < rows.channels) v[e] = widen(row[c + e]);
      }
    }
    for (uint e = 0; e < 4; ++e) to[r * kPitch + c + e] = v[e];
  }
}

// Eight rows as first factors, in their own type: a lane's pairs.
template <typename T, int kWidth>
struct AttentionEight {
  T pairs[kWidth / 8][2];

  inline void load(AttentionRows<T> rows, long first, long end, uint lane) {
    const uint row = fragment_row(lane), column = fragment_column(lane);
    device const T* from = rows.from + (first + row) * rows.step;
    for (uint f = 0; f < kWidth / 8; ++f) {
      for (uint e = 0; e < 2; ++e) {
        const uint c = 8 * f + column + e;
        pairs[f][e] = narrow<T>(0.0f);
        if (first + row < end && c < rows.channels) pairs[f][e] = from[c];
      }
    }
  }
};

// sums[n] = eight · tileᵀ: scores of eight rows and the tile's rows.
template <typename T, int kWidth, int kCount>
inline void attention_scores(thread AttentionEight<T, kWidth>& eight, threadgroup const float* tile,
                             uint channels, thread simdgroup_float8x8* sums) {
  constexpr uint kPitch = kWidth + 4;
  simdgroup_float8x8 a, b;
  for (int n = 0; n < kCount / 8; ++n) set_fragment(sums[n], 0, 0);
  for (uint f = 0; f < kWidth / 8; ++f) {
    if (8 * f >= channels) break;
    set_fragment(a, widen(eight.pairs[f][0]), widen(eight.pairs[f][1]));
    for (int n = 0; n < kCount / 8; ++n) {
      simdgroup_load(b, tile + 8 * uint(n) * kPitch + 8 * f, ulong(kPitch), ulong2(0, 0), true);
      simdgroup_multiply_accumulate(sums[n], a, b, sums[n]);
    }
  }
}

// sums [8, channels] += weights [8, tile's rows] · tile.
template <int kWidth, int kCount>
inline void attention_add(thread simdgroup_float8x8* weights, threadgroup const float* tile,
                          uint channels, thread simdgroup_float8x8* sums) {
  constexpr uint kPitch = kWidth + 4;
  simdgroup_float8x8 b;
  for (uint f = 0; f < kWidth / 8; ++f) {
    if (8 * f >= channels) break;
    for (int n = 0; n < kCount / 8; ++n) {
      simdgroup_load(b, tile + 8 * uint(n) * kPitch + 8 * f, ulong(kPitch));
      simdgroup_multiply_accumulate(sums[f], weights[n], b, sums[f]);
    }
  }
}

// Row `row` of eight sums, times factor.
template <typename T, int kWidth>
inline void attention_store(thread simdgroup_float8x8* sums, float factor, uint channels, uint lane,
                            device T* row) {
  const uint column = fragment_column(lane);
  for (uint f = 0; f < kWidth / 8; ++f) {
    const float2 made = fragment_pair(sums[f]);
    for (uint e = 0; e < 2; ++e) {
      const uint c = 8 * f + column + e;
      if (c < channels) row[c] = narrow<T>(factor * made[e]);
    }
  }
}

#define ATTENTION_PLACE                                                                       \
  constant uint &first_group [[buffer(30)]], uint group [[threadgroup_position_in_grid]],     \
      uint index [[thread_position_in_threadgroup]], uint lane [[thread_index_in_simdgroup]], \
      uint simd [[simdgroup_index_in_threadgroup]]

// ---- forward ----

// Blocks of 32 queries from the last one on, of each the heads: long rows first, so that short ones fill the end.
template <typename T, int kWidth>
[[kernel, max_total_threads_per_threadgroup(128)]] void attention_fwd(
    device const T* q [[buffer(0)]], device const T* k [[buffer(1)]],
    device const T* v [[buffer(2)]], device const uchar* mask [[buffer(3)]],
    device const float* sinks [[buffer(4)]], device const uchar* starts [[buffer(5)]],
    device const uchar* key_starts [[buffer(6)]], device T* y [[buffer(7)]],
    device float* lse [[buffer(8)]], constant AttentionArgs& args [[buffer(9)]],
    constant long& blocks [[buffer(10)]], ATTENTION_PLACE) {
  constexpr int kKeys = 2048 / kWidth, kPitch = kWidth + 4;
  threadgroup float tile_k[kKeys * kPitch], tile_v[kKeys * kPitch];
  const uint whole = group + first_group, heads = uint(args.heads);
  const long h = whole % heads, kh = h / (args.heads / args.key_heads);
  AttentionSequence s;
  const long block = blocks - 1 - whole / heads;
  const long found = attention_find(args, starts, key_starts, block, false, s);
  const bool is_in = found >= 0;  // the same for the whole group
  const long first = max(found, 0l);
  const long end = is_in ? s.queries : 0;
  const uint dim = uint(args.dim), value_dim = uint(args.value_dim);
  const AttentionRows<T> queries = attention_rows(q, args.q, s.batch, s.query, h, args.dim);
  const AttentionRows<T> keys = attention_rows(k, args.k, s.batch, s.key, kh, args.dim);
  const AttentionRows<T> values = attention_rows(v, args.v, s.batch, s.key, kh, args.value_dim);

  const long mine = first + 8 * simd, t = mine + fragment_row(lane);
  const uint column = fragment_column(lane);
  AttentionEight<T, kWidth> eight;
  eight.load(queries, mine, end, lane);
  AttentionRange range;
  range.first = 0;
  range.last = 0;
  long from = 0, to = 0, my_first = 0, my_last = 0;  // of the group, and of this simdgroup
  if (is_in) {
    range = attention_range(args, s, t);
    from = attention_first(args, s, first) / kKeys * kKeys;
    to = attention_last(args, s, min(first + kAttentionRows, end) - 1);
  }
  if (is_in && mine < end) {
    my_first = attention_first(args, s, mine);
    my_last = attention_last(args, s, min(mine + 8, end) - 1);
  }
  simdgroup_float8x8 sums[kWidth / 8], scores[kKeys / 8];
  for (int f = 0; f < kWidth / 8; ++f) set_fragment(sums[f], 0, 0);
  float most = -INFINITY, sum = 0;
  for (long j = from; j < to; j += kKeys) {
    threadgroup_barrier(mem_flags::mem_threadgroup);
    attention_tile<T, kKeys, kPitch>(keys, j, s.keys, tile_k, index);
    attention_tile<T, kKeys, kPitch>(values, j, s.keys, tile_v, index);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (j >= my_last || j + kKeys <= my_first) continue;
    attention_scores<T, kWidth, kKeys>(eight, tile_k, dim, scores);
    float largest = most;
    for (int n = 0; n < kKeys / 8; ++n) {
      const float2 made = fragment_pair(scores[n]);
      float counted[2];
      for (int e = 0; e < 2; ++e) {
        counted[e] = attention_score<T>(args, mask, s, range, t, h, j + 8 * n + column + e,
                                        args.scale * made[e]);
        largest = max(largest, counted[e]);
      }
      set_fragment(scores[n], counted[0], counted[1]);
    }
    largest = row_max(largest);
    const float keep = largest == most ? 1.0f : exp_for<T>(most - largest);
    const float shift = finite_reference(largest);
    most = largest;
    sum *= keep;
    for (int n = 0; n < kKeys / 8; ++n) {
      const float2 made = fragment_pair(scores[n]);
      const float weight = exp_for<T>(made[0] - shift), other = exp_for<T>(made[1] - shift);
      sum += weight + other;
      set_fragment(scores[n], weight, other);
    }
    for (uint f = 0; f < kWidth / 8; ++f) {
      if (8 * f < value_dim) scale_fragment(sums[f], keep, keep);
    }
    attention_add<kWidth, kKeys>(scores, tile_v, value_dim, sums);
  }
  sum = row_sum(sum);
  if (!is_in || t >= end) return;
  const float sink = has_sinks ? sinks[h] : -INFINITY;
  const float shift = finite_reference(max(most, sink));
  const float all =
      fma(sum, exp_for<T>(most - shift), sink == -INFINITY ? 0.0f : exp_for<T>(sink - shift));
  const long at = (s.batch * args.queries + s.query + t) * args.heads + h;
  const float factor = all == 0 ? 0.0f : exp_for<T>(most - shift) / all;
  attention_store<T, kWidth>(sums, factor, value_dim, lane, y + at * args.value_dim);
  if (column == 0) lse[at] = all == 0 ? -INFINITY : shift + precise::log(all);
}

// ---- backward ----

// D_t; a simdgroup has a row.
template <typename T>
[[kernel, max_total_threads_per_threadgroup(256)]] void attention_dots(
    device const T* y [[buffer(0)]], device const T* dy [[buffer(1)]],
    device float* dots [[buffer(2)]], constant AttentionArgs& args [[buffer(3)]], ATTENTION_PLACE) {
  const long row = long(group + first_group) * 8 + simd;
  const bool is_in = row < args.batch * args.queries * args.heads;
  float sum = 0;
  for (uint c = lane; is_in && c < uint(args.value_dim); c += 32) {
    const long at = row * args.value_dim + c;
    sum = fma(widen(y[at]), widen(dy[at]), sum);
  }
  sum = simd_sum(sum);
  if (is_in && lane == 0) dots[row] = sum;
}

// From a score as it counts and dy·v: p, and p·(dy·v − D).
struct AttentionWeight {
  float p, ds;
};
template <typename T>
inline AttentionWeight attention_weight(float score, float product, float shift, float dot) {
  AttentionWeight weight;
  weight.p = shift == -INFINITY ? 0.0f : exp_for<T>(score - shift);
  weight.ds = shift == -INFINITY ? 0.0f : weight.p * (product - dot);
  return weight;
}

// 32 queries of a head: dq, over the keys.
template <typename T, int kWidth>
[[kernel, max_total_threads_per_threadgroup(128)]] void attention_bwd_queries(
    device const T* q [[buffer(0)]], device const T* k [[buffer(1)]],
    device const T* v [[buffer(2)]], device const uchar* mask [[buffer(3)]],
    device const T* dy [[buffer(4)]], device const uchar* starts [[buffer(5)]],
    device const uchar* key_starts [[buffer(6)]], device const float* lse [[buffer(7)]],
    device const float* dots [[buffer(8)]], device T* dq [[buffer(9)]],
    constant AttentionArgs& args [[buffer(10)]], constant long& blocks [[buffer(11)]],
    ATTENTION_PLACE) {
  constexpr int kKeys = 2048 / kWidth, kPitch = kWidth + 4;
  threadgroup float tile_k[kKeys * kPitch], tile_v[kKeys * kPitch];
  const uint whole = group + first_group, heads = uint(args.heads);
  const long h = whole % heads, kh = h / (args.heads / args.key_heads);
  AttentionSequence s;
  const long block = blocks - 1 - whole / heads;
  const long found = attention_find(args, starts, key_starts, block, false, s);
  const bool is_in = found >= 0;
  const long first = max(found, 0l);
  const long end = is_in ? s.queries : 0;
  const uint dim = uint(args.dim), value_dim = uint(args.value_dim);
  const AttentionRows<T> keys = attention_rows(k, args.k, s.batch, s.key, kh, args.dim);
  const AttentionRows<T> values = attention_rows(v, args.v, s.batch, s.key, kh, args.value_dim);

  const long mine = first + 8 * simd, t = mine + fragment_row(lane);
  const uint column = fragment_column(lane);
  AttentionEight<T, kWidth> eight, grads;
  eight.load(attention_rows(q, args.q, s.batch, s.query, h, args.dim), mine, end, lane);
  grads.load(attention_dense(dy, args, s.batch, s.query, h), mine, end, lane);
  const long at = (s.batch * args.queries + s.query + t) * args.heads + h;
  AttentionRange range;
  range.first = 0;
  range.last = 0;
  float shift = -INFINITY, dot = 0;
  long from = 0, to = 0, my_first = 0, my_last = 0;
  if (is_in) {
    from = attention_first(args, s, first) / kKeys * kKeys;
    to = attention_last(args, s, min(first + kAttentionRows, end) - 1);
  }
  if (is_in && mine < end) {
    my_first = attention_first(args, s, mine);
    my_last = attention_last(args, s, min(mine + 8, end) - 1);
  }
  if (is_in && t < end) {
    range = attention_range(args, s, t);
    shift = lse[at];
    dot = dots[at];
  }
  simdgroup_float8x8 sums[kWidth / 8], scores[kKeys / 8], products[kKeys / 8];
  for (int f = 0; f < kWidth / 8; ++f) set_fragment(sums[f], 0, 0);
  for (long j = from; j < to; j += kKeys) {
    threadgroup_barrier(mem_flags::mem_threadgroup);
    attention_tile<T, kKeys, kPitch>(keys, j, s.keys, tile_k, index);
    attention_tile<T, kKeys, kPitch>(values, j, s.keys, tile_v, index);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (j >= my_last || j + kKeys <= my_first) continue;
    attention_scores<T, kWidth, kKeys>(eight, tile_k, dim, scores);
    attention_scores<T, kWidth, kKeys>(grads, tile_v, value_dim, products);
    for (int n = 0; n < kKeys / 8; ++n) {
      const float2 made = fragment_pair(scores[n]), product = fragment_pair(products[n]);
      float ds[2];
      for (int e = 0; e < 2; ++e) {
        const float score = attention_score<T>(args, mask, s, range, t, h, j + 8 * n + column + e,
                                               args.scale * made[e]);
        ds[e] = attention_weight<T>(score, product[e], shift, dot).ds;
      }
      set_fragment(scores[n], ds[0], ds[1]);
    }
    attention_add<kWidth, kKeys>(scores, tile_k, dim, sums);
  }
  if (is_in && t < end) {
    attention_store<T, kWidth>(sums, args.scale, dim, lane, dq + at * args.dim);
  }
}

// 32 keys: dk and dv, or one of them, over the heads that share them and their queries.
template <typename T, int kWidth, int kWhich>
[[kernel, max_total_threads_per_threadgroup(128)]] void attention_bwd_keys(
    device const T* q [[buffer(0)]], device const T* k [[buffer(1)]],
    device const T* v [[buffer(2)]], device const uchar* mask [[buffer(3)]],
    device const T* dy [[buffer(4)]], device const uchar* starts [[buffer(5)]],
    device const uchar* key_starts [[buffer(6)]], device const float* lse [[buffer(7)]],
    device const float* dots [[buffer(8)]], device T* dk [[buffer(9)]], device T* dv [[buffer(10)]],
    constant AttentionArgs& args [[buffer(11)]], ATTENTION_PLACE) {
  constexpr int kQueries = 2048 / kWidth, kPitch = kWidth + 4;
  constexpr bool kHasKeys = kWhich != kAttentionValues, kHasValues = kWhich != kAttentionKeys;
  threadgroup float tile_q[kQueries * kPitch], tile_dy[kQueries * kPitch];
  const uint whole = group + first_group, heads = uint(args.key_heads);
  const long kh = whole % heads, members = args.heads / args.key_heads;
  AttentionSequence s;
  const long found = attention_find(args, starts, key_starts, whole / heads, true, s);
  const bool is_in = found >= 0;
  const long first = max(found, 0l);
  const long end = is_in ? s.keys : 0;
  const uint dim = uint(args.dim), value_dim = uint(args.value_dim);
  const long mine = first + 8 * simd, j = mine + fragment_row(lane);
  const uint column = fragment_column(lane);
  AttentionEight<T, kWidth> eight, values;
  eight.load(attention_rows(k, args.k, s.batch, s.key, kh, args.dim), mine, end, lane);
  if (kHasKeys) {
    values.load(attention_rows(v, args.v, s.batch, s.key, kh, args.value_dim), mine, end, lane);
  }
  simdgroup_float8x8 sums_k[kHasKeys ? kWidth / 8 : 1], sums_v[kHasValues ? kWidth / 8 : 1];
  simdgroup_float8x8 scores[kQueries / 8], products[kQueries / 8];
  for (int f = 0; f < kWidth / 8; ++f) {
    if (kHasKeys) set_fragment(sums_k[f], 0, 0);
    if (kHasValues) set_fragment(sums_v[f], 0, 0);
  }
  for (long h = kh * members; is_in && h < (kh + 1) * members; ++h) {
    const AttentionRows<T> queries = attention_rows(q, args.q, s.batch, s.query, h, args.dim);
    const AttentionRows<T> grads = attention_dense(dy, args, s.batch, s.query, h);
    for (long t0 = 0; t0 < s.queries; t0 += kQueries) {
      const long newest = min(t0 + kQueries, s.queries) - 1;
      const long reach = attention_last(args, s, newest), begin = attention_first(args, s, t0);
      if (reach <= first || begin >= min(first + kAttentionRows, end)) continue;
      threadgroup_barrier(mem_flags::mem_threadgroup);
      attention_tile<T, kQueries, kPitch>(queries, t0, s.queries, tile_q, index);
      attention_tile<T, kQueries, kPitch>(grads, t0, s.queries, tile_dy, index);
      threadgroup_barrier(mem_flags::mem_threadgroup);
      if (reach <= mine || begin >= mine + 8) continue;
      attention_scores<T, kWidth, kQueries>(eight, tile_q, dim, scores);
      if (kHasKeys) attention_scores<T, kWidth, kQueries>(values, tile_dy, value_dim, products);
      for (int n = 0; n < kQueries / 8; ++n) {
        const float2 made = fragment_pair(scores[n]);
        float2 product = float2(0.0f);
        if (kHasKeys) product = fragment_pair(products[n]);
        float p[2] = {0, 0}, ds[2] = {0, 0};
        for (int e = 0; e < 2; ++e) {
          const long t = t0 + 8 * n + column + e;
          if (t >= s.queries || j >= end) continue;
          const long at = (s.batch * args.queries + s.query + t) * args.heads + h;
          const float score = attention_score<T>(args, mask, s, attention_range(args, s, t), t, h,
                                                 j, args.scale * made[e]);
          const AttentionWeight weight = attention_weight<T>(score, product[e], lse[at], dots[at]);
          p[e] = weight.p;
          ds[e] = weight.ds;
        }
        set_fragment(scores[n], p[0], p[1]);
        set_fragment(products[n], ds[0], ds[1]);
      }
      if (kHasValues) attention_add<kWidth, kQueries>(scores, tile_dy, value_dim, sums_v);
      if (kHasKeys) attention_add<kWidth, kQueries>(products, tile_q, dim, sums_k);
    }
  }
  if (!is_in || j >= end) return;
  const long at = (s.batch * args.keys + s.key + j) * args.key_heads + kh;
  if (kHasKeys) attention_store<T, kWidth>(sums_k, args.scale, dim, lane, dk + at * args.dim);
  if (kHasValues) attention_store<T, kWidth>(sums_v, 1, value_dim, lane, dv + at * args.value_dim);
}

// d_sink of a head; a group each.
[[kernel, max_total_threads_per_threadgroup(256)]] void attention_bwd_sinks(
    device const float* sinks [[buffer(0)]], device const float* lse [[buffer(1)]],
    device const float* dots [[buffer(2)]], device float* d_sinks [[buffer(3)]],
    constant AttentionArgs& args [[buffer(4)]], uint group [[threadgroup_position_in_grid]],
    uint index [[thread_position_in_threadgroup]], uint lane [[thread_index_in_simdgroup]],
    uint simd [[simdgroup_index_in_threadgroup]], uint simds [[simdgroups_per_threadgroup]]) {
  threadgroup float room[32];
  const Place place = {index, lane, simd, simds};
  const float sink = sinks[group];
  const long tokens = args.batch * args.queries;
  float sum = 0;
  for (long t = index; sink != -INFINITY && t < tokens; t += 256) {
    const long at = t * args.heads + group;
    sum -= precise::exp(sink - lse[at]) * dots[at];
  }
  sum = group_sum(sum, room, place);
  if (index == 0) d_sinks[group] = sum;
}

// ---- names ----

#define MAKE(name, ...) template [[host_name(name)]] [[kernel]] decltype(__VA_ARGS__) __VA_ARGS__;
#define MAKE_TYPE(type, T)                                                        \
  MAKE("attention_fwd64_" type, attention_fwd<T, 64>)                             \
  MAKE("attention_fwd128_" type, attention_fwd<T, 128>)                           \
  MAKE("attention_fwd256_" type, attention_fwd<T, 256>)                           \
  MAKE("attention_dots_" type, attention_dots<T>)                                 \
  MAKE("attention_bwd_queries64_" type, attention_bwd_queries<T, 64>)             \
  MAKE("attention_bwd_queries128_" type, attention_bwd_queries<T, 128>)           \
  MAKE("attention_bwd_queries256_" type, attention_bwd_queries<T, 256>)           \
  MAKE("attention_bwd_both64_" type, attention_bwd_keys<T, 64, kAttentionBoth>)   \
  MAKE("attention_bwd_both128_" type, attention_bwd_keys<T, 128, kAttentionBoth>) \
  MAKE("attention_bwd_keys256_" type, attention_bwd_keys<T, 256, kAttentionKeys>) \
  MAKE("attention_bwd_values256_" type, attention_bwd_keys<T, 256, kAttentionValues>)
MAKE_TYPE("f32", float)
MAKE_TYPE("f16", half)
MAKE_TYPE("bf16", bf16)

#else

#include <algorithm>
#include <string>

#include "backends/metal/launch.h"

namespace mlxtape::ops {

namespace {

using metal::Launch;

constexpr std::int64_t kThreads = 128;
constexpr std::int64_t kRows = 32;  // queries or keys of a group
constexpr std::int64_t kDotRows = 8;

int width_of(const AttentionArgs& args) {
  const std::int64_t widest = std::max(args.dim, args.value_dim);
  return widest <= 64 ? 0 : widest <= 128 ? 1 : 2;
}

constexpr const char* kForward[] = {"attention_fwd64", "attention_fwd128", "attention_fwd256"};
constexpr const char* kQueriesBack[] = {"attention_bwd_queries64", "attention_bwd_queries128",
                                        "attention_bwd_queries256"};

std::int64_t blocks_of(const AttentionArgs& args, bool by_keys) {
  const std::int64_t all = by_keys ? args.keys : args.queries;
  return args.sequences == 0 ? args.batch * ceil_div(all, kRows) : all / kRows + args.sequences;
}

// Whether four neighbouring channels of q, k, v and, if it is given, of dy can be read at once.
template <class T>
bool in_fours(const AttentionArgs& args, const KernelCall& call) {
  bool whole = args.dim % 4 == 0 && args.value_dim % 4 == 0;
  for (const auto& strides : {args.q, args.k, args.v}) {
    for (int i = 0; i < 3; ++i) whole = whole && strides[i] % 4 == 0;
  }
  const auto begins = [&](const void* p) {
    return reinterpret_cast<std::uintptr_t>(p) % (4 * sizeof(T)) == 0;
  };
  for (std::size_t i = 0; i < 3; ++i) whole = whole && begins(call.in[i]);
  return whole && (call.in.size() < 10 || begins(call.in[9]));
}

// `products` of every query with every key that counts, over the wider of their channels.
double operations_of(const AttentionArgs& args, double products) {
  const double pairs = static_cast<double>(args.batch * args.heads) *
                       static_cast<double>(args.queries) * static_cast<double>(args.keys);
  const double counted =
      args.causal != 0 && args.sequences == 0 && args.keys == args.queries
          ? 0.5 * pairs + 32.0 * static_cast<double>(args.batch * args.heads * args.queries)
          : pairs;
  return 2.0 * products * counted * static_cast<double>(std::max(args.dim, args.value_dim) + 8);
}

template <class T>
void forward(const KernelCall& call) {
  const auto& args = call.as<AttentionArgs>();
  const std::int64_t blocks = blocks_of(args, false);
  Launch(call, metal::kernel<T>(kForward[width_of(args)]))
      .constant(0, in_fours<T>(args, call))
      .constant(1, call.in[4] != nullptr)
      .constant(2, static_cast<std::uint32_t>(args.mask_kind))
      .buffers()
      .bytes(10, blocks)
      .in_parts()
      .operations(operations_of(args, 2))
      .groups(blocks * args.heads)
      .threads(kThreads)
      .run();
}

std::size_t backward_workspace(const void* p) {
  const auto& args = *static_cast<const AttentionArgs*>(p);
  return static_cast<std::size_t>(args.batch * args.queries * args.heads) * sizeof(float);
}

template <class T>
void backward(const KernelCall& call) {
  const auto& args = call.as<AttentionArgs>();
  const std::int64_t rows = args.batch * args.queries * args.heads;
  Launch(call, metal::kernel<T>("attention_dots"))
      .input(0, call.in[7])
      .input(1, call.in[9])
      .output(2, call.workspace)
      .bytes(3, args)
      .in_parts()
      .groups(ceil_div(rows, kDotRows))
      .threads(kDotRows * metal::kSimd)
      .run();
  // in: q, k, v, mask, sinks, starts, key_starts, y, lse, dy.
  const auto launch = [&](const char* name) {
    Launch made(call, metal::kernel<T>(name));
    made.constant(0, in_fours<T>(args, call))
        .constant(2, static_cast<std::uint32_t>(args.mask_kind))
        .input(0, call.in[0])
        .input(1, call.in[1])
        .input(2, call.in[2])
        .input(3, call.in[3])
        .input(4, call.in[9])
        .input(5, call.in[5])
        .input(6, call.in[6])
        .input(7, call.in[8])
        .input(8, call.workspace)
        .in_parts();
    return made;
  };
  const int width = width_of(args);
  const std::int64_t blocks = blocks_of(args, false);
  if (rows != 0) {
    launch(kQueriesBack[width])
        .output(9, call.out[0])
        .bytes(10, args)
        .bytes(11, blocks)
        .operations(operations_of(args, 3))
        .groups(blocks * args.heads)
        .threads(kThreads)
        .run();
  }
  const auto keys_back = [&](const char* name, double products) {
    launch(name)
        .output(9, call.out[1])
        .output(10, call.out[2])
        .bytes(11, args)
        .operations(operations_of(args, products))
        .groups(blocks_of(args, true) * args.key_heads)
        .threads(kThreads)
        .run();
  };
  if (args.batch * args.keys != 0) {
    if (width == 2) {
      keys_back("attention_bwd_values256", 2);
      keys_back("attention_bwd_keys256", 3);
    } else {
      keys_back(width == 0 ? "attention_bwd_both64" : "attention_bwd_both128", 4);
    }
  }
  if (call.out[3] != nullptr) {
    Launch(call, metal::kernel("attention_bwd_sinks"))
        .input(0, call.in[4])
        .input(1, call.in[8])
        .input(2, call.workspace)
        .output(3, call.out[3])
        .bytes(4, args)
        .groups(args.heads)
        .threads(256)
        .run();
  }
}

template <class T>
void add_kernels(KernelRegistry& registry) {
  const std::string type = name_of(kDType<T>);
  registry.add(Backend::kMetal, "attention_fwd_" + type, forward<T>);
  registry.add(Backend::kMetal, "attention_bwd_" + type, backward<T>, backward_workspace);
}

}  // namespace

void register_attention_metal(KernelRegistry& registry) {
  add_kernels<float>(registry);
  add_kernels<F16>(registry);
  add_kernels<BF16>(registry);
}

}  // namespace mlxtape::ops

#endif
