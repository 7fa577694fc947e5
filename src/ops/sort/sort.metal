// Metal kernels of sort (formulas: mlxtape/ops/sort.h), but for argmax (sort_argmax.metal).
//
// Rows of up to 2048 elements are sorted by one group: a bitonic network of entries (sort_order-inl.h) whose exchanges stay in
// a thread's registers where they are near, go from lane to lane within a simdgroup, and through threadgroup memory only from
// simdgroup to simdgroup. Longer rows are sorted in tiles of 2048 which are then merged two by two: a thread has one entry,
// and looks for its rank in the other run. The best few: tiles of 2048 keep their best, until one tile is left. What is not
// among the best goes to its place by its own index less those of the best that come before it. Short rows are bound by
// exchanges, merges by the latency of searches. Threads of a group: 32 to 256. Threadgroup memory: 8 bytes for each
// element of a tile, 16 KB at most. About 40 registers a thread.
#include "sort_args.h"

namespace mlxtape::ops {

// Rows that are worked on at once, from first on, and how one is cut.
struct SortPlan {
  int64_t first, count;
  int64_t per_row;  // entries of a row in this pass
  int64_t tiles;    // of a row; of merges the length of a run
  int64_t is_last;  // results are written
};

}  // namespace mlxtape::ops

#ifdef __METAL_VERSION__

#include "sort_order-inl.h"

using namespace mlxtape::ops;

constant bool has_values [[function_constant(0)]];

constant constexpr int kItems = 8;  // entries of a thread
constant constexpr ulong kLastEntry =
    ~0ul;  // behind every real one: no row has an index of 2³² − 1

#define SORT_PLACE                                                                        \
  constant uint &first_group [[buffer(30)]], uint group [[threadgroup_position_in_grid]], \
      uint index [[thread_position_in_threadgroup]], uint threads [[threads_per_threadgroup]]

// ---- a group's entries in order ----

inline void exchange(thread ulong& a, thread ulong& b, bool up) {
  const ulong x = a, y = b;
  const bool keep = (x < y) == up;
  a = keep ? x : y;
  b = keep ? y : x;
}

inline ulong entry_across(ulong e, ushort mask) {
  return as_type<ulong>(simd_shuffle_xor(as_type<uint2>(e), mask));
}

// Thread t gets those from t·kItems on. room: as many entries, for more than one simdgroup.
inline void group_sort(thread ulong* e, threadgroup ulong* room, uint t, uint threads) {
  for (uint size = 2; size <= uint(kItems); size *= 2) {
    for (uint step = size / 2; step > 0; step /= 2) {
      for (uint j = 0; j < uint(kItems); ++j) {
        if ((j & step) == 0) exchange(e[j], e[j + step], ((t * kItems + j) & size) == 0);
      }
    }
  }
  for (uint size = 2 * kItems; size <= threads * kItems; size *= 2) {
    const bool up = ((t * kItems) & size) == 0;
    for (uint far = size / kItems / 2; far > 0; far /= 2) {  // in threads
      const bool keeps_less = ((t & far) == 0) == up;
      if (far < 32) {
        for (int j = 0; j < kItems; ++j) {
          const ulong other = entry_across(e[j], ushort(far));
          e[j] = (other < e[j]) == keeps_less ? other : e[j];
        }
        continue;
      }
      threadgroup_barrier(mem_flags::mem_threadgroup);  // the last exchange has been read
      for (int j = 0; j < kItems; ++j) room[j * threads + t] = e[j];
      threadgroup_barrier(mem_flags::mem_threadgroup);
      for (int j = 0; j < kItems; ++j) {
        const ulong other = room[j * threads + (t ^ far)];
        e[j] = (other < e[j]) == keeps_less ? other : e[j];
      }
    }
    for (uint step = kItems / 2; step > 0; step /= 2) {
      for (uint j = 0; j < uint(kItems); ++j) {
        if ((j & step) == 0) exchange(e[j], e[j + step], up);
      }
    }
  }
}

// ---- sort ----

template <typename Bits>
inline void put_result(device const Bits* x, device Bits* values, device uint* indices, long row,
                       long cols, long keep, long at, uint i) {
  if (at >= keep) return;
  indices[row * keep + at] = i;
  if (has_values) values[row * keep + at] = x[row * cols + i];
}

