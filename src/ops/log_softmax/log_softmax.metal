// Metal kernels of log_softmax (formula and layout: mlxtape/ops/log_softmax.h).
//
// Rows of whole 16-byte packs are read once and kept in registers: by neighbouring lanes where a pack each is enough, so
// that no barrier is needed, else by a group. Longer rows and ragged ones are walked twice, sums first, by a simdgroup, by a
// group or, where there are few rows, by several groups that leave their sums to a second kernel. Rows that are not
// contiguous: lanes are neighbouring rows, so that accesses are whole lines, and the simdgroups of a group share the columns.
// Bound by memory. Threads of a group: 32 to 1024. Threadgroup memory: 256 bytes, 2 KB for rows that are not contiguous.
// About 24 registers a thread, 40 with four packs of each tensor.
#include "log_softmax_args.h"

// A part of a row that is shared by several groups.
struct LogSoftmaxParts {
  int64_t parts;  // of a row
  int64_t each;   // columns of a part
};

#ifdef __METAL_VERSION__

#include "backends/metal/device/kept_rows.h"

constant uint lanes
    [[function_constant(0)]];  // of a row that neighbouring lanes keep: 4, 8, 16 or 32
constant bool packs [[function_constant(1)]];  // walked rows are whole packs

// What every kernel knows of its place.
#define LOG_SOFTMAX_PLACE                                                                      \
  constant uint &first_group [[buffer(30)]], uint group [[threadgroup_position_in_grid]],      \
      uint index [[thread_position_in_threadgroup]], uint threads [[threads_per_threadgroup]], \
      uint lane [[thread_index_in_simdgroup]], uint simd [[simdgroup_index_in_threadgroup]],   \
      uint simds [[simdgroups_per_threadgroup]]

// ---- rows that are kept in registers ----

template <typename T, int kPacks>
inline void write_logs(thread const KeptRow<T, kPacks>& row, Total total, device T* y) {
  float v[Pack<T>::kCount];
  const float log_sum = precise::log(total.sum);
  for (int j = 0; j < kPacks; ++j) {
    if (!row.has(j)) continue;
    Pack<T>::unpack(row.bits[j], v);
    for (int i = 0; i < Pack<T>::kCount; ++i) v[i] = (v[i] - total.top) - log_sum;
    store_pack(Pack<T>::pack(v), y + row.at(j));
  }
}

template <typename T>
[[kernel, max_total_threads_per_threadgroup(1024)]] void log_softmax_fwd_lanes(
    device const T* x [[buffer(0)]], device T* y [[buffer(1)]],
    constant LogSoftmaxArgs& args [[buffer(2)]], LOG_SOFTMAX_PLACE) {
  const long row = (long(group) + first_group) * (threads / lanes) + index / lanes;
  const long start = row * args.cols;
  KeptRow<T, 1> kept;
  kept.place(index % lanes, lanes, row < args.outer ? uint(args.cols) / Pack<T>::kCount : 0);
  kept.load(x + start);
  Total total;
  total.top = lanes_max(kept_largest<T, 1>(kept), lanes);
  total.sum = lanes_sum(kept_exp_sum<T, 1>(kept, total.top), lanes);
  write_logs<T, 1>(kept, total, y + start);
}

template <typename T, int kPacks>
[[kernel, max_total_threads_per_threadgroup(1024)]] void log_softmax_fwd_kept(
    device const T* x [[buffer(0)]], device T* y [[buffer(1)]],
    constant LogSoftmaxArgs& args [[buffer(2)]], LOG_SOFTMAX_PLACE) {
  threadgroup float room[64];
  const Place place = {index, lane, simd, simds};
  const long start = (long(group) + first_group) * args.cols;
  KeptRow<T, kPacks> kept;
  kept.place(index, threads, uint(args.cols) / Pack<T>::kCount);
  kept.load(x + start);
  // A simdgroup's own largest number is its reference: none waits for another before its exponentials.
  Total part;
  part.top = simd_max(kept_largest<T, kPacks>(kept));
  part.sum = kept_exp_sum<T, kPacks>(kept, finite_reference(part.top));
  write_logs<T, kPacks>(kept, group_total<T>(part, room, place), y + start);
}

