// Metal kernels of sum_rows (formula and layout: mlxtape/ops/sum_rows.h).
//
// Sums: a thread has 16 bytes of columns (one where rows are not whole packs)
// of a chunk of sorted positions; neighbouring lanes have neighbouring columns.
// It walks through its chunk's terms and writes a sum when the key changes;
// sums that reach over an end of the chunk go to scratch memory. A second
// kernel adds those up: where a row begins in a chunk and goes on, its threads
// look how far. 256 threads a group, no threadgroup memory, some 40 registers a
// thread. Bound by reading terms and writing y.
//
// Keys: each group of 1024 sorted positions counts the keys that differ from
// the one before; a second kernel adds up the counts of the groups before its
// own, and numbers them.
#include "sum_rows_args.h"

#ifdef __METAL_VERSION__

#include "backends/metal/device/index.h"
#include "backends/metal/device/places.h"
#include "backends/metal/device/vectors.h"

constant uint from_type
    [[function_constant(0)]];  // StoredType of indices, or of the rows that are added
constant bool packs [[function_constant(1)]];
constant bool to_floats [[function_constant(2)]];  // y is f32, else as terms
constant bool numbers [[function_constant(3)]];    // different keys are counted

#define SUM_ROWS_PLACE                                                                    \
  constant uint &first_group [[buffer(30)]], uint group [[threadgroup_position_in_grid]], \
      uint index [[thread_position_in_threadgroup]]
#define SUM_ROWS_LANES \
  uint lane [[thread_index_in_simdgroup]], uint simd [[simdgroup_index_in_threadgroup]]

// ---- places and keys ----

[[kernel, max_total_threads_per_threadgroup(256)]] void sum_rows_places(
    device const uchar* indices [[buffer(0)]], device int* places [[buffer(1)]],
    constant SumRowsPlacesArgs& args [[buffer(2)]], SUM_ROWS_PLACE) {
  const long i = (long(group) + first_group) * 256 + index;
  if (i >= args.count) return;
  const ulong p = place_of(indices, from_type, i, args.rows);
  places[i] = p < ulong(args.rows) ? int(p) : kSumRowsNowhere;
}

// Is this the first position of its key?
inline bool is_first_of(int key, int before, long i) {
  return key != kSumRowsNowhere && (i == 0 || key != before);
}

// Over the 32 simdgroups of a group. room: 32.
inline uint group_count(uint v, threadgroup uint* room, uint lane, uint simd) {
  v = simd_sum(v);
  if (lane == 0) room[simd] = v;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  return simd_sum(room[lane]);
}

[[kernel, max_total_threads_per_threadgroup(1024)]] void sum_rows_sort_keys(
    device const int* places [[buffer(0)]], device const uint* order [[buffer(1)]],
    device int* keys [[buffer(2)]], device uint* counts [[buffer(3)]],
    constant SumRowsKeysArgs& args [[buffer(4)]], SUM_ROWS_PLACE, SUM_ROWS_LANES) {
  threadgroup uint room[32];
  const long whole = long(group) + first_group;
  const long i = whole * 1024 + index;
  int key = kSumRowsNowhere, before = kSumRowsNowhere;
  if (i < args.count) {
    key = places[order[i]];
    if (i > 0) before = places[order[i - 1]];
    keys[i] = key;
  }
  const uint count = group_count(is_first_of(key, before, i) ? 1 : 0, room, lane, simd);
  if (numbers && index == 0) counts[whole] = count;
}

[[kernel, max_total_threads_per_threadgroup(1024)]] void sum_rows_number_keys(
    device const int* keys [[buffer(0)]], device const uint* counts [[buffer(1)]],
    device int* slots [[buffer(2)]], device int* ids [[buffer(3)]],
    constant SumRowsKeysArgs& args [[buffer(4)]], constant uint& groups [[buffer(5)]],
    SUM_ROWS_PLACE, SUM_ROWS_LANES) {
  threadgroup uint room[3][32];
  const long whole = long(group) + first_group;
  const long i = whole * 1024 + index;
  uint before = 0, all = 0;
  for (uint b = index; b < groups; b += 1024) {
    all += counts[b];
    if (b < whole) before += counts[b];
  }
  before = group_count(before, room[0], lane, simd);
  all = group_count(all, room[1], lane, simd);
  int key = kSumRowsNowhere, last = kSumRowsNowhere;
  if (i < args.count) {
    key = keys[i];
    if (i > 0) last = keys[i - 1];
  }
  const bool first = is_first_of(key, last, i);
  const uint above = simd_prefix_inclusive_sum(first ? 1u : 0u);
  if (lane == 31) room[2][simd] = above;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  const uint lower = simd_sum(lane < simd ? room[2][lane] : 0u);
  const int slot = int(before + lower + above) - 1;
  if (i < args.count) slots[i] = slot;
  if (first) ids[slot] = key;
  if (i >= all && i < args.slots) ids[i] = -1;
}