// A tile of a row to a group. entries: [count, cols], of rows of several tiles.
template <typename K, typename Bits>
[[kernel, max_total_threads_per_threadgroup(256)]] void sort_tiles(
    device const Bits* x [[buffer(0)]], device Bits* values [[buffer(1)]],
    device uint* indices [[buffer(2)]], device ulong* entries [[buffer(3)]],
    constant SortArgs& args [[buffer(4)]], constant SortPlan& plan [[buffer(5)]], SORT_PLACE,
    threadgroup ulong* room [[threadgroup(0)]]) {
  const long whole = long(group) + first_group;
  const long local = whole / plan.tiles;
  const long row = plan.first + local;
  const long begin = whole % plan.tiles * (threads * kItems);
  ulong e[kItems];
  for (int j = 0; j < kItems; ++j) {
    const long i = begin + j * threads + index;
    e[j] = kLastEntry;
    if (i < args.cols) {
      e[j] = ulong(key_in_order<K>(x[row * args.cols + i], args.down != 0)) << 32 | ulong(i);
    }
  }
  group_sort(e, room, index, threads);
  for (int j = 0; j < kItems; ++j) {
    const long at = begin + index * kItems + j;
    if (at >= args.cols) continue;
    if (plan.is_last != 0) {
      put_result(x, values, indices, row, args.cols, args.keep, at, uint(e[j]));
    } else {
      entries[local * args.cols + at] = e[j];
    }
  }
}

// How many of n entries in order come before e.
inline long entries_before(device const ulong* entries, long n, ulong e) {
  long low = 0;
  while (n > 0) {
    const long half_n = n / 2;
    if (entries[low + half_n] < e) {
      low += half_n + 1;
      n -= half_n + 1;
    } else {
      n = half_n;
    }
  }
  return low;
}

// Runs of plan.tiles entries become runs of twice as many.
template <typename K, typename Bits>
[[kernel, max_total_threads_per_threadgroup(256)]] void sort_merge(
    device const Bits* x [[buffer(0)]], device Bits* values [[buffer(1)]],
    device uint* indices [[buffer(2)]], device const ulong* from [[buffer(3)]],
    device ulong* to [[buffer(4)]], constant SortArgs& args [[buffer(5)]],
    constant SortPlan& plan [[buffer(6)]], SORT_PLACE) {
  const long number = (long(group) + first_group) * threads + index;
  if (number >= plan.count * args.cols) return;
  const long local = number / args.cols;
  const long i = number % args.cols;
  device const ulong* entries = from + local * args.cols;
  const ulong e = entries[i];
  const long run = i / plan.tiles;
  const long other = (run ^ 1) * plan.tiles;
  const long n = clamp(args.cols - other, 0l, long(plan.tiles));
  const long at = run / 2 * 2 * plan.tiles + i % plan.tiles +
                  (n == 0 ? 0 : entries_before(entries + other, n, e));
  if (plan.is_last != 0) {
    put_result(x, values, indices, plan.first + local, args.cols, args.keep, at, uint(e));
  } else {
    to[local * args.cols + at] = e;
  }
}

// ---- the best few ----

// kLast prefers the later of equals: it counts from the row's end.
inline uint place_in_order(uint i, long cols, Best best) {
  return best == Best::kLast ? uint(cols - 1 - i) : i;
}
// Better ones are smaller.
template <typename K>
inline ulong rank_entry(uint bits, uint i, constant SelectArgs& args) {
  uint key = key_in_order<K>(bits, args.best == Best::kLargest);
  if (args.best == Best::kLast) key = ~key & all_bits<K>();
  return ulong(key) << 32 | place_in_order(i, args.cols, args.best);
}