template <typename T, int kPacks>
inline void write_slopes(thread const KeptRow<T, kPacks>& y, thread const KeptRow<T, kPacks>& dy,
                         float sum, device T* dx) {
  float u[Pack<T>::kCount], v[Pack<T>::kCount];
  for (int j = 0; j < kPacks; ++j) {
    if (!y.has(j)) continue;
    Pack<T>::unpack(y.bits[j], u);
    Pack<T>::unpack(dy.bits[j], v);
    for (int i = 0; i < Pack<T>::kCount; ++i) v[i] = fma(-exp_for<T>(u[i]), sum, v[i]);
    store_pack(Pack<T>::pack(v), dx + y.at(j));
  }
}

template <typename T>
[[kernel, max_total_threads_per_threadgroup(1024)]] void log_softmax_bwd_lanes(
    device const T* y [[buffer(0)]], device const T* dy [[buffer(1)]], device T* dx [[buffer(2)]],
    constant LogSoftmaxArgs& args [[buffer(3)]], LOG_SOFTMAX_PLACE) {
  const long row = (long(group) + first_group) * (threads / lanes) + index / lanes;
  const long start = row * args.cols;
  KeptRow<T, 1> a, b;
  a.place(index % lanes, lanes, row < args.outer ? uint(args.cols) / Pack<T>::kCount : 0);
  b.place(a.first, a.step, a.end);
  a.load(y + start);
  b.load(dy + start);
  write_slopes<T, 1>(a, b, lanes_sum(kept_sum<T, 1>(b), lanes), dx + start);
}

template <typename T, int kPacks>
[[kernel, max_total_threads_per_threadgroup(1024)]] void log_softmax_bwd_kept(
    device const T* y [[buffer(0)]], device const T* dy [[buffer(1)]], device T* dx [[buffer(2)]],
    constant LogSoftmaxArgs& args [[buffer(3)]], LOG_SOFTMAX_PLACE) {
  threadgroup float room[32];
  const Place place = {index, lane, simd, simds};
  const long start = (long(group) + first_group) * args.cols;
  KeptRow<T, kPacks> a, b;
  a.place(index, threads, uint(args.cols) / Pack<T>::kCount);
  b.place(a.first, a.step, a.end);
  a.load(y + start);
  b.load(dy + start);
  write_slopes<T, kPacks>(a, b, group_sum(kept_sum<T, kPacks>(b), room, place), dx + start);
}

// ---- any row: walked twice ----

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
      for (int i = 0; i < Pack<T>::kCount; ++i) add_exp<T>(total, v[i]);
    }
  } else {
    for (uint c = index; c < count; c += threads) add_exp<T>(total, widen(x[c]));
  }
  return total;
}

template <typename T>
inline void walk_logs(device const T* x, Total total, uint count, uint index, uint threads,
                      device T* y) {
  const float log_sum = precise::log(total.sum);
  if (packs) {
    float v[Pack<T>::kCount];
    for (uint c = index * Pack<T>::kCount; c < count; c += threads * Pack<T>::kCount) {
      Pack<T>::unpack(load_pack(x + c), v);
      for (int i = 0; i < Pack<T>::kCount; ++i) v[i] = (v[i] - total.top) - log_sum;
      store_pack(Pack<T>::pack(v), y + c);
    }
  } else {
    for (uint c = index; c < count; c += threads) {
      y[c] = narrow<T>((widen(x[c]) - total.top) - log_sum);
    }
  }
}

template <typename T>
inline float walk_sum(device const T* dy, uint count, uint index, uint threads) {
  float sum = 0;
  if (packs) {
    float v[Pack<T>::kCount];
    for (uint c = index * Pack<T>::kCount; c < count; c += threads * Pack<T>::kCount) {
      Pack<T>::unpack(load_pack(dy + c), v);
      for (int i = 0; i < Pack<T>::kCount; ++i) sum += v[i];
    }
  } else {
    for (uint c = index; c < count; c += threads) sum += widen(dy[c]);
  }
  return sum;
}