// ---- sums ----

// A thread's neighbouring columns, as floats: those of 16 bytes of terms, or
// one.
template <typename T>
inline void load_some(device const T* p, thread float* v) {
  if (packs) {
    Pack<T>::unpack(load_pack(p), v);
  } else {
    v[0] = widen(p[0]);
  }
}
template <typename T>
inline void store_some(thread const float* v, device uchar* y, long at) {
  if (to_floats) {
    for (int i = 0; i < (packs ? int(Pack<T>::kCount) : 1); ++i) ((device float*)y)[at + i] = v[i];
  } else if (packs) {
    store_pack(Pack<T>::pack(v), (device T*)y + at);
  } else {
    ((device T*)y)[at] = narrow<T>(v[0]);
  }
}

// partials: [outer, chunks, 2, width]: of a row that came from the chunk
// before, of one that goes on.
template <typename T>
[[kernel, max_total_threads_per_threadgroup(256)]] void sum_rows_chunks(
    device const T* terms [[buffer(0)]], device const int* keys [[buffer(1)]],
    device const uint* order [[buffer(2)]], device const int* slots [[buffer(3)]],
    device const int* ids [[buffer(4)]], device uchar* y [[buffer(5)]],
    device float* partials [[buffer(6)]], constant SumRowsArgs& args [[buffer(7)]],
    SUM_ROWS_PLACE) {
  enum { kMost = Pack<T>::kCount };
  const int each = packs ? int(kMost) : 1;
  const long chunks = (args.count + kSumRowsChunk - 1) / kSumRowsChunk;
  long column = 0, chunk = 0;
  const long number = divide((long(group) + first_group) * 256 + index, args.width / each, column);
  const long o = divide(number, chunks, chunk);
  if (o >= args.outer) return;
  const long c = column * each;
  const long first = chunk * kSumRowsChunk, end = min(long(args.count), first + kSumRowsChunk);
  float sum[kMost], v[kMost];
  for (int k = 0; k < each; ++k) sum[k] = 0;
  // Has the row begun in this chunk?
  int key = keys[first];
  bool begins = first == 0 || keys[first - 1] != key;
  for (long i = first; i < end && key != kSumRowsNowhere; ++i) {
    load_some(terms + (o * args.count + order[i]) * args.width + c, v);
    for (int k = 0; k < each; ++k) sum[k] += v[k];
    const int next = i + 1 < args.count ? keys[i + 1] : kSumRowsNowhere;
    const bool ends = next != key;
    if (ends && begins) {
      const long at = (o * args.rows + (args.by_slot != 0 ? slots[i] : key)) * args.width + c;
      if (args.adds != 0) {
        load_some((device const T*)y + at, v);
        for (int k = 0; k < each; ++k) sum[k] = v[k] + sum[k];
      }
      store_some<T>(sum, y, at);
    } else if (ends || i + 1 == end) {
      const long at = ((o * chunks + chunk) * 2 + (begins ? 1 : 0)) * args.width + c;
      for (int k = 0; k < each; ++k) partials[at + k] = sum[k];
    }
    if (ends) {
      for (int k = 0; k < each; ++k) sum[k] = 0;
      begins = true;
    }
    key = next;
  }
  if (args.by_slot == 0) return;
  for (int k = 0; k < each; ++k) v[k] = 0;
  for (long u = first; u < min(long(args.rows), first + kSumRowsChunk); ++u) {
    if (ids[u] < 0) store_some<T>(v, y, u * args.width + c);
  }
}