// A tile of a row to a group: of x, or of what the pass before kept [count, per_row]. list: the best's indices in order
// [count, args.count], where the others will be asked for.
template <typename K, typename Bits, bool kFromX>
[[kernel, max_total_threads_per_threadgroup(256)]] void select_tiles(
    device const Bits* x [[buffer(0)]], device Bits* values [[buffer(1)]],
    device uint* indices [[buffer(2)]], device const ulong* from [[buffer(3)]],
    device ulong* to [[buffer(4)]], device uint* list [[buffer(5)]],
    constant SelectArgs& args [[buffer(6)]], constant SortPlan& plan [[buffer(7)]], SORT_PLACE,
    threadgroup ulong* room [[threadgroup(0)]]) {
  const long whole = long(group) + first_group;
  const long local = whole / plan.tiles;
  const long row = plan.first + local;
  const long begin = whole % plan.tiles * (threads * kItems);
  ulong e[kItems];
  for (int j = 0; j < kItems; ++j) {
    const long i = begin + j * threads + index;
    e[j] = kLastEntry;
    if (i >= plan.per_row) continue;
    e[j] = kFromX ? rank_entry<K>(x[row * args.cols + i], uint(i), args)
                  : from[local * plan.per_row + i];
  }
  group_sort(e, room, index, threads);
  if (plan.is_last == 0) {
    for (int j = 0; j < kItems; ++j) {
      const long at = index * kItems + j;
      if (at < args.count) to[whole * args.count + at] = e[j];
    }
    return;
  }
  const bool backwards = args.whole != 0 && args.best == Best::kLast;
  const long keep = args.whole != 0 ? args.cols : args.count;
  for (int j = 0; j < kItems; ++j) {
    const long at = index * kItems + j;
    const uint i = place_in_order(uint(e[j]), args.cols, args.best);
    const bool is_best = at < args.count;
    if (is_best) {
      put_result(x, values, indices, row, args.cols, keep, backwards ? args.cols - 1 - at : at, i);
    }
    e[j] = is_best ? ulong(i) : kLastEntry;
  }
  if (args.whole == 0) return;
  group_sort(e, room, index, threads);
  for (int j = 0; j < kItems; ++j) {
    const long at = index * kItems + j;
    if (at < args.count) list[local * args.count + at] = uint(e[j]);
  }
}

// A thread an element that is not among the best.
template <typename Bits>
[[kernel, max_total_threads_per_threadgroup(256)]] void select_rest(
    device const Bits* x [[buffer(0)]], device Bits* values [[buffer(1)]],
    device uint* indices [[buffer(2)]], device const uint* list [[buffer(3)]],
    constant SelectArgs& args [[buffer(4)]], constant SortPlan& plan [[buffer(5)]], SORT_PLACE) {
  const long number = (long(group) + first_group) * threads + index;
  if (number >= plan.count * args.cols) return;
  const long local = number / args.cols;
  const long i = number % args.cols;
  device const uint* best = list + local * args.count;
  uint low = 0, n = uint(args.count);
  while (n > 0) {
    const uint half_n = n / 2;
    if (best[low + half_n] < uint(i)) {
      low += half_n + 1;
      n -= half_n + 1;
    } else {
      n = half_n;
    }
  }
  if (low < uint(args.count) && best[low] == uint(i)) return;
  const long at = (args.best == Best::kFirst ? args.count : 0) + i - low;
  put_result(x, values, indices, plan.first + local, args.cols, args.cols, at, uint(i));
}

// ---- gradient ----

template <typename Bits>
[[kernel, max_total_threads_per_threadgroup(256)]] void sort_bwd(
    device const Bits* dy [[buffer(0)]], device const uint* indices [[buffer(1)]],
    device Bits* dx [[buffer(2)]], constant SortBackwardArgs& args [[buffer(3)]], SORT_PLACE) {
  const long i = (long(group) + first_group) * threads + index;
  if (i >= args.rows * args.count) return;
  dx[i / args.count * args.cols + indices[i]] = dy[i];
}

// ---- names ----

#define MAKE(name, ...) template [[host_name(name)]] [[kernel]] decltype(__VA_ARGS__) __VA_ARGS__;
#define MAKE_ALL(type, K, Bits)                           \
  MAKE("sort_tiles_" type, sort_tiles<K, Bits>)           \
  MAKE("sort_merge_" type, sort_merge<K, Bits>)           \
  MAKE("select_tiles_" type, select_tiles<K, Bits, true>) \
  MAKE("select_again_" type, select_tiles<K, Bits, false>)
