// Metal kernels of reduce (formulas and layout: mlxtape/ops/reduce.h).
//
// One look at x, whatever the result: what was seen of it is a state of one to three numbers, and two states are joined.
// Which state that is, a pipeline learns when it is made. Rows (inner = 1) by a simdgroup or a group each; otherwise lanes
// are neighbouring results, four of them a lane where addresses allow it, and the eight simdgroups of a group share the
// rows. Where that is too little work side by side, what meets in one result is cut into chunks, by the shape alone, and
// a second kernel joins their states in one order. Backward is one pass, a pack of 16 bytes a thread. 256 threads a group;
// at most 12 KB of threadgroup memory (columns), some 30 registers a thread. Bound by memory.
#ifndef __METAL_VERSION__
#include <cstdint>
#endif

enum ReduceFold {
  kReduceSum,
  kReduceCountEqual,
  kReduceMax,
  kReduceMin,
  kReduceSumExp,
  kReduceMoments
};
enum ReduceSpread { kSpreadSum, kSpreadExtreme, kSpreadLogsumexp, kSpreadVar };

// x [outer, count, inner], each result made of chunks of each elements.
struct ReducePlan {
  int64_t outer, count, inner;
  int64_t each, chunks;
  float divisor;
  uint32_t unused;
};
static_assert(sizeof(ReducePlan) == 48, "host and device must agree");

#ifdef __METAL_VERSION__

#include "backends/metal/device/exp.h"
#include "backends/metal/device/index.h"

constant uint fold [[function_constant(0)]];     // ReduceFold
constant bool keeps [[function_constant(1)]];    // the states, for a second kernel
constant bool packs [[function_constant(2)]];    // rows are whole packs; columns: four a lane
constant bool by_simd [[function_constant(3)]];  // a simdgroup a row, else a group
constant uint spread [[function_constant(4)]];   // ReduceSpread

// ---- states: of sums and counts a; of extremes a; of exponentials the largest and the sum relative to it; of moments how
// many, their mean and the sum of squares about it ----

struct State {
  float a, b, c;
};

inline float larger(float x, float y) { return x != x || x > y ? x : y; }
inline float smaller(float x, float y) { return x != x || x < y ? x : y; }
// Any number serves while all are -inf, and -inf - (-inf) is none.
inline float reference(float m) { return m == -INFINITY ? 0.0f : m; }

inline State nothing() {
  State s;
  s.a = fold == kReduceMax || fold == kReduceSumExp ? -INFINITY
        : fold == kReduceMin                        ? INFINITY
                                                    : 0.0f;
  s.b = 0;
  s.c = 0;
  return s;
}

template <typename T>
inline State join(State x, State y) {
  State s = x;
  if (fold == kReduceMax) {
    s.a = larger(x.a, y.a);
  } else if (fold == kReduceMin) {
    s.a = smaller(x.a, y.a);
  } else if (fold == kReduceSumExp) {
    s.a = larger(x.a, y.a);
    const float at = reference(s.a);
    s.b = x.b * exp_for<T>(x.a - at) + y.b * exp_for<T>(y.a - at);
  } else if (fold == kReduceMoments) {
    // Joined with d = the difference of the means and w = the second's share: nothing cancels.
    if (x.a == 0) return y;  // also where d overflows
    s.a = x.a + y.a;
    const float w = y.a / s.a;
    const float d = y.b - x.b;
    s.b = fma(d, w, x.b);
    s.c = fma(d * (x.a * w), d, x.c + y.c);
  } else {
    s.a = x.a + y.a;
  }
  return s;
}

// Takes n numbers, at most 8.
template <typename T>
inline void take(thread State& s, thread const float* v, int n, float y) {
  if (fold == kReduceMax) {
    for (int i = 0; i < n; ++i) s.a = larger(s.a, v[i]);
  } else if (fold == kReduceMin) {
    for (int i = 0; i < n; ++i) s.a = smaller(s.a, v[i]);
  } else if (fold == kReduceSumExp) {
    float m = s.a;
    for (int i = 0; i < n; ++i) m = larger(m, v[i]);
    const float at = reference(m);
    float sum = m == s.a ? s.b : s.b * exp_for<T>(s.a - at);
    for (int i = 0; i < n; ++i) sum += exp_for<T>(v[i] - at);
    s.a = m;
    s.b = sum;
  } else if (fold == kReduceMoments) {
    State few;
    float mean = 0;
    for (int i = 0; i < n; ++i) mean += v[i];
    mean /= float(n);
    few.a = float(n);
    few.b = mean;
    few.c = 0;
    for (int i = 0; i < n; ++i) few.c = fma(v[i] - mean, v[i] - mean, few.c);
    s = join<T>(s, few);
  } else if (fold == kReduceCountEqual) {
    for (int i = 0; i < n; ++i) s.a += v[i] == y ? 1.0f : 0.0f;
  } else {
    for (int i = 0; i < n; ++i) s.a += v[i];
  }
}