// A column of the row that begins in one chunk and goes on, if there is one.
template <typename T>
[[kernel, max_total_threads_per_threadgroup(256)]] void sum_rows_crossing(
    device const int* keys [[buffer(0)]], device const int* slots [[buffer(1)]],
    device uchar* y [[buffer(2)]], device const float* partials [[buffer(3)]],
    constant SumRowsArgs& args [[buffer(4)]], SUM_ROWS_PLACE) {
  const long chunks = (args.count + kSumRowsChunk - 1) / kSumRowsChunk;
  long c = 0, chunk = 0;
  const long number = divide((long(group) + first_group) * 256 + index, args.width, c);
  const long o = divide(number, chunks, chunk);
  if (o >= args.outer) return;
  const long first = chunk * kSumRowsChunk, end = first + kSumRowsChunk;
  if (end >= args.count) return;
  const int key = keys[end - 1];
  if (key == kSumRowsNowhere || keys[end] != key) return;
  if (keys[first] == key && first > 0 && keys[first - 1] == key) return;  // it began before
  device const float* part = partials + (o * chunks + chunk) * 2 * args.width + c;
  float sum = part[args.width];
  for (long at = end; at < args.count && keys[at] == key; at += kSumRowsChunk) {
    part += 2 * args.width;
    sum += part[0];
  }
  const long to = (o * args.rows + (args.by_slot != 0 ? slots[end - 1] : key)) * args.width + c;
  if (to_floats) {
    ((device float*)y)[to] = sum;
  } else {
    device T* place = (device T*)y + to;
    place[0] = narrow<T>(args.adds != 0 ? widen(place[0]) + sum : sum);
  }
}

// ---- rows onto a dense tensor ----

template <typename T>
[[kernel, max_total_threads_per_threadgroup(256)]] void sum_rows_add(
    device const int* ids [[buffer(0)]], device const uchar* rows [[buffer(1)]],
    device T* dense [[buffer(2)]], constant SumRowsAddArgs& args [[buffer(3)]], SUM_ROWS_PLACE) {
  const long i = (long(group) + first_group) * 256 + index;
  if (i >= args.count * args.width) return;
  long c = 0;
  const int id = ids[divide(i, args.width, c)];
  if (id < 0 || id >= args.rows) return;
  float v = 0;
  if (from_type == kStoredF16) {
    v = widen(((device const half*)rows)[i]);
  } else if (from_type == kStoredBF16) {
    v = widen(((device const bf16*)rows)[i]);
  } else {
    v = ((device const float*)rows)[i];
  }
  const long at = id * args.width + c;
  dense[at] = narrow<T>(widen(dense[at]) + v);
}

#define MAKE(name, function) template [[host_name(name)]] [[kernel]] decltype(function) function;
#define MAKE_ALL(type, T)                               \
  MAKE("sum_rows_chunks_" type, sum_rows_chunks<T>)     \
  MAKE("sum_rows_crossing_" type, sum_rows_crossing<T>) \
  MAKE("sum_rows_add_" type, sum_rows_add<T>)
MAKE_ALL("f32", float)
MAKE_ALL("f16", half)
MAKE_ALL("bf16", bf16)

#else

#include <string>

#include "backends/metal/device/types.h"
#include "backends/metal/launch.h"

