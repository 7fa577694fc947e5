// Metal kernels of attention_step (formula: mlxtape/ops/attention_step.h).
//
// A group of four simdgroups has up to eight queries that share a key head, and a split of the keys; a simdgroup takes eight
// keys at a time. How many splits there may be follows from the shape, and with it the grid; how long they are from the
// sequence's length. They leave their part of every row, and a second kernel joins them in order.
//
// Nothing but the queries and, at the end, the simdgroups' results goes through threadgroup memory. Scores [keys, queries] are
// keys · queriesᵀ: a product does not mind in which order channels are summed, so a lane reads a pack of 16 bytes of a key and
// gives it to several products as if it were the pairs that belong to them. They lie as the second factor of
// sums [channels, queries] += valuesᵀ · weights needs them, for which a lane reads a pack of channels of two keys.
//
// Bound by memory. 8 KB of threadgroup memory and about 120 registers a thread for heads of 256 channels, 4 KB and 80 for 128.
#include "attention_step_args.h"

struct AttentionStepCut {
  int32_t group, rows;    // heads that share keys; their queries, row t·group + member
  int32_t tiles, splits;  // of the rows, of the keys
};

#ifdef __METAL_VERSION__

#include "backends/metal/device/fragments.h"
#include "backends/metal/device/rows.h"

constant bool packs [[function_constant(0)]];  // all rows are whole packs
constant bool has_sinks [[function_constant(1)]];

enum { kStepRows = 8, kStepSimds = 4, kStepKeys = 64 };  // splits are multiples of kStepKeys

// Keys [first, last) of a sequence count for one of its queries; the new ones are those from `before` on.
struct StepSpan {
  int first, before, last;
  int each, used;  // keys of a split, splits that have any
};
inline StepSpan step_span(constant AttentionStepArgs& args, constant AttentionStepCut& cut,
                          device const int* lengths, long b) {
  const int tokens = int(args.tokens), window = int(args.window);
  StepSpan span;
  span.before = min(max(lengths[b], 0), int(args.capacity) - tokens);
  span.first = window == 0 ? 0 : max(span.before + 1 - window, 0);
  span.last = span.before + tokens;
  const int share = (span.last - span.first + cut.splits - 1) / cut.splits;
  span.each = (share + kStepKeys - 1) / kStepKeys * kStepKeys;
  span.used = (span.last - span.first + span.each - 1) / span.each;
  return span;
}

// Where a group is. Keys are counted from its first one on: it has `count`, the new ones are those from `fresh` on.
struct StepPlace {
  long b, kh;
  long part;  // of row 0 among the parts
  int tile, from, count, fresh;
};
inline StepPlace step_place(constant AttentionStepArgs& args, constant AttentionStepCut& cut,
                            device const int* lengths, uint whole) {
  StepPlace p;
  const uint number = whole / uint(cut.tiles), head = number / uint(cut.splits);
  p.tile = int(whole % uint(cut.tiles));
  p.b = head / uint(args.key_heads);
  p.kh = head % uint(args.key_heads);
  p.part = long(number) * cut.rows;
  const StepSpan span = step_span(args, cut, lengths, p.b);
  p.from = span.first + int(number % uint(cut.splits)) * span.each;
  p.count = min(span.last - p.from, span.each);
  p.fresh = span.before - p.from;
  return p;
}

// The rows of keys or values that a group reads: old ones from the cache, new ones from where they came.
template <typename T>
struct StepRows {
  device T* cache;
  device const T* given;
  long step, given_step;
  int fresh;
  uint channels;