template <typename T>
inline void walk_slopes(device const T* y, device const T* dy, float sum, uint count, uint index,
                        uint threads, device T* dx) {
  if (packs) {
    float u[Pack<T>::kCount], v[Pack<T>::kCount];
    for (uint c = index * Pack<T>::kCount; c < count; c += threads * Pack<T>::kCount) {
      Pack<T>::unpack(load_pack(y + c), u);
      Pack<T>::unpack(load_pack(dy + c), v);
      for (int i = 0; i < Pack<T>::kCount; ++i) v[i] = fma(-exp_for<T>(u[i]), sum, v[i]);
      store_pack(Pack<T>::pack(v), dx + c);
    }
  } else {
    for (uint c = index; c < count; c += threads) {
      dx[c] = narrow<T>(fma(-exp_for<T>(widen(y[c])), sum, widen(dy[c])));
    }
  }
}

template <typename T>
[[kernel, max_total_threads_per_threadgroup(1024)]] void log_softmax_fwd_walked(
    device const T* x [[buffer(0)]], device T* y [[buffer(1)]],
    constant LogSoftmaxArgs& args [[buffer(2)]], LOG_SOFTMAX_PLACE) {
  threadgroup float room[64];
  const Place place = {index, lane, simd, simds};
  const long start = (long(group) + first_group) * args.cols;
  const uint cols = uint(args.cols);
  const Total total = group_total<T>(walk_total(x + start, cols, index, threads), room, place);
  walk_logs(x + start, total, cols, index, threads, y + start);
}

template <typename T>
[[kernel, max_total_threads_per_threadgroup(1024)]] void log_softmax_bwd_walked(
    device const T* y [[buffer(0)]], device const T* dy [[buffer(1)]], device T* dx [[buffer(2)]],
    constant LogSoftmaxArgs& args [[buffer(3)]], LOG_SOFTMAX_PLACE) {
  threadgroup float room[32];
  const Place place = {index, lane, simd, simds};
  const long start = (long(group) + first_group) * args.cols;
  const uint cols = uint(args.cols);
  const float sum = group_sum(walk_sum(dy + start, cols, index, threads), room, place);
  walk_slopes(y + start, dy + start, sum, cols, index, threads, dx + start);
}

// ---- few long rows: several groups to each ----

// The columns of a group.
struct Part {
  long row, start;
  uint count;
};
inline Part part_of(constant LogSoftmaxArgs& args, constant LogSoftmaxParts& parts, long group) {
  Part part;
  part.row = group / parts.parts;
  const long first = group % parts.parts * parts.each;
  part.start = part.row * args.cols + first;
  part.count = uint(min(parts.each, args.cols - first));
  return part;
}

