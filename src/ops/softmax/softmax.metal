// Metal kernels of softmax (formula and layout: mlxtape/ops/softmax.h).
//
// Rows of whole 16-byte packs are read once and kept in registers: by neighbouring lanes where a pack each is enough, so
// that no barrier is needed, else by a group. Longer rows and ragged ones are walked: the largest number and the sum in one
// walk, the results in a second; by a simdgroup, by a group, or, where there are few rows, by several groups that leave
// their sums to a second kernel. Rows that are not contiguous: lanes are neighbouring rows, so that accesses are whole lines,
// and the simdgroups of a group share the columns. Bound by memory.
#include "softmax_args.h"

// A part of a row that is shared by several groups.
struct SoftmaxParts {
  int64_t parts;  // of a row
  int64_t each;   // columns of a part
};

#ifdef __METAL_VERSION__

#include "backends/metal/device/exp.h"
#include "backends/metal/device/rows.h"

constant uint lanes
    [[function_constant(0)]];  // of a row that neighbouring lanes keep: 4, 8, 16 or 32
constant bool packs [[function_constant(1)]];  // walked rows are whole packs

// What every kernel knows of its place.
#define SOFTMAX_PLACE                                                                          \
  constant uint &first_group [[buffer(30)]], uint group [[threadgroup_position_in_grid]],      \
      uint index [[thread_position_in_threadgroup]], uint threads [[threads_per_threadgroup]], \
      uint lane [[thread_index_in_simdgroup]], uint simd [[simdgroup_index_in_threadgroup]],   \
      uint simds [[simdgroups_per_threadgroup]]

// ---- rows that are kept in registers ----

// A thread's packs of a row: of the lanes' rows one, of a group's rows kPacks, threads apart.
template <typename T, int kPacks>
struct Kept {
  enum { kCount = Pack<T>::kCount };
  uint4 bits[kPacks];
  uint first, step, end;  // packs of the row

  inline bool has(int j) const { return first + uint(j) * step < end; }
  inline uint at(int j) const { return (first + uint(j) * step) * uint(kCount); }
};

template <typename T, int kPacks>
inline float largest_of(thread const Kept<T, kPacks>& row) {
  float v[Pack<T>::kCount];
  float m = -INFINITY;
  for (int j = 0; j < kPacks; ++j) {
    if (!row.has(j)) continue;
    Pack<T>::unpack(row.bits[j], v);
    for (int i = 0; i < Pack<T>::kCount; ++i) m = max(m, v[i]);
  }
  return m;
}

template <typename T, int kPacks>
inline float sum_of(thread const Kept<T, kPacks>& row, float m) {
  float v[Pack<T>::kCount];
  float sum = 0;
  for (int j = 0; j < kPacks; ++j) {
    if (!row.has(j)) continue;
    Pack<T>::unpack(row.bits[j], v);
    for (int i = 0; i < Pack<T>::kCount; ++i) sum += exp_for<T>(v[i] - m);
  }
  return sum;
}

template <typename T, int kPacks>
inline void write_shares(thread const Kept<T, kPacks>& row, Total total, device T* y) {
  float v[Pack<T>::kCount];
  const float factor = 1 / total.sum;
  for (int j = 0; j < kPacks; ++j) {
    if (!row.has(j)) continue;
    Pack<T>::unpack(row.bits[j], v);
    for (int i = 0; i < Pack<T>::kCount; ++i) v[i] = exp_for<T>(v[i] - total.top) * factor;
    store_pack(Pack<T>::pack(v), y + row.at(j));
  }
}