  inline device const T* row(int j) const {
    return j < fresh ? cache + j * step : given + (j - fresh) * given_step;
  }
  inline void store_new(int count, uint index, uint threads) const {
    for (int j = max(fresh, 0); j < count; ++j) {
      device const T* from = given + (j - fresh) * given_step;
      for (uint c = index; c < channels; c += threads) cache[j * step + c] = from[c];
    }
  }
  // A pack's channels of key j from c on, zeros where there are none.
  inline void load(int j, uint c, bool there, thread float* v) const {
    if (packs) {
      uint4 bits = uint4(0u);
      if (there && c < channels) bits = load_pack(row(j) + c);
      Pack<T>::unpack(bits, v);
    } else {
      for (int i = 0; i < Pack<T>::kCount; ++i) {
        v[i] = there && c + uint(i) < channels ? widen(row(j)[c + uint(i)]) : 0.0f;
      }
    }
  }
};
template <typename T>
inline StepRows<T> step_rows(constant AttentionStepArgs& args, StepPlace p, device T* cache,
                             device const T* given, constant int64_t* strides, long channels) {
  StepRows<T> rows;
  rows.cache = cache + ((p.b * args.capacity + p.from) * args.key_heads + p.kh) * channels;
  rows.given = given + p.b * strides[0] + p.kh * strides[2];
  rows.step = args.key_heads * channels;
  rows.given_step = strides[1];
  rows.fresh = p.fresh;
  rows.channels = uint(channels);
  return rows;
}

// The queries of a tile as second factors, times the scale: the fragments one after the other, a pair for each lane.
template <typename T>
inline void step_queries(constant AttentionStepArgs& args, constant AttentionStepCut& cut,
                         StepPlace p, device const T* q, threadgroup float* room, uint index,
                         uint threads) {
  constexpr uint kCount = Pack<T>::kCount, kHalf = kCount / 2;
  const uint fragments = (uint(args.dim) + 4 * kCount - 1) / (4 * kCount) * kHalf;
  for (uint i = index; i < fragments * 64; i += threads) {
    const uint f = i / 64, at = i / 2 % 32, row = fragment_row(at);
    const uint c = f / kHalf * (4 * kCount) + row / 2 * kCount + f % kHalf * 2 + row % 2;
    const int r = p.tile * kStepRows + int(fragment_column(at) + i % 2);
    float v = 0;
    if (r < cut.rows && c < uint(args.dim)) {
      const long head = p.kh * cut.group + r % cut.group;
      v = args.scale * widen(q[p.b * args.q[0] + r / cut.group * args.q[1] + head * args.q[2] + c]);
    }
    room[i] = v;
  }
}