// sums: [outer, parts], a largest number and a sum each.
template <typename T>
[[kernel, max_total_threads_per_threadgroup(1024)]] void log_softmax_fwd_part(
    device const T* x [[buffer(0)]], device float* sums [[buffer(1)]],
    constant LogSoftmaxArgs& args [[buffer(2)]], constant LogSoftmaxParts& parts [[buffer(3)]],
    LOG_SOFTMAX_PLACE) {
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
[[kernel, max_total_threads_per_threadgroup(1024)]] void log_softmax_fwd_join(
    device const T* x [[buffer(0)]], device const float* sums [[buffer(1)]],
    device T* y [[buffer(2)]], constant LogSoftmaxArgs& args [[buffer(3)]],
    constant LogSoftmaxParts& parts [[buffer(4)]], LOG_SOFTMAX_PLACE) {
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
  walk_logs(x + part.start, simd_total<T>(total), part.count, index, threads, y + part.start);
}

template <typename T>
[[kernel, max_total_threads_per_threadgroup(1024)]] void log_softmax_bwd_part(
    device const T* dy [[buffer(0)]], device float* sums [[buffer(1)]],
    constant LogSoftmaxArgs& args [[buffer(2)]], constant LogSoftmaxParts& parts [[buffer(3)]],
    LOG_SOFTMAX_PLACE) {
  threadgroup float room[32];
  const Place place = {index, lane, simd, simds};
  const long whole = long(group) + first_group;
  const Part part = part_of(args, parts, whole);
  const float sum = group_sum(walk_sum(dy + part.start, part.count, index, threads), room, place);
  if (index == 0) sums[whole] = sum;
}

template <typename T>
[[kernel, max_total_threads_per_threadgroup(1024)]] void log_softmax_bwd_join(
    device const T* y [[buffer(0)]], device const T* dy [[buffer(1)]],
    device const float* sums [[buffer(2)]], device T* dx [[buffer(3)]],
    constant LogSoftmaxArgs& args [[buffer(4)]], constant LogSoftmaxParts& parts [[buffer(5)]],
    LOG_SOFTMAX_PLACE) {
  const Part part = part_of(args, parts, long(group) + first_group);
  float sum = 0;
  for (uint p = lane; p < uint(parts.parts); p += 32) sum += sums[part.row * parts.parts + p];
  walk_slopes(y + part.start, dy + part.start, simd_sum(sum), part.count, index, threads,
              dx + part.start);
}

// ---- rows that are not contiguous ----

// A group has 32 neighbours; lane: which of them, simd: which share of the columns.
struct Column {
  long at;
  bool in;
};
inline Column column_of(constant LogSoftmaxArgs& args, long group, uint lane) {
  const long tiles = (args.inner + 31) / 32;
  const long inner = group % tiles * 32 + lane;
  Column column;
  column.in = inner < args.inner;
  column.at = group / tiles * args.cols * args.inner + inner;
  return column;
}

template <typename T>
[[kernel, max_total_threads_per_threadgroup(256)]] void log_softmax_fwd_strided(
    device const T* x [[buffer(0)]], device T* y [[buffer(1)]],
    constant LogSoftmaxArgs& args [[buffer(2)]], LOG_SOFTMAX_PLACE) {
  threadgroup float tops[8][32], sums[8][32];
  const Column column = column_of(args, long(group) + first_group, lane);
  const long end = column.in ? args.cols : 0;
  Total total;
  total.top = -INFINITY;
  total.sum = 0;
  for (long c = simd; c < end; c += simds) add_exp<T>(total, widen(x[column.at + c * args.inner]));
  tops[simd][lane] = total.top;
  sums[simd][lane] = total.sum;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  float top = -INFINITY;
  for (uint s = 0; s < simds; ++s) top = max(top, tops[s][lane]);
  float sum = 0;
  for (uint s = 0; s < simds; ++s) sum += moved_sum<T>(sums[s][lane], tops[s][lane], top);
  const float log_sum = precise::log(sum);
  for (long c = simd; c < end; c += simds) {
    const long at = column.at + c * args.inner;
    y[at] = narrow<T>((widen(x[at]) - top) - log_sum);
  }
}

template <typename T>
[[kernel, max_total_threads_per_threadgroup(256)]] void log_softmax_bwd_strided(
    device const T* y [[buffer(0)]], device const T* dy [[buffer(1)]], device T* dx [[buffer(2)]],
    constant LogSoftmaxArgs& args [[buffer(3)]], LOG_SOFTMAX_PLACE) {
  threadgroup float sums[8][32];
  const Column column = column_of(args, long(group) + first_group, lane);
  const long end = column.in ? args.cols : 0;
  float sum = 0;
  for (long c = simd; c < end; c += simds) sum += widen(dy[column.at + c * args.inner]);
  sums[simd][lane] = sum;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  sum = 0;
  for (uint s = 0; s < simds; ++s) sum += sums[s][lane];
  for (long c = simd; c < end; c += simds) {
    const long at = column.at + c * args.inner;
    dx[at] = narrow<T>(fma(-exp_for<T>(widen(y[at])), sum, widen(dy[at])));
  }
}

// ---- names ----

#define MAKE(name, ...) template [[host_name(name)]] [[kernel]] decltype(__VA_ARGS__) __VA_ARGS__;
#define MAKE_BOTH(which, type, T)                                      \
  MAKE("log_softmax_fwd_" #which "_" type, log_softmax_fwd_##which<T>) \
  MAKE("log_softmax_bwd_" #which "_" type, log_softmax_bwd_##which<T>)
#define MAKE_KEPT(type, T, n)                                          \
  MAKE("log_softmax_fwd_kept" #n "_" type, log_softmax_fwd_kept<T, n>) \
  MAKE("log_softmax_bwd_kept" #n "_" type, log_softmax_bwd_kept<T, n>)
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
// Simdgroups that share the columns of rows that are not contiguous.
constexpr std::int64_t kShares = 8;
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

bool is_shared(const LogSoftmaxArgs& args) {
  return args.inner == 1 && args.cols > kLong && args.outer <= kFew;
}
LogSoftmaxParts parts_of(const LogSoftmaxArgs& args) {
  // Packs must not lie across two parts.
  const std::int64_t wanted = std::min<std::int64_t>(64, ceil_div(args.cols, kPartColumns));
  const std::int64_t each = ceil_div(ceil_div(args.cols, wanted), 64) * 64;
  return {ceil_div(args.cols, each), each};
}

std::size_t workspace(const void* p) {
  const auto& args = *static_cast<const LogSoftmaxArgs*>(p);
  if (!is_shared(args)) return 0;
  return static_cast<std::size_t>(args.outer * parts_of(args).parts) * 2 * sizeof(float);
}

// The names of one direction's kernels.
struct Names {
  const char *lanes, *kept[3], *walked, *part, *join, *strided;
};
constexpr Names kForward{
    "log_softmax_fwd_lanes",
    {"log_softmax_fwd_kept1", "log_softmax_fwd_kept2", "log_softmax_fwd_kept4"},
    "log_softmax_fwd_walked",
    "log_softmax_fwd_part",
    "log_softmax_fwd_join",
    "log_softmax_fwd_strided"};
constexpr Names kBackward{
    "log_softmax_bwd_lanes",
    {"log_softmax_bwd_kept1", "log_softmax_bwd_kept2", "log_softmax_bwd_kept4"},
    "log_softmax_bwd_walked",
    "log_softmax_bwd_part",
    "log_softmax_bwd_join",
    "log_softmax_bwd_strided"};

// Two kernels: sums of the parts into the workspace, from the last input alone; then results from all of them.
template <class T>
void run_shared(const KernelCall& call, const Names& names, bool whole) {
  const auto& args = call.as<LogSoftmaxArgs>();
  const LogSoftmaxParts parts = parts_of(args);
  for (const bool joins : {false, true}) {
    Launch launch(call, metal::kernel<T>(joins ? names.join : names.part));
    launch.constant(1, whole);
    unsigned long at = 0;
    if (joins && call.in.size() == 2) launch.input(at++, call.in[0]);
    launch.input(at++, call.in[call.in.size() - 1]);
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
  const auto& args = call.as<LogSoftmaxArgs>();  // tensors: [outer, cols, inner]
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
    return Launch(call, metal::kernel<T>(names.kept[each / 2]))
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
      Backend::kMetal, "log_softmax_fwd_" + type,
      [](const KernelCall& call) { run<T>(call, kForward); }, workspace);
  registry.add(
      Backend::kMetal, "log_softmax_bwd_" + type,
      [](const KernelCall& call) { run<T>(call, kBackward); }, workspace);
}

}  // namespace

void register_log_softmax_metal(KernelRegistry& registry) {
  add_kernels<float>(registry);
  add_kernels<F16>(registry);
  add_kernels<BF16>(registry);
}

}  // namespace mlxtape::ops

#endif