template <typename T>
[[kernel, max_total_threads_per_threadgroup(1024)]] void softmax_fwd_lanes(
    device const T* x [[buffer(0)]], device T* y [[buffer(1)]],
    constant SoftmaxArgs& args [[buffer(2)]], SOFTMAX_PLACE) {
  const long row = (long(group) + first_group) * (threads / lanes) + index / lanes;
  const long start = row * args.cols;
  Kept<T, 1> kept;
  kept.first = index % lanes;
  kept.step = lanes;
  kept.end = row < args.outer ? uint(args.cols) / Pack<T>::kCount : 0;
  if (kept.has(0)) kept.bits[0] = load_pack(x + start + kept.at(0));
  Total total;
  total.top = lanes_max(largest_of<T, 1>(kept), lanes);
  total.sum = lanes_sum(sum_of<T, 1>(kept, total.top), lanes);
  write_shares<T, 1>(kept, total, y + start);
}

template <typename T, int kPacks>
[[kernel, max_total_threads_per_threadgroup(1024)]] void softmax_fwd_kept(
    device const T* x [[buffer(0)]], device T* y [[buffer(1)]],
    constant SoftmaxArgs& args [[buffer(2)]], SOFTMAX_PLACE) {
  threadgroup float room[64];
  const Place place = {index, lane, simd, simds};
  const long start = (long(group) + first_group) * args.cols;
  Kept<T, kPacks> kept;
  kept.first = index;
  kept.step = threads;
  kept.end = uint(args.cols) / Pack<T>::kCount;
  for (int j = 0; j < kPacks; ++j) {
    if (kept.has(j)) kept.bits[j] = load_pack(x + start + kept.at(j));
  }
  // A simdgroup's own largest number is its reference: none waits for another before its exponentials.
  Total part;
  part.top = simd_max(largest_of<T, kPacks>(kept));
  part.sum = sum_of<T, kPacks>(kept, finite_reference(part.top));
  write_shares<T, kPacks>(kept, group_total<T>(part, room, place), y + start);
}

template <typename T, int kPacks>
inline float dot_of(thread const Kept<T, kPacks>& y, thread const Kept<T, kPacks>& dy) {
  float u[Pack<T>::kCount], v[Pack<T>::kCount];
  float dot = 0;
  for (int j = 0; j < kPacks; ++j) {
    if (!y.has(j)) continue;
    Pack<T>::unpack(y.bits[j], u);
    Pack<T>::unpack(dy.bits[j], v);
    for (int i = 0; i < Pack<T>::kCount; ++i) dot = fma(u[i], v[i], dot);
  }
  return dot;
}

template <typename T, int kPacks>
inline void write_gradient(thread const Kept<T, kPacks>& y, thread const Kept<T, kPacks>& dy,
                           float dot, device T* dx) {
  float u[Pack<T>::kCount], v[Pack<T>::kCount];
  for (int j = 0; j < kPacks; ++j) {
    if (!y.has(j)) continue;
    Pack<T>::unpack(y.bits[j], u);
    Pack<T>::unpack(dy.bits[j], v);
    for (int i = 0; i < Pack<T>::kCount; ++i) u[i] *= v[i] - dot;
    store_pack(Pack<T>::pack(u), dx + y.at(j));
  }
}

template <typename T>
[[kernel, max_total_threads_per_threadgroup(1024)]] void softmax_bwd_lanes(
    device const T* y [[buffer(0)]], device const T* dy [[buffer(1)]], device T* dx [[buffer(2)]],
    constant SoftmaxArgs& args [[buffer(3)]], SOFTMAX_PLACE) {
  const long row = (long(group) + first_group) * (threads / lanes) + index / lanes;
  const long start = row * args.cols;
  Kept<T, 1> a, b;
  a.first = index % lanes;
  a.step = lanes;
  a.end = row < args.outer ? uint(args.cols) / Pack<T>::kCount : 0;
  if (a.has(0)) {
    a.bits[0] = load_pack(y + start + a.at(0));
    b.bits[0] = load_pack(dy + start + a.at(0));
  }
  write_gradient<T, 1>(a, b, lanes_sum(dot_of<T, 1>(a, b), lanes), dx + start);
}