namespace mlxtape::ops {

namespace {

using metal::Launch;

static_assert(static_cast<int>(DType::kU8) == kStoredU8 &&
                  static_cast<int>(DType::kI64) == kStoredI64 &&
                  static_cast<int>(DType::kF16) == kStoredF16 &&
                  static_cast<int>(DType::kF32) == kStoredF32,
              "the kernels read a DType's number");

constexpr std::int64_t kThreads = 256;
constexpr std::int64_t kCounted = 1024;  // positions, and threads, of a group

void places(const KernelCall& call) {
  const auto& args = call.as<SumRowsPlacesArgs>();
  Launch(call, metal::kernel("sum_rows_places"))
      .constant(0, static_cast<std::uint32_t>(args.index_type))
      .buffers()
      .in_parts()
      .groups(ceil_div(args.count, kThreads))
      .threads(kThreads)
      .run();
}

std::size_t keys_workspace(const void* p) {
  const auto& args = *static_cast<const SumRowsKeysArgs*>(p);
  return static_cast<std::size_t>(ceil_div(args.count, kCounted)) * sizeof(std::uint32_t);
}

// in: places, order; out: keys, and slots and ids or neither.
void keys(const KernelCall& call) {
  const auto& args = call.as<SumRowsKeysArgs>();
  const std::int64_t groups = ceil_div(args.count, kCounted);
  const bool numbers = args.slots != 0;
  Launch(call, metal::kernel("sum_rows_sort_keys"))
      .constant(3, numbers)
      .input(0, call.in[0])
      .input(1, call.in[1])
      .output(2, call.out[0])
      .output(3, numbers ? call.workspace : nullptr)
      .bytes(4, args)
      .in_parts()
      .groups(groups)
      .threads(kCounted)
      .run();
  if (!numbers) return;
  Launch(call, metal::kernel("sum_rows_number_keys"))
      .input(0, call.out[0])
      .input(1, call.workspace)
      .output(2, call.out[1])
      .output(3, call.out[2])
      .bytes(4, args)
      .bytes(5, static_cast<std::uint32_t>(groups))
      .in_parts()
      .groups(groups)
      .threads(kCounted)
      .run();
}

std::int64_t chunks_of(const SumRowsArgs& args) { return ceil_div(args.count, kSumRowsChunk); }

std::size_t forward_workspace(const void* p) {
  const auto& args = *static_cast<const SumRowsArgs*>(p);
  return static_cast<std::size_t>(args.outer * chunks_of(args) * 2 * args.width) * sizeof(float);
}

// in: terms, keys, order, and slots and ids or neither; out: y.
template <class T> void forward(const KernelCall& call) {
  constexpr std::int64_t kPack = 16 / sizeof(T);
  const auto& args = call.as<SumRowsArgs>();
  const bool packs =
      args.width % kPack == 0 && metal::is_aligned(call.in[0]) && metal::is_aligned(call.out[0]);
  const bool to_floats = args.f32_sums != 0 && sizeof(T) != 4;
  const std::int64_t pieces = args.outer * chunks_of(args);
  Launch(call, metal::kernel<T>("sum_rows_chunks"))
      .constant(1, packs)
      .constant(2, to_floats)
      .input(0, call.in[0])
      .input(1, call.in[1])
      .input(2, call.in[2])
      .input(3, call.in[3])
      .input(4, call.in[4])
      .output(5, call.out[0])
      .output(6, call.workspace)
      .bytes(7, args)
      .in_parts()
      .groups(ceil_div(pieces * (args.width / (packs ? kPack : 1)), kThreads))
      .threads(kThreads)
      .run();
  if (chunks_of(args) == 1) return;
  Launch(call, metal::kernel<T>("sum_rows_crossing"))
      .constant(2, to_floats)
      .input(0, call.in[1])
      .input(1, call.in[3])
      .output(2, call.out[0])
      .input(3, call.workspace)
      .bytes(4, args)
      .in_parts()
      .groups(ceil_div(pieces * args.width, kThreads))
      .threads(kThreads)
      .run();
}

// in: ids, rows; out: what they are added to.
template <class T> void add(const KernelCall& call) {
  const auto& args = call.as<SumRowsAddArgs>();
  Launch(call, metal::kernel<T>("sum_rows_add"))
      .constant(0, static_cast<std::uint32_t>(args.from))
      .buffers()
      .in_parts()
      .groups(ceil_div(args.count * args.width, kThreads))
      .threads(kThreads)
      .run();
}

template <class T> void add_kernels(KernelRegistry& registry) {
  const std::string type = name_of(kDType<T>);
  registry.add(Backend::kMetal, "sum_rows_fwd_" + type, forward<T>, forward_workspace);
  registry.add(Backend::kMetal, "sum_rows_add_" + type, add<T>);
}

}  // namespace

void register_sum_rows_metal(KernelRegistry& registry) {
  registry.add(Backend::kMetal, "sum_rows_places_i32", places);
  registry.add(Backend::kMetal, "sum_rows_keys_i32", keys, keys_workspace);
  add_kernels<float>(registry);
  add_kernels<F16>(registry);
  add_kernels<BF16>(registry);
}

}  // namespace mlxtape::ops

#endif