// parts: [B·Hk, splits, rows], the largest score and the sum of the weights relative to it; then [B·Hk, splits, rows, Dv],
// the values' sums.
template <typename T, int kWidth>
[[kernel, max_total_threads_per_threadgroup(128)]] void attention_step_part(
    device const T* q [[buffer(0)]], device const T* k [[buffer(1)]],
    device const T* v [[buffer(2)]], device const int* lengths [[buffer(3)]],
    device T* keys [[buffer(4)]], device T* values [[buffer(5)]], device float* parts [[buffer(6)]],
    constant AttentionStepArgs& args [[buffer(7)]], constant AttentionStepCut& cut [[buffer(8)]],
    constant uint& first_group [[buffer(30)]], uint group [[threadgroup_position_in_grid]],
    uint index [[thread_position_in_threadgroup]], uint lane [[thread_index_in_simdgroup]],
    uint simd [[simdgroup_index_in_threadgroup]]) {
  constexpr int kCount = Pack<T>::kCount;
  constexpr int kSteps = kWidth / (4 * kCount), kUnits = kWidth / (8 * kCount);
  constexpr uint kThreads = kStepSimds * 32;
  threadgroup float room[kStepRows * kWidth];  // the queries, then the values' sums
  threadgroup float tops[kStepSimds][kStepRows], totals[kStepSimds][kStepRows];
  const StepPlace p = step_place(args, cut, lengths, group + first_group);
  const StepRows<T> key_rows = step_rows(args, p, keys, k, args.k, args.dim);
  const StepRows<T> value_rows = step_rows(args, p, values, v, args.v, args.value_dim);
  const uint dim = uint(args.dim), value_dim = uint(args.value_dim);
  const int count = max(p.count, 0);  // none: a split that the sequence is too short for
  if (count > 0 && p.tile == 0) {
    key_rows.store_new(count, index, kThreads);
    value_rows.store_new(count, index, kThreads);
  }
  step_queries(args, cut, p, q, room, index, kThreads);
  threadgroup_barrier(mem_flags::mem_threadgroup);

  const int row = int(fragment_row(lane)), column = int(fragment_column(lane));
  int starts[2], stops[2];  // the keys that count for this lane's queries
  float most[2], sum[2];
  for (int e = 0; e < 2; ++e) {
    const int stop = p.fresh + (p.tile * kStepRows + column + e) / cut.group + 1;
    starts[e] = args.window == 0 ? 0 : stop - int(args.window);
    stops[e] = min(stop, count);
    most[e] = -INFINITY;
    sum[e] = 0;
  }
  simdgroup_float8x8 sums[kUnits][kCount];
  for (int u = 0; u < kUnits; ++u) {
    for (int i = 0; i < kCount; ++i) set_fragment(sums[u][i], 0, 0);
  }
  simdgroup_float8x8 a, b, scores;
  float near[kCount], far[kCount];
  for (int j = 8 * int(simd); j < count; j += 8 * kStepSimds) {
    set_fragment(scores, 0, 0);
    for (int s = 0; s < kSteps; ++s) {
      if (uint(4 * kCount * s) >= dim) break;
      key_rows.load(j + row, uint(4 * kCount * s + kCount * (column / 2)), j + row < count, near);
      for (int i = 0; i < kCount / 2; ++i) {
        const uint at = (uint(s * kCount / 2 + i) * 32 + lane) * 2;
        set_fragment(a, near[2 * i], near[2 * i + 1]);
        set_fragment(b, room[at], room[at + 1]);
        simdgroup_multiply_accumulate(scores, a, b, scores);
      }
    }
    const float2 made = fragment_pair(scores);
    float weight[2], keep[2];
    for (int e = 0; e < 2; ++e) {
      const bool counts = j + row >= starts[e] && j + row < stops[e];
      const float score = counts ? made[e] : -INFINITY;
      const float top = max(most[e], column_max(score));
      keep[e] = top == most[e] ? 1.0f : exp_for<T>(most[e] - top);
      weight[e] = exp_for<T>(score - finite_reference(top));
      sum[e] = fma(sum[e], keep[e], weight[e]);
      most[e] = top;
    }
    set_fragment(b, weight[0], weight[1]);
    for (int u = 0; u < kUnits; ++u) {
      const uint c = uint(kCount * (8 * u + row));
      if (uint(8 * kCount * u) >= value_dim) break;
      value_rows.load(j + column, c, j + column < count, near);
      value_rows.load(j + column + 1, c, j + column + 1 < count, far);
      for (int i = 0; i < kCount; ++i) {
        set_fragment(a, near[i], far[i]);
        scale_fragment(sums[u][i], keep[0], keep[1]);
        simdgroup_multiply_accumulate(sums[u][i], a, b, sums[u][i]);
      }
    }
  }
  for (int e = 0; e < 2; ++e) {
    sum[e] = column_sum(sum[e]);
    if (row == 0) {
      tops[simd][column + e] = most[e];
      totals[simd][column + e] = sum[e];
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  float factor[2];
  for (int e = 0; e < 2; ++e) {
    float top = -INFINITY;
    for (int s = 0; s < kStepSimds; ++s) top = max(top, tops[s][column + e]);
    factor[e] = exp_for<T>(most[e] - finite_reference(top));
  }
  for (uint turn = 0; turn < kStepSimds; ++turn) {  // in order
    if (simd == turn) {
      for (int u = 0; u < kUnits; ++u) {
        for (int i = 0; i < kCount; ++i) {
          const float2 made = fragment_pair(sums[u][i]);
          for (int e = 0; e < 2; ++e) {
            const int at = (column + e) * kWidth + kCount * (8 * u + row) + i;
            room[at] = fma(factor[e], made[e], turn == 0 ? 0.0f : room[at]);
          }
        }
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
  const long stats = args.batch * args.key_heads * cut.splits * cut.rows;
  const int rows = count > 0 ? min(int(kStepRows), cut.rows - p.tile * kStepRows) : 0;
  const long first = p.part + p.tile * kStepRows;
  for (uint i = index; i < uint(rows) * value_dim; i += kThreads) {
    parts[2 * stats + first * args.value_dim + i] = room[i / value_dim * kWidth + i % value_dim];
  }
  if (int(index) < rows) {
    float top = -INFINITY, total = 0;
    for (int s = 0; s < kStepSimds; ++s) top = max(top, tops[s][index]);
    for (int s = 0; s < kStepSimds; ++s) {
      total = fma(exp_for<T>(tops[s][index] - finite_reference(top)), totals[s][index], total);
    }
    parts[2 * (first + index)] = top;
    parts[2 * (first + index) + 1] = total;
  }
}

// A group has a row of y, a thread every 128th channel of it, and a lane of each simdgroup two splits' weights.
template <typename T>
[[kernel, max_total_threads_per_threadgroup(128)]] void attention_step_join(
    device const float* parts [[buffer(0)]], device const int* lengths [[buffer(1)]],
    device const float* sinks [[buffer(2)]], device T* y [[buffer(3)]],
    constant AttentionStepArgs& args [[buffer(4)]], constant AttentionStepCut& cut [[buffer(5)]],
    constant uint& first_group [[buffer(30)]], uint group [[threadgroup_position_in_grid]],
    uint index [[thread_position_in_threadgroup]], uint lane [[thread_index_in_simdgroup]]) {
  const uint row = group + first_group;
  const uint h = row % uint(args.heads), token = row / uint(args.heads);
  const long b = token / uint(args.tokens), t = token % uint(args.tokens);
  const long stats = args.batch * args.key_heads * cut.splits * cut.rows;
  const long first = (b * args.key_heads + h / uint(cut.group)) * cut.splits * cut.rows +
                     t * cut.group + h % uint(cut.group);
  const uint used = uint(step_span(args, cut, lengths, b).used);
  float top[2], total[2];
  for (uint e = 0; e < 2; ++e) {
    const bool has = lane + 32 * e < used;
    const long at = 2 * (first + (lane + 32 * e) * cut.rows);
    top[e] = has ? parts[at] : -INFINITY;
    total[e] = has ? parts[at + 1] : 0.0f;
  }
  const float sink = has_sinks ? sinks[h] : -INFINITY;
  const float shift = finite_reference(max(sink, simd_max(max(top[0], top[1]))));
  float weight[2];
  for (int e = 0; e < 2; ++e) weight[e] = exp_for<T>(top[e] - shift);
  const float all = simd_sum(fma(weight[0], total[0], weight[1] * total[1])) +
                    (sink == -INFINITY ? 0.0f : exp_for<T>(sink - shift));
  const uint width = uint(args.value_dim);
  float sum[2] = {0, 0};
  for (uint s = 0; s < used; ++s) {
    const float share = simd_shuffle(s < 32 ? weight[0] : weight[1], ushort(s % 32));
    const long from = 2 * stats + (first + s * cut.rows) * width;
    for (uint e = 0; e < 2; ++e) {
      const uint c = index + 128 * e;
      if (c < width) sum[e] = fma(share, parts[from + c], sum[e]);
    }
  }
  for (uint e = 0; e < 2; ++e) {
    const uint c = index + 128 * e;
    if (c < width) y[long(row) * width + c] = narrow<T>(all == 0 ? 0.0f : sum[e] / all);
  }
}

// ---- names ----

#define MAKE(name, ...) template [[host_name(name)]] [[kernel]] decltype(__VA_ARGS__) __VA_ARGS__;
#define MAKE_TYPE(type, T)                                      \
  MAKE("attention_step_64_" type, attention_step_part<T, 64>)   \
  MAKE("attention_step_128_" type, attention_step_part<T, 128>) \
  MAKE("attention_step_256_" type, attention_step_part<T, 256>) \
  MAKE("attention_step_join_" type, attention_step_join<T>)
MAKE_TYPE("f32", float)
MAKE_TYPE("f16", half)
MAKE_TYPE("bf16", bf16)

#else

#include <algorithm>

#include "backends/metal/launch.h"

namespace mlxtape::ops {

namespace {

using metal::Launch;

constexpr std::int64_t kThreads = 128;
constexpr std::int64_t kRows = 8;         // queries of a group
constexpr std::int64_t kLeastKeys = 64;   // of a split
constexpr std::int64_t kMostSplits = 64;  // two for a lane of the join
constexpr std::int64_t kWanted = 64;      // groups that keep a chip busy
constexpr std::int64_t kLeastSplits = 4;  // even out sequences of different lengths

AttentionStepCut cut_of(const AttentionStepArgs& args) {
  const std::int64_t group = args.heads / args.key_heads, rows = args.tokens * group;
  const std::int64_t tiles = ceil_div(rows, kRows);
  const std::int64_t wanted = kWanted / (args.batch * args.key_heads * tiles);
  const std::int64_t splits =
      std::min(std::clamp(wanted, kLeastSplits, kMostSplits), ceil_div(args.capacity, kLeastKeys));
  return {static_cast<std::int32_t>(group), static_cast<std::int32_t>(rows),
          static_cast<std::int32_t>(tiles), static_cast<std::int32_t>(splits)};
}

std::size_t workspace(const void* p) {
  const auto& args = *static_cast<const AttentionStepArgs*>(p);
  const AttentionStepCut cut = cut_of(args);
  const std::int64_t rows = args.batch * args.key_heads * cut.splits * cut.rows;
  return static_cast<std::size_t>(rows * (args.value_dim + 2)) * sizeof(float);
}

// Whether every row begins at a whole pack and ends with one.
template <class T>
bool in_packs(const AttentionStepArgs& args, const KernelCall& call) {
  constexpr std::int64_t kPack = 16 / sizeof(T);
  bool whole = args.dim % kPack == 0 && args.value_dim % kPack == 0;
  for (const auto& strides : {args.k, args.v}) {
    for (int i = 0; i < 3; ++i) whole = whole && strides[i] % kPack == 0;
  }
  for (const void* p : {call.in[1], call.in[2]}) whole = whole && metal::is_aligned(p);
  for (const void* p : {call.out[1], call.out[2]}) whole = whole && metal::is_aligned(p);
  return whole;
}

template <class T>
void attention_step(const KernelCall& call) {
  const auto& args = call.as<AttentionStepArgs>();
  const AttentionStepCut cut = cut_of(args);
  const std::int64_t widest = std::max(args.dim, args.value_dim);
  const char* name = widest <= 64    ? "attention_step_64"
                     : widest <= 128 ? "attention_step_128"
                                     : "attention_step_256";
  const std::int64_t queries = args.batch * args.tokens * args.heads;
  Launch(call, metal::kernel<T>(name))
      .constant(0, in_packs<T>(args, call))
      .input(0, call.in[0])
      .input(1, call.in[1])
      .input(2, call.in[2])
      .input(3, call.in[3])
      .output(4, call.out[1])
      .output(5, call.out[2])
      .output(6, call.workspace)
      .bytes(7, args)
      .bytes(8, cut)
      .in_parts()
      .operations(2.0 * static_cast<double>(queries * args.capacity * (args.dim + args.value_dim)))
      .groups(args.batch * args.key_heads * cut.splits * cut.tiles)
      .threads(kThreads)
      .run();
  Launch(call, metal::kernel<T>("attention_step_join"))
      .constant(1, call.in[4] != nullptr)
      .input(0, call.workspace)
      .input(1, call.in[3])
      .input(2, call.in[4])
      .output(3, call.out[0])
      .bytes(4, args)
      .bytes(5, cut)
      .in_parts()
      .groups(queries)
      .threads(kThreads)
      .run();
}

}  // namespace

void register_attention_step_metal(KernelRegistry& registry) {
  registry.add(Backend::kMetal, "attention_step_f32", attention_step<float>, workspace);
  registry.add(Backend::kMetal, "attention_step_f16", attention_step<F16>, workspace);
  registry.add(Backend::kMetal, "attention_step_bf16", attention_step<BF16>, workspace);
}

}  // namespace mlxtape::ops

#endif