template <typename T, int kPacks>
[[kernel, max_total_threads_per_threadgroup(1024)]] void softmax_bwd_kept(
    device const T* y [[buffer(0)]], device const T* dy [[buffer(1)]], device T* dx [[buffer(2)]],
    constant SoftmaxArgs& args [[buffer(3)]], SOFTMAX_PLACE) {
  threadgroup float room[32];
  const Place place = {index, lane, simd, simds};
  const long start = (long(group) + first_group) * args.cols;
  Kept<T, kPacks> a, b;
  a.first = index;
  a.step = threads;
  a.end = uint(args.cols) / Pack<T>::kCount;
  for (int j = 0; j < kPacks; ++j) {
    if (!a.has(j)) continue;
    a.bits[j] = load_pack(y + start + a.at(j));
    b.bits[j] = load_pack(dy + start + a.at(j));
  }
  const float dot = group_sum(dot_of<T, kPacks>(a, b), room, place);
  write_gradient<T, kPacks>(a, b, dot, dx + start);
}

// ---- any row: walked twice ----

// Takes another number into the sum of exponentials.
template <typename T>
inline void take(thread Total& total, float v) {
  if (v > total.top) {
    total.sum = moved_sum<T>(total.sum, total.top, v);
    total.top = v;
  }
  total.sum += exp_for<T>(v - finite_reference(total.top));
}

// Of columns [0, count) from x, a thread's.
template <typename T>
inline Total walk_total(device const T* x, uint count, uint index, uint threads) {
  Total total;
  total.top = -INFINITY;
  total.sum = 0;
  if (packs) {
    float v[Pack<T>::kCount];
    for (uint c = index * Pack<T>::kCount; c < count; c += threads * Pack<T>::kCount) {
      Pack<T>::unpack(load_pack(x + c), v);
      for (int i = 0; i < Pack<T>::kCount; ++i) take<T>(total, v[i]);
    }
  } else {
    for (uint c = index; c < count; c += threads) take<T>(total, widen(x[c]));
  }
  return total;
}

template <typename T>
inline void walk_shares(device const T* x, Total total, uint count, uint index, uint threads,
                        device T* y) {
  const float factor = 1 / total.sum;
  if (packs) {
    float v[Pack<T>::kCount];
    for (uint c = index * Pack<T>::kCount; c < count; c += threads * Pack<T>::kCount) {
      Pack<T>::unpack(load_pack(x + c), v);
      for (int i = 0; i < Pack<T>::kCount; ++i) v[i] = exp_for<T>(v[i] - total.top) * factor;
      store_pack(Pack<T>::pack(v), y + c);
    }
  } else {
    for (uint c = index; c < count; c += threads) {
      y[c] = narrow<T>(exp_for<T>(widen(x[c]) - total.top) * factor);
    }
  }
}

template <typename T>
inline float walk_dot(device const T* y, device const T* dy, uint count, uint index, uint threads) {
  float dot = 0;
  if (packs) {
    float u[Pack<T>::kCount], v[Pack<T>::kCount];
    for (uint c = index * Pack<T>::kCount; c < count; c += threads * Pack<T>::kCount) {
      Pack<T>::unpack(load_pack(y + c), u);
      Pack<T>::unpack(load_pack(dy + c), v);
      for (int i = 0; i < Pack<T>::kCount; ++i) dot = fma(u[i], v[i], dot);
    }
  } else {
    for (uint c = index; c < count; c += threads) dot = fma(widen(y[c]), widen(dy[c]), dot);
  }
  return dot;
}

template <typename T>
inline void walk_gradient(device const T* y, device const T* dy, float dot, uint count, uint index,
                          uint threads, device T* dx) {
  if (packs) {
    float u[Pack<T>::kCount], v[Pack<T>::kCount];
    for (uint c = index * Pack<T>::kCount; c < count; c += threads * Pack<T>::kCount) {
      Pack<T>::unpack(load_pack(y + c), u);
      Pack<T>::unpack(load_pack(dy + c), v);
      for (int i = 0; i < Pack<T>::kCount; ++i) u[i] *= v[i] - dot;
      store_pack(Pack<T>::pack(u), dx + c);
    }
  } else {
    for (uint c = index; c < count; c += threads) {
      dx[c] = narrow<T>(widen(y[c]) * (widen(dy[c]) - dot));
    }
  }
}