// Over the lanes of a simdgroup, in all of them.
template <typename T>
inline State simd_joined(State s) {
  if (fold == kReduceMax || fold == kReduceMin || fold == kReduceSumExp) {
    const bool has_none = simd_any(s.a != s.a);
    const float extreme = fold == kReduceMin ? simd_min(s.a) : simd_max(s.a);
    const float own = s.a;
    s.a = has_none ? NAN : extreme;
    if (fold == kReduceSumExp) s.b = simd_sum(s.b * exp_for<T>(own - reference(s.a)));
  } else if (fold == kReduceMoments) {
    const float n = simd_sum(s.a);
    const float mean = simd_sum(s.a * s.b) / max(n, 1.0f);
    const float d = s.b - mean;
    s.c = simd_sum(fma(s.a * d, d, s.c));
    s.a = n;
    s.b = mean;
  } else {
    s.a = simd_sum(s.a);
  }
  return s;
}

// ---- what becomes of a state ----

// stats: the largest numbers and the sums, or the means; or, kept, the states' parts, each a plane of [outer, chunks, inner].
template <typename T>
inline void finish(State s, long i, device T* y, device float* stats, constant ReducePlan& plan) {
  const long results = plan.outer * plan.inner;
  if (keeps) {
    const long plane = results * plan.chunks;
    stats[i] = s.a;
    if (fold == kReduceSumExp || fold == kReduceMoments) stats[plane + i] = s.b;
    if (fold == kReduceMoments) stats[2 * plane + i] = s.c;
    return;
  }
  float value = s.a / plan.divisor;
  if (fold == kReduceSumExp) {
    stats[i] = s.a;
    stats[results + i] = s.b;
    value = fabs(s.a) == INFINITY ? s.a : s.a + precise::log(s.b);
  } else if (fold == kReduceMoments) {
    stats[i] = s.b;
    value = s.c / plan.divisor;
  } else if (fold == kReduceCountEqual) {
    stats[i] = s.a;
    return;
  }
  y[i] = narrow<T>(value);
}

#define REDUCE_PLACE                                                                          \
  constant uint &first_group [[buffer(30)]], uint group [[threadgroup_position_in_grid]],     \
      uint index [[thread_position_in_threadgroup]], uint lane [[thread_index_in_simdgroup]], \
      uint simd [[simdgroup_index_in_threadgroup]]