MAKE_ALL("f32", OfF32, uint)
MAKE_ALL("f16", OfF16, ushort)
MAKE_ALL("bf16", OfBF16, ushort)
MAKE_ALL("i32", OfI32, uint)
MAKE_ALL("u32", OfU32, uint)
MAKE("select_rest_u16", select_rest<ushort>)
MAKE("select_rest_u32", select_rest<uint>)
MAKE("sort_bwd_u16", sort_bwd<ushort>)
MAKE("sort_bwd_u32", sort_bwd<uint>)

#else

#include <algorithm>
#include <string>
#include <utility>

#include "backends/metal/launch.h"

namespace mlxtape::ops {

namespace {

using metal::Launch;

constexpr std::int64_t kItems = 8;  // entries of a thread
constexpr std::int64_t kTile = 2048;
constexpr std::int64_t kThreads = 256;
constexpr std::int64_t kEntry = 8;                              // bytes
constexpr std::int64_t kMostScratch = std::int64_t{256} << 20;  // that rows at once may need

template <class T>
metal::KernelName kernel_of_bits(const char* of_16, const char* of_32) {
  return metal::kernel(sizeof(T) == 2 ? of_16 : of_32);
}

// Elements of a group's tile: a power of two.
std::int64_t tile_for(std::int64_t count) {
  std::int64_t size = 256;
  while (size < count && size < kTile) size *= 2;
  return size;
}
void set_tile(Launch& launch, std::int64_t tile, std::int64_t groups) {
  const std::int64_t threads = tile / kItems;
  launch.group_memory(threads == metal::kSimd ? 16 : tile * kEntry)
      .operations(static_cast<double>(groups * tile) * 800)
      .in_parts()
      .groups(groups)
      .threads(threads);
}

// Calls run(first row, rows) for as many rows at a time as scratch memory has room for.
template <class Run>
void in_turns(std::int64_t rows, std::int64_t row_bytes, const Run& run) {
  const std::int64_t each = std::clamp<std::int64_t>(
      kMostScratch / std::max<std::int64_t>(row_bytes, 1), 1, std::max<std::int64_t>(rows, 1));
  for (std::int64_t first = 0; first < rows; first += each)
    run(first, std::min(each, rows - first));
}
std::size_t bytes_for(std::int64_t rows, std::int64_t row_bytes) {
  std::int64_t most = 0;
  in_turns(rows, row_bytes,
           [&](std::int64_t, std::int64_t count) { most = std::max(most, count); });
  return static_cast<std::size_t>(most * row_bytes);
}

// ---- sort ----

// Two buffers of a row's entries.
std::int64_t sort_row_bytes(const SortArgs& args) {
  return args.cols <= kTile ? 0 : 2 * args.cols * kEntry;
}
std::size_t sort_workspace(const void* p) {
  const auto& args = *static_cast<const SortArgs*>(p);
  return bytes_for(args.rows, sort_row_bytes(args));
}

template <class T>
void sort_fwd(const KernelCall& call) {
  const auto& args = call.as<SortArgs>();
  void* values = call.out[0];  // may be null
  const std::int64_t tile = tile_for(args.cols), tiles = ceil_div(args.cols, tile);
  in_turns(args.rows, sort_row_bytes(args), [&](std::int64_t first, std::int64_t count) {
    auto* from = static_cast<char*>(call.workspace);
    char* to = from + (from == nullptr ? 0 : count * args.cols * kEntry);
    SortPlan plan{first, count, args.cols, tiles, tiles == 1 ? 1 : 0};
    Launch launch(call, metal::kernel<T>("sort_tiles"));
    launch.constant(0, values != nullptr)
        .input(0, call.in[0])
        .output(1, values)
        .output(2, call.out[1])
        .output(3, from)
        .bytes(4, args)
        .bytes(5, plan);
    set_tile(launch, tile, count * tiles);
    launch.run();
    for (std::int64_t run = tile; run < args.cols; run *= 2, std::swap(from, to)) {
      plan.tiles = run;
      plan.is_last = run * 2 >= args.cols ? 1 : 0;
      Launch(call, metal::kernel<T>("sort_merge"))
          .constant(0, values != nullptr)
          .input(0, call.in[0])
          .output(1, values)
          .output(2, call.out[1])
          .input(3, from)
          .output(4, to)
          .bytes(5, args)
          .bytes(6, plan)
          .operations(static_cast<double>(count * args.cols) * 200)
          .in_parts()
          .groups(ceil_div(count * args.cols, kThreads))
          .threads(kThreads)
          .run();
    }
  });
}

// ---- the best few ----

// Of a row: what the first pass keeps, what the second does, and the list.
struct SelectRoom {
  std::int64_t first = 0, second = 0, list = 0;  // bytes
};
SelectRoom room_of(const SelectArgs& args) {
  SelectRoom room;
  if (const std::int64_t tiles = ceil_div(args.cols, kTile); tiles > 1) {
    room.first = tiles * args.count * kEntry;
    room.second = ceil_div(tiles * args.count, kTile) * args.count * kEntry;
  }
  if (args.whole != 0) room.list = args.count * 4;
  return room;
}
std::int64_t select_row_bytes(const SelectArgs& args) {
  const SelectRoom room = room_of(args);
  return room.first + room.second + room.list;
}
std::size_t select_workspace(const void* p) {
  const auto& args = *static_cast<const SelectArgs*>(p);
  return bytes_for(args.rows, select_row_bytes(args));
}

template <class T>
void select_fwd(const KernelCall& call) {
  const auto& args = call.as<SelectArgs>();
  void* values = call.out[0];  // may be null
  const SelectRoom room = room_of(args);
  in_turns(args.rows, select_row_bytes(args), [&](std::int64_t first, std::int64_t count) {
    auto* scratch = static_cast<char*>(call.workspace);
    char* to = room.first == 0 ? nullptr : scratch;
    char* from = room.first == 0 ? nullptr : scratch + count * room.first;
    char* list = room.list == 0 ? nullptr : scratch + count * (room.first + room.second);
    SortPlan plan{first, count, args.cols, 0, 0};
    for (bool from_x = true; plan.is_last == 0; from_x = false) {
      const std::int64_t tile = tile_for(plan.per_row);
      plan.tiles = ceil_div(plan.per_row, tile);
      plan.is_last = plan.tiles == 1 ? 1 : 0;
      Launch launch(call, metal::kernel<T>(from_x ? "select_tiles" : "select_again"));
      launch.constant(0, values != nullptr)
          .input(0, call.in[0])
          .output(1, values)
          .output(2, call.out[1])
          .input(3, from)
          .output(4, to)
          .output(5, list)
          .bytes(6, args)
          .bytes(7, plan);
      set_tile(launch, tile, count * plan.tiles);
      launch.run();
      plan.per_row = plan.tiles * args.count;
      std::swap(from, to);
    }
    if (args.whole == 0) return;
    Launch(call, kernel_of_bits<T>("select_rest_u16", "select_rest_u32"))
        .constant(0, values != nullptr)
        .input(0, call.in[0])
        .output(1, values)
        .output(2, call.out[1])
        .input(3, list)
        .bytes(4, args)
        .bytes(5, plan)
        .operations(static_cast<double>(count * args.cols) * 100)
        .in_parts()
        .groups(ceil_div(count * args.cols, kThreads))
        .threads(kThreads)
        .run();
  });
}

// ---- gradient ----

template <class T>
void sort_bwd(const KernelCall& call) {
  const auto& args = call.as<SortBackwardArgs>();
  Launch(call, kernel_of_bits<T>("sort_bwd_u16", "sort_bwd_u32"))
      .buffers()
      .in_parts()
      .groups(ceil_div(args.rows * args.count, kThreads))
      .threads(kThreads)
      .run();
}

template <class T>
void add_kernels(KernelRegistry& registry) {
  const std::string type = name_of(kDType<T>);
  registry.add(Backend::kMetal, "sort_fwd_" + type, sort_fwd<T>, sort_workspace);
  registry.add(Backend::kMetal, "select_fwd_" + type, select_fwd<T>, select_workspace);
  if constexpr (is_float(kDType<T>)) {
    registry.add(Backend::kMetal, "sort_bwd_" + type, sort_bwd<T>);
  }
}

}  // namespace

void register_sort_argmax_metal(KernelRegistry& registry);

void register_sort_metal(KernelRegistry& registry) {
  register_sort_argmax_metal(registry);
  add_kernels<float>(registry);
  add_kernels<F16>(registry);
  add_kernels<BF16>(registry);
  add_kernels<std::int32_t>(registry);
  add_kernels<std::uint32_t>(registry);
}

}  // namespace mlxtape::ops

#endif