template <typename T>
[[kernel, max_total_threads_per_threadgroup(1024)]] void softmax_fwd_walked(
    device const T* x [[buffer(0)]], device T* y [[buffer(1)]],
    constant SoftmaxArgs& args [[buffer(2)]], SOFTMAX_PLACE) {
  threadgroup float room[64];
  const Place place = {index, lane, simd, simds};
  const long start = (long(group) + first_group) * args.cols;
  const uint cols = uint(args.cols);
  const Total total = group_total<T>(walk_total(x + start, cols, index, threads), room, place);
  walk_shares(x + start, total, cols, index, threads, y + start);
}

template <typename T>
[[kernel, max_total_threads_per_threadgroup(1024)]] void softmax_bwd_walked(
    device const T* y [[buffer(0)]], device const T* dy [[buffer(1)]], device T* dx [[buffer(2)]],
    constant SoftmaxArgs& args [[buffer(3)]], SOFTMAX_PLACE) {
  threadgroup float room[32];
  const Place place = {index, lane, simd, simds};
  const long start = (long(group) + first_group) * args.cols;
  const uint cols = uint(args.cols);
  const float dot = group_sum(walk_dot(y + start, dy + start, cols, index, threads), room, place);
  walk_gradient(y + start, dy + start, dot, cols, index, threads, dx + start);
}

// ---- few long rows: several groups to each ----

// The columns of a group.
struct Part {
  long row, start;
  uint count, number;
};
inline Part part_of(constant SoftmaxArgs& args, constant SoftmaxParts& parts, long group) {
  Part part;
  part.row = group / parts.parts;
  part.number = uint(group % parts.parts);
  const long first = long(part.number) * parts.each;
  part.start = part.row * args.cols + first;
  part.count = uint(min(parts.each, args.cols - first));
  return part;
}

// sums: [outer, parts], a largest number and a sum each.
template <typename T>
[[kernel, max_total_threads_per_threadgroup(1024)]] void softmax_fwd_part(
    device const T* x [[buffer(0)]], device float* sums [[buffer(1)]],
    constant SoftmaxArgs& args [[buffer(2)]], constant SoftmaxParts& parts [[buffer(3)]],
    SOFTMAX_PLACE) {
  threadgroup float room[64];
  const Place place = {index, lane, simd, simds};
  const long whole = long(group) + first_group;
  const Part part = part_of(args, parts, whole);
  const Total total =
      group_total<T>(walk_total(x + part.start, part.count, index, threads), room, place);
  if (index == 0) {
    sums[2 * whole] = total.top;
    sums[2 * whole + 1] = total.sum;
  }
}

template <typename T>
[[kernel, max_total_threads_per_threadgroup(1024)]] void softmax_fwd_join(
    device const T* x [[buffer(0)]], device const float* sums [[buffer(1)]],
    device T* y [[buffer(2)]], constant SoftmaxArgs& args [[buffer(3)]],
    constant SoftmaxParts& parts [[buffer(4)]], SOFTMAX_PLACE) {
  const Part part = part_of(args, parts, long(group) + first_group);
  Total total;
  total.top = -INFINITY;
  total.sum = 0;
  // Every simdgroup does the same, so none waits.
  for (uint p = lane; p < uint(parts.parts); p += 32) {
    const long at = 2 * (part.row * parts.parts + p);
    const float top = max(total.top, sums[at]);
    total.sum = moved_sum<T>(total.sum, total.top, top) + moved_sum<T>(sums[at + 1], sums[at], top);
    total.top = top;
  }
  walk_shares(x + part.start, simd_total<T>(total), part.count, index, threads, y + part.start);
}