// A row, or a chunk of one.
template <typename T>
[[kernel, max_total_threads_per_threadgroup(256)]] void reduce_rows(
    device const T* x [[buffer(0)]], device const T* about [[buffer(1)]], device T* y [[buffer(2)]],
    device float* stats [[buffer(3)]], constant ReducePlan& plan [[buffer(4)]], REDUCE_PLACE) {
  threadgroup float room[3][8];
  const long whole = long(group) + first_group;
  const long item = by_simd ? whole * 8 + simd : whole;
  long chunk = 0;
  const long row = divide(item, plan.chunks, chunk);
  const bool in = row < plan.outer;
  const long first = chunk * plan.each;
  const uint n = in ? uint(min(plan.each, plan.count - first)) : 0;
  const uint rank = by_simd ? lane : index, threads = by_simd ? 32 : 256;
  device const T* from = x + row * plan.count + first;
  const float equal = fold == kReduceCountEqual && in ? widen(about[row]) : 0.0f;
  State s = nothing();
  float v[Pack<T>::kCount];
  if (packs) {
    for (uint p = rank; p < n / Pack<T>::kCount; p += threads) {
      Pack<T>::unpack(load_pack(from + p * Pack<T>::kCount), v);
      take<T>(s, v, Pack<T>::kCount, equal);
    }
  } else {
    for (uint i = rank; i < n; i += threads) {
      v[0] = widen(from[i]);
      take<T>(s, v, 1, equal);
    }
  }
  s = simd_joined<T>(s);
  if (!by_simd) {
    if (lane == 0) {
      room[0][simd] = s.a;
      room[1][simd] = s.b;
      room[2][simd] = s.c;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    s = nothing();
    if (lane < 8) {
      s.a = room[0][lane];
      s.b = room[1][lane];
      s.c = room[2][lane];
    }
    s = simd_joined<T>(s);
  }
  if (in && rank == 0) finish(s, item, y, stats, plan);
}

// Columns: a group has 32 or 128 of them, of one chunk of the rows.
template <typename T>
[[kernel, max_total_threads_per_threadgroup(256)]] void reduce_columns(
    device const T* x [[buffer(0)]], device const T* about [[buffer(1)]], device T* y [[buffer(2)]],
    device float* stats [[buffer(3)]], constant ReducePlan& plan [[buffer(4)]], REDUCE_PLACE) {
  threadgroup float room[8][4][3][32];
  const uint columns = packs ? 4 : 1;
  const long tiles = (plan.inner + 32 * columns - 1) / (32 * columns);
  long tile = 0, chunk = 0;
  const long outer = divide(divide(long(group) + first_group, tiles, tile), plan.chunks, chunk);
  const long column = (tile * 32 + lane) * columns;
  const bool in = column < plan.inner;
  const long end = in ? min((chunk + 1) * plan.each, long(plan.count)) : 0;
  State s[4];
  float equal[4] = {0, 0, 0, 0};
  for (uint k = 0; k < columns; ++k) {
    s[k] = nothing();
    if (fold == kReduceCountEqual && in) equal[k] = widen(about[outer * plan.inner + column + k]);
  }
  for (long r = chunk * plan.each + simd; r < end; r += 8) {
    device const T* from = x + (outer * plan.count + r) * plan.inner + column;
    float v[4];
    if (packs) {
      const float4 four = load_four(from);
      for (int k = 0; k < 4; ++k) v[k] = four[k];
    } else {
      v[0] = widen(from[0]);
    }
    for (uint k = 0; k < columns; ++k) take<T>(s[k], v + k, 1, equal[k]);
  }
  for (uint k = 0; k < columns; ++k) {
    room[simd][k][0][lane] = s[k].a;
    room[simd][k][1][lane] = s[k].b;
    room[simd][k][2][lane] = s[k].c;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (simd < columns && in) {  // one simdgroup for each of a lane's columns
    State all = nothing();
    for (uint share = 0; share < 8; ++share) {
      State part;
      part.a = room[share][simd][0][lane];
      part.b = room[share][simd][1][lane];
      part.c = room[share][simd][2][lane];
      if (share == 0) {
        all = part;
      } else {
        all = join<T>(all, part);
      }
    }
    finish(all, (outer * plan.chunks + chunk) * plan.inner + column + simd, y, stats, plan);
  }
}

// The states of chunks, joined: lanes are neighbouring results, the simdgroups share the chunks.
template <typename T>
[[kernel, max_total_threads_per_threadgroup(256)]] void reduce_join(
    device const float* parts [[buffer(0)]], device T* y [[buffer(1)]],
    device float* stats [[buffer(2)]], constant ReducePlan& plan [[buffer(3)]], REDUCE_PLACE) {
  threadgroup float room[8][3][32];
  const long i = (long(group) + first_group) * 32 + lane;
  const bool in = i < plan.outer * plan.inner;
  long inner = 0;
  const long outer = divide(i, plan.inner, inner);
  const long plane = plan.outer * plan.inner * plan.chunks;
  State all = nothing();
  for (long c = simd; c < plan.chunks; c += 8) {
    if (!in) continue;
    const long at = (outer * plan.chunks + c) * plan.inner + inner;
    State part;
    part.a = parts[at];
    part.b = fold == kReduceSumExp || fold == kReduceMoments ? parts[plane + at] : 0.0f;
    part.c = fold == kReduceMoments ? parts[2 * plane + at] : 0.0f;
    all = join<T>(all, part);
  }
  room[simd][0][lane] = all.a;
  room[simd][1][lane] = all.b;
  room[simd][2][lane] = all.c;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (simd == 0 && in) {
    for (uint share = 1; share < 8; ++share) {
      State part;
      part.a = room[share][0][lane];
      part.b = room[share][1][lane];
      part.c = room[share][2][lane];
      if (share < plan.chunks) all = join<T>(all, part);
    }
    finish(all, i, y, stats, plan);
  }
}

// ---- sums of whole numbers, which wrap around ----

// T: as wide as the numbers, without a sign. A row a group, or 32 columns; 64 bits have no simd_sum.
template <typename T>
[[kernel, max_total_threads_per_threadgroup(256)]] void reduce_whole(
    device const T* x [[buffer(0)]], device T* y [[buffer(1)]],
    constant ReducePlan& plan [[buffer(2)]], REDUCE_PLACE) {
  threadgroup T room[8][32];
  const bool is_row = plan.inner == 1;
  const long tiles = is_row ? 1 : (plan.inner + 31) / 32;
  long tile = 0;
  const long outer = divide(long(group) + first_group, tiles, tile);
  const long column = is_row ? 0 : tile * 32 + lane;
  const long end = column < plan.inner ? long(plan.count) : 0;
  T sum = 0;
  for (long r = is_row ? index : simd; r < end; r += is_row ? 256 : 8) {
    sum += x[(outer * plan.count + r) * plan.inner + column];
  }
  room[simd][lane] = sum;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (simd == 0) {
    for (uint s = 1; s < 8; ++s) sum += room[s][lane];
    room[0][lane] = sum;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (is_row) {
    if (index == 0) {
      for (uint s = 1; s < 32; ++s) sum += room[0][s];
      y[outer] = sum;
    }
  } else if (simd == 0 && column < plan.inner) {
    y[outer * plan.inner + column] = sum;
  }
}

// ---- backward ----

// What a result gives to each of its elements: dx = apply(x, of(result)).
struct Given {
  float a, b;
};
template <typename T>
inline Given given_of(device const T* dy, device const T* y, device const float* stats,
                      constant ReducePlan& plan, long r) {
  const float g = widen(dy[r]);
  Given p;
  p.b = 0;
  if (spread == kSpreadExtreme) {
    p.a = g / stats[r];
    p.b = widen(y[r]);
  } else if (spread == kSpreadLogsumexp) {
    p.a = g / stats[plan.outer * plan.inner + r];
    p.b = stats[r];
  } else if (spread == kSpreadVar) {
    p.a = 2.0f * g / plan.divisor;
    p.b = stats[r];
  } else {
    p.a = g / plan.divisor;
  }
  return p;
}
template <typename T>
inline float apply_given(float x, Given p) {
  if (spread == kSpreadExtreme) return x == p.b ? p.a : p.b != p.b ? p.b : 0.0f;  // NaN equals none
  if (spread == kSpreadLogsumexp) return p.a * exp_for<T>(x - p.b);
  if (spread == kSpreadVar) return p.a * (x - p.b);
  return p.a;
}

template <typename T>
[[kernel, max_total_threads_per_threadgroup(256)]] void reduce_spread(
    device const T* dy [[buffer(0)]], device const T* x [[buffer(1)]],
    device const T* y [[buffer(2)]], device const float* stats [[buffer(3)]],
    device T* dx [[buffer(4)]], constant ReducePlan& plan [[buffer(5)]], REDUCE_PLACE) {
  const long each = packs ? long(Pack<T>::kCount) : 1;
  const long i = ((long(group) + first_group) * 256 + index) * each;
  if (i >= plan.outer * plan.count * plan.inner) return;
  long inner = 0, in_row = 0;
  const long row = divide(i, plan.inner, inner);
  const long r = divide(row, plan.count, in_row) * plan.inner + inner;
  if (packs) {
    float v[Pack<T>::kCount];
    if (spread != kSpreadSum) Pack<T>::unpack(load_pack(x + i), v);
    Given p = given_of(dy, y, stats, plan, r);
    for (int k = 0; k < Pack<T>::kCount; ++k) {
      if (k > 0 && plan.inner != 1) p = given_of(dy, y, stats, plan, r + k);
      v[k] = apply_given<T>(spread != kSpreadSum ? v[k] : 0.0f, p);
    }
    store_pack(Pack<T>::pack(v), dx + i);
  } else {
    const float v = spread != kSpreadSum ? widen(x[i]) : 0.0f;
    dx[i] = narrow<T>(apply_given<T>(v, given_of(dy, y, stats, plan, r)));
  }
}

#define MAKE(name, function) template [[host_name(name)]] [[kernel]] decltype(function) function;
#define MAKE_ALL(type, T)                         \
  MAKE("reduce_rows_" type, reduce_rows<T>)       \
  MAKE("reduce_columns_" type, reduce_columns<T>) \
  MAKE("reduce_join_" type, reduce_join<T>)       \
  MAKE("reduce_spread_" type, reduce_spread<T>)
MAKE_ALL("f32", float)
MAKE_ALL("f16", half)
MAKE_ALL("bf16", bf16)
MAKE("reduce_whole_u32", reduce_whole<uint>)
MAKE("reduce_whole_u64", reduce_whole<ulong>)

#else

#include <algorithm>
#include <string>

#include "backends/metal/launch.h"
#include "reduce_args.h"

namespace mlxtape::ops {

namespace {

using metal::Launch;

constexpr std::int64_t kThreads = 256;
constexpr std::int64_t kShares = 8;          // simdgroups of a group
constexpr std::int64_t kBySimdgroup = 1024;  // elements of a row that one simdgroup has
constexpr std::int64_t kEnough = 256;        // groups that keep all cores busy
constexpr std::int64_t kLeastOfRow = 8192;   // elements of a chunk
constexpr std::int64_t kLeastOfColumn = 128;
constexpr std::int64_t kMostOfThread = 4096;

template <class T>
constexpr std::int64_t kPack = 16 / sizeof(T);

std::int64_t results(const ReduceArgs& args) { return args.outer * args.inner; }

int parts_of(ReduceFold fold) { return fold == kReduceMoments ? 3 : fold == kReduceSumExp ? 2 : 1; }

// How what meets in one result is cut: by the shape alone, in the widest form of columns.
ReducePlan plan_of(const ReduceArgs& args) {
  const bool is_row = args.inner == 1;
  const std::int64_t side_by_side =
      is_row ? args.outer : args.outer * ceil_div(args.inner, 4 * metal::kSimd);
  const std::int64_t count = std::max<std::int64_t>(args.count, 1);
  std::int64_t chunks = std::min(kEnough / std::max<std::int64_t>(side_by_side, 1),
                                 ceil_div(count, is_row ? kLeastOfRow : kLeastOfColumn));
  // No thread adds up more than some 4096 numbers one after another.
  chunks = std::max(chunks, ceil_div(count, kMostOfThread * (is_row ? kThreads : kShares)));
  const std::int64_t each = ceil_div(ceil_div(count, chunks), 8) * 8;  // whole packs
  return {args.outer,
          args.count,
          args.inner,
          each,
          ceil_div(count, each),
          static_cast<float>(args.divisor),
          0};
}

// Of the chunks' states, and of the counts that extremes need.
std::size_t states_bytes(const ReduceArgs& args, int parts) {
  const std::int64_t chunks = plan_of(args).chunks;
  return chunks == 1 ? 0 : static_cast<std::size_t>(parts * results(args) * chunks) * sizeof(float);
}
template <ReduceFold kFold>
std::size_t workspace(const void* args) {
  return states_bytes(*static_cast<const ReduceArgs*>(args), parts_of(kFold));
}
std::size_t extreme_workspace(const void* p) {
  const auto& args = *static_cast<const ReduceArgs*>(p);
  return states_bytes(args, 1) + static_cast<std::size_t>(results(args)) * sizeof(float);
}

// states: of the chunks, in scratch memory.
template <class T>
void fold_all(const KernelCall& call, ReduceFold fold, const void* x, const void* about, void* y,
              void* stats, void* states) {
  const ReducePlan plan = plan_of(call.as<ReduceArgs>());
  const bool is_cut = plan.chunks > 1;
  const bool is_row = plan.inner == 1;
  const bool packs = is_row ? plan.count % kPack<T> == 0 && metal::is_aligned(x)
                            : plan.inner % 4 == 0 && metal::is_aligned(x);
  const bool by_simd = is_row && plan.count <= kBySimdgroup;
  const std::int64_t tiles = ceil_div(plan.inner, (packs ? 4 : 1) * metal::kSimd);
  const std::int64_t items = plan.outer * plan.chunks;
  Launch launch(call, metal::kernel<T>(is_row ? "reduce_rows" : "reduce_columns"));
  launch.constant(0, static_cast<std::uint32_t>(fold)).constant(1, is_cut).constant(2, packs);
  if (is_row) launch.constant(3, by_simd);
  launch.input(0, x)
      .input(1, about)
      .output(2, is_cut ? nullptr : y)
      .output(3, is_cut ? states : stats)
      .bytes(4, plan)
      .in_parts()
      .groups(!is_row   ? items * tiles
              : by_simd ? ceil_div(items, kShares)
                        : items)
      .threads(kThreads)
      .run();
  if (!is_cut) return;
  Launch(call, metal::kernel<T>("reduce_join"))
      .constant(0, static_cast<std::uint32_t>(fold))
      .constant(1, false)
      .input(0, states)
      .output(1, y)
      .output(2, stats)
      .bytes(3, plan)
      .in_parts()
      .groups(ceil_div(results(call.as<ReduceArgs>()), metal::kSimd))
      .threads(kThreads)
      .run();
}

template <class T, ReduceFold kFold>
void forward(const KernelCall& call) {
  void* stats = call.out.size() > 1 ? call.out[1] : nullptr;
  fold_all<T>(call, kFold, call.in[0], nullptr, call.out[0], stats, call.workspace);
}

template <class T>
void whole_forward(const KernelCall& call) {
  const ReducePlan plan = plan_of(call.as<ReduceArgs>());
  Launch(call, metal::kernel<T>("reduce_whole"))
      .input(0, call.in[0])
      .output(1, call.out[0])
      .bytes(2, plan)
      .in_parts()
      .groups(plan.outer * (plan.inner == 1 ? 1 : ceil_div(plan.inner, metal::kSimd)))
      .threads(kThreads)
      .run();
}

// in: dy, and x and what the forward kept of the results.
template <class T, ReduceSpread kSpread>
void backward(const KernelCall& call) {
  const auto& args = call.as<ReduceArgs>();
  const ReducePlan plan = plan_of(args);
  const void* x = kSpread == kSpreadSum ? nullptr : call.in[1];
  const void* y = kSpread == kSpreadExtreme ? call.in[2] : nullptr;
  const void* stats = kSpread == kSpreadSum ? nullptr : call.in[2];
  if (kSpread == kSpreadExtreme) {
    auto* counts = static_cast<char*>(call.workspace) + states_bytes(args, 1);
    fold_all<T>(call, kReduceCountEqual, x, y, nullptr, counts, call.workspace);
    stats = counts;
  }
  const bool whole = args.inner == 1 ? args.count % kPack<T> == 0 : args.inner % kPack<T> == 0;
  const bool packs = whole && metal::is_aligned(x) && metal::is_aligned(call.out[0]);
  const std::int64_t size = args.outer * args.count * args.inner;
  Launch(call, metal::kernel<T>("reduce_spread"))
      .constant(2, packs)
      .constant(4, static_cast<std::uint32_t>(kSpread))
      .input(0, call.in[0])
      .input(1, x)
      .input(2, y)
      .input(3, stats)
      .output(4, call.out[0])
      .bytes(5, plan)
      .in_parts()
      .groups(ceil_div(size, (packs ? kPack<T> : 1) * kThreads))
      .threads(kThreads)
      .run();
}

template <class T>
void add_kernels(KernelRegistry& registry) {
  const std::string type = name_of(kDType<T>);
  const auto add = [&](const char* name, KernelFn fn, WorkspaceFn scratch) {
    registry.add(Backend::kMetal, name + type, fn, scratch);
  };
  add("sum_fwd_", forward<T, kReduceSum>, workspace<kReduceSum>);
  add("max_fwd_", forward<T, kReduceMax>, workspace<kReduceMax>);
  add("min_fwd_", forward<T, kReduceMin>, workspace<kReduceMin>);
  add("logsumexp_fwd_", forward<T, kReduceSumExp>, workspace<kReduceSumExp>);
  add("var_fwd_", forward<T, kReduceMoments>, workspace<kReduceMoments>);
  add("sum_bwd_", backward<T, kSpreadSum>, nullptr);
  add("extreme_bwd_", backward<T, kSpreadExtreme>, extreme_workspace);
  add("logsumexp_bwd_", backward<T, kSpreadLogsumexp>, nullptr);
  add("var_bwd_", backward<T, kSpreadVar>, nullptr);
}

}  // namespace

void register_reduce_metal(KernelRegistry& registry) {
  add_kernels<float>(registry);
  add_kernels<F16>(registry);
  add_kernels<BF16>(registry);
  registry.add(Backend::kMetal, "sum_fwd_i32", whole_forward<std::uint32_t>);
  registry.add(Backend::kMetal, "sum_fwd_u32", whole_forward<std::uint32_t>);
  registry.add(Backend::kMetal, "sum_fwd_i64", whole_forward<std::uint64_t>);
  registry.add(Backend::kMetal, "sum_fwd_u64", whole_forward<std::uint64_t>);
}

}  // namespace mlxtape::ops

#endif