template <typename T>
[[kernel, max_total_threads_per_threadgroup(1024)]] void softmax_bwd_part(
    device const T* y [[buffer(0)]], device const T* dy [[buffer(1)]],
    device float* sums [[buffer(2)]], constant SoftmaxArgs& args [[buffer(3)]],
    constant SoftmaxParts& parts [[buffer(4)]], SOFTMAX_PLACE) {
  threadgroup float room[32];
  const Place place = {index, lane, simd, simds};
  const long whole = long(group) + first_group;
  const Part part = part_of(args, parts, whole);
  const float dot =
      group_sum(walk_dot(y + part.start, dy + part.start, part.count, index, threads), room, place);
  if (index == 0) sums[whole] = dot;
}

template <typename T>
[[kernel, max_total_threads_per_threadgroup(1024)]] void softmax_bwd_join(
    device const T* y [[buffer(0)]], device const T* dy [[buffer(1)]],
    device const float* sums [[buffer(2)]], device T* dx [[buffer(3)]],
    constant SoftmaxArgs& args [[buffer(4)]], constant SoftmaxParts& parts [[buffer(5)]],
    SOFTMAX_PLACE) {
  const Part part = part_of(args, parts, long(group) + first_group);
  float dot = 0;
  for (uint p = lane; p < uint(parts.parts); p += 32) dot += sums[part.row * parts.parts + p];
  walk_gradient(y + part.start, dy + part.start, simd_sum(dot), part.count, index, threads,
                dx + part.start);
}

// ---- rows that are not contiguous ----

// A group has 32 neighbours; lane: which of them, simd: which share of the columns.
struct Column {
  long at;
  bool in;
};
inline Column column_of(constant SoftmaxArgs& args, long group, uint lane) {
  const long tiles = (args.inner + 31) / 32;
  const long inner = group % tiles * 32 + lane;
  Column column;
  column.in = inner < args.inner;
  column.at = group / tiles * args.cols * args.inner + inner;
  return column;
}

template <typename T>
[[kernel, max_total_threads_per_threadgroup(1024)]] void softmax_fwd_strided(
    device const T* x [[buffer(0)]], device T* y [[buffer(1)]],
    constant SoftmaxArgs& args [[buffer(2)]], SOFTMAX_PLACE) {
  threadgroup float tops[8][32], sums[8][32];
  const Column column = column_of(args, long(group) + first_group, lane);
  const long end = column.in ? args.cols : 0;
  Total total;
  total.top = -INFINITY;
  total.sum = 0;
  for (long c = simd; c < end; c += simds) take<T>(total, widen(x[column.at + c * args.inner]));
  tops[simd][lane] = total.top;
  sums[simd][lane] = total.sum;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  float top = -INFINITY;
  for (uint s = 0; s < simds; ++s) top = max(top, tops[s][lane]);
  float sum = 0;
  for (uint s = 0; s < simds; ++s) sum += moved_sum<T>(sums[s][lane], tops[s][lane], top);
  for (long c = simd; c < end; c += simds) {
    const long at = column.at + c * args.inner;
    y[at] = narrow<T>(exp_for<T>(widen(x[at]) - top) / sum);
  }
}

template <typename T>
[[kernel, max_total_threads_per_threadgroup(1024)]] void softmax_bwd_strided(
    device const T* y [[buffer(0)]], device const T* dy [[buffer(1)]], device T* dx [[buffer(2)]],
    constant SoftmaxArgs& args [[buffer(3)]], SOFTMAX_PLACE) {
  threadgroup float sums[8][32];
  const Column column = column_of(args, long(group) + first_group, lane);
  const long end = column.in ? args.cols : 0;
  float sum = 0;
  for (long c = simd; c < end; c += simds) {
    const long at = column.at + c * args.inner;
    sum = fma(widen(y[at]), widen(dy[at]), sum);
  }
  sums[simd][lane] = sum;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  sum = 0;
  for (uint s = 0; s < simds; ++s) sum += sums[s][lane];
  for (long c = simd; c < end; c += simds) {
    const long at = column.at + c * args.inner;
    dx[at] = narrow<T>(widen(y[at]) * (widen(dy[at]) - sum));
  }
}

// ---- names ----

#define MAKE(name, function) template [[host_name(name)]] [[kernel]] decltype(function) function;
#define MAKE_BOTH(which, type, T)                              \
  MAKE("softmax_fwd_" #which "_" type, softmax_fwd_##which<T>) \
  MAKE("softmax_bwd_" #which "_" type, softmax_bwd_##which<T>)
#define MAKE_KEPT(type, T, n)                                                                     \
  template                                                                                        \
      [[host_name("softmax_fwd_kept" #n                                                           \
                  "_" type)]] [[kernel]] decltype(softmax_fwd_kept<T, n>) softmax_fwd_kept<T, n>; \
  template                                                                                        \
      [[host_name("softmax_bwd_kept" #n                                                           \
                  "_" type)]] [[kernel]] decltype(softmax_bwd_kept<T, n>) softmax_bwd_kept<T, n>;
#define MAKE_ALL(type, T)     \
  MAKE_BOTH(lanes, type, T)   \
  MAKE_BOTH(walked, type, T)  \
  MAKE_BOTH(part, type, T)    \
  MAKE_BOTH(join, type, T)    \
  MAKE_BOTH(strided, type, T) \
  MAKE_KEPT(type, T, 1)       \
  MAKE_KEPT(type, T, 2)       \
  MAKE_KEPT(type, T, 4)
MAKE_ALL("f32", float)
MAKE_ALL("f16", half)
MAKE_ALL("bf16", bf16)

#else

#include <algorithm>

#include "backends/metal/launch.h"

namespace mlxtape::ops {

namespace {

using metal::Launch;

constexpr std::int64_t kThreads = 256;
constexpr std::int64_t kShares =
    8;  // simdgroups that share the columns of rows that are not contiguous
constexpr std::int64_t kByLanes = 32;        // packs of a row that lanes keep
constexpr std::int64_t kMostByGroup = 4096;  // packs of a row that a group keeps: four a thread
constexpr std::int64_t kBySimdgroup = 512;   // columns of a walked row that one simdgroup has
constexpr std::int64_t kLong = 65536;        // columns of a row that several groups share
constexpr std::int64_t kFew = 64;            // rows that are too few to keep all cores busy
constexpr std::int64_t kPartColumns = 16384;

template <class T>
constexpr std::int64_t kPack = 16 / sizeof(T);

// The smallest of 4, 8, 16 and 32 lanes that have a pack each.
std::uint32_t lanes_for(std::int64_t row_packs) {
  std::uint32_t count = 4;
  while (count < row_packs) count *= 2;
  return count;
}

bool is_shared(const SoftmaxArgs& args) {
  return args.inner == 1 && args.cols > kLong && args.outer <= kFew;
}
SoftmaxParts parts_of(const SoftmaxArgs& args) {
  // Packs must not lie across two parts.
  const std::int64_t wanted = std::min<std::int64_t>(64, ceil_div(args.cols, kPartColumns));
  const std::int64_t each = ceil_div(ceil_div(args.cols, wanted), 64) * 64;
  return {ceil_div(args.cols, each), each};
}

std::size_t workspace(const void* p) {
  const auto& args = *static_cast<const SoftmaxArgs*>(p);
  if (!is_shared(args)) return 0;
  return static_cast<std::size_t>(args.outer * parts_of(args).parts) * 2 * sizeof(float);
}

// The names of one direction's kernels.
struct Names {
  const char *lanes, *kept1, *kept2, *kept4, *walked, *part, *join, *strided;
};
constexpr Names kForward{"softmax_fwd_lanes", "softmax_fwd_kept1",  "softmax_fwd_kept2",
                         "softmax_fwd_kept4", "softmax_fwd_walked", "softmax_fwd_part",
                         "softmax_fwd_join",  "softmax_fwd_strided"};
constexpr Names kBackward{"softmax_bwd_lanes", "softmax_bwd_kept1",  "softmax_bwd_kept2",
                          "softmax_bwd_kept4", "softmax_bwd_walked", "softmax_bwd_part",
                          "softmax_bwd_join",  "softmax_bwd_strided"};

// Two kernels: sums of the parts into the workspace, then results from all of them.
template <class T>
void run_shared(const KernelCall& call, const Names& names, bool whole) {
  const auto& args = call.as<SoftmaxArgs>();
  const SoftmaxParts parts = parts_of(args);
  for (const bool joins : {false, true}) {
    Launch launch(call, metal::kernel<T>(joins ? names.join : names.part));
    launch.constant(1, whole);
    unsigned long at = 0;
    for (const void* in : call.in) launch.input(at++, in);
    joins ? launch.input(at++, call.workspace) : launch.output(at++, call.workspace);
    if (joins) launch.output(at++, call.out[0]);
    launch.bytes(at, args)
        .bytes(at + 1, parts)
        .in_parts()
        .groups(args.outer * parts.parts)
        .threads(2 * kThreads)
        .run();
  }
}

template <class T>
void run(const KernelCall& call, const Names& names) {
  const auto& args = call.as<SoftmaxArgs>();  // tensors: [outer, cols, inner]
  if (args.inner != 1) {
    return Launch(call, metal::kernel<T>(names.strided))
        .buffers()
        .in_parts()
        .groups(args.outer * ceil_div(args.inner, metal::kSimd))
        .threads(metal::kSimd * kShares)
        .run();
  }
  bool whole = args.cols % kPack<T> == 0;
  for (const auto& list : {call.in, call.out}) {
    for (const void* p : list) whole = whole && metal::is_aligned(p);
  }
  const std::int64_t row_packs = args.cols / kPack<T>;
  if (whole && row_packs <= kByLanes) {
    const std::uint32_t lanes = lanes_for(row_packs);
    return Launch(call, metal::kernel<T>(names.lanes))
        .constant(0, lanes)
        .buffers()
        .in_parts()
        .groups(ceil_div(args.outer, kThreads / lanes))
        .threads(kThreads)
        .run();
  }
  if (is_shared(args)) return run_shared<T>(call, names, whole);
  if (whole && row_packs <= kMostByGroup) {
    const std::int64_t each = row_packs <= 512 ? 1 : row_packs <= 1024 ? 2 : 4;
    return Launch(call, metal::kernel<T>(each == 1   ? names.kept1
                                         : each == 2 ? names.kept2
                                                     : names.kept4))
        .buffers()
        .in_parts()
        .groups(args.outer)
        .threads(metal::row_threads(row_packs, each))
        .run();
  }
  const std::int64_t threads =
      args.cols <= kBySimdgroup ? metal::kSimd : metal::row_threads(args.cols, 8);
  Launch(call, metal::kernel<T>(names.walked))
      .constant(1, whole)
      .buffers()
      .in_parts()
      .groups(args.outer)
      .threads(threads)
      .run();
}

template <class T>
void add_kernels(KernelRegistry& registry) {
  const std::string type = name_of(kDType<T>);
  registry.add(
      Backend::kMetal, "softmax_fwd_" + type,
      [](const KernelCall& call) { run<T>(call, kForward); }, workspace);
  registry.add(
      Backend::kMetal, "softmax_bwd_" + type,
      [](const KernelCall& call) { run<T>(call, kBackward); }, workspace);
}

}  // namespace

void register_softmax_metal(KernelRegistry& registry) {
  add_kernels<float>(registry);
  add_kernels<F16>(registry);
  add_kernels<BF16>(registry);
}

}  // namespace mlxtape::ops

#endif
