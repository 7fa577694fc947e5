// Metal kernels of scan (formula: mlxtape/ops/scan.h). Bound by memory.
//
// Rows: 8 lanes, a simdgroup or a group walk along a row, a pack each at a time, and tell each other their sums. Columns: a
// thread walks down a pack of columns, or down one. Where there are too few of either, the axis is cut into pieces that are
// first summed by one kernel and then scanned by another: read twice, for 3 transfers instead of 2, in an order of additions
// that the shape alone decides. Integers: a simdgroup a row or column. Threads of a group: 256. Threadgroup memory: 96 bytes.
// About 28 registers a thread.
#include "scan_args.h"

namespace mlxtape::ops {

struct ScanCut {
  int64_t each, pieces;  // each: positions along the axis
};

}  // namespace mlxtape::ops

#ifdef __METAL_VERSION__

#include "backends/metal/device/vectors.h"

using namespace mlxtape::ops;

constant bool packs [[function_constant(0)]];   // rows, or what lies in a row, are whole packs
constant bool cut_up [[function_constant(1)]];  // there is more than one piece

constant constexpr uint kThreads = 256;
constant constexpr uint kSimds = kThreads / 32;

#define SCAN_PLACE                                                                            \
  constant uint &first_group [[buffer(30)]], uint group [[threadgroup_position_in_grid]],     \
      uint index [[thread_position_in_threadgroup]], uint lane [[thread_index_in_simdgroup]], \
      uint simd [[simdgroup_index_in_threadgroup]]

// ---- rows ----

// A pack of neighbouring elements of a row, in the order of the sum, positions counted in that order; zeros behind end.
template <typename T>
inline void load_in_order(constant ScanArgs& args, device const T* x, long at, long end,
                          thread float* v) {
  const int each = Pack<T>::kCount;
  if (packs) {
    for (int k = 0; k < each; ++k) v[k] = 0;
    if (at >= end) return;
    float u[Pack<T>::kCount];
    Pack<T>::unpack(load_pack(x + (args.reverse != 0 ? args.count - at - each : at)), u);
    for (int k = 0; k < each; ++k) v[k] = u[args.reverse != 0 ? each - 1 - k : k];
  } else {
    for (int k = 0; k < each; ++k) {
      const long place = args.reverse != 0 ? args.count - 1 - (at + k) : at + k;
      v[k] = at + k < end ? widen(x[place]) : 0.0f;
    }
  }
}
template <typename T>
inline void store_in_order(constant ScanArgs& args, device T* y, long at, long end,
                           thread const float* v) {
  const int each = Pack<T>::kCount;
  if (packs) {
    if (at >= end) return;
    float u[Pack<T>::kCount];
    for (int k = 0; k < each; ++k) u[k] = v[args.reverse != 0 ? each - 1 - k : k];
    store_pack(Pack<T>::pack(u), y + (args.reverse != 0 ? args.count - at - each : at));
  } else {
    for (int k = 0; k < each; ++k) {
      const long place = args.reverse != 0 ? args.count - 1 - (at + k) : at + k;
      if (at + k < end) y[place] = narrow<T>(v[k]);
    }
  }
}

struct Sums {
  float before, all;  // of the threads before this one, and of all
};

// Of kRow threads that share a row. room: a float for each simdgroup, and another one for each call that follows another.
template <uint kRow>
inline Sums sums_of(float v, threadgroup float* room, uint lane, uint simd) {
  const uint lanes = kRow < 32 ? kRow : 32;
  const uint own = lane % lanes;
  float upto = v;
  for (uint step = 1; step < lanes; step *= 2) {
    const float other = simd_shuffle_up(upto, ushort(step));
    if (own >= step) upto += other;
  }
  Sums sums;
  sums.before = simd_shuffle_up(upto, ushort(1));
  if (own == 0) sums.before = 0;
  sums.all = simd_shuffle(upto, ushort(lane - own + lanes - 1));
  if (kRow > 32) {
    if (lane == 0) room[simd] = sums.all;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    float earlier = 0;
    sums.all = 0;
    for (uint s = 0; s < kSimds; ++s) {
      if (s == simd) earlier = sums.all;
      sums.all += room[s];
    }
    sums.before += earlier;
  }
  return sums;
}

// kRow threads a row, of which there is one piece; or with a group a row, several.
template <typename T, uint kRow>
[[kernel, max_total_threads_per_threadgroup(256)]] void cumsum_rows(
    device const T* x [[buffer(0)]], device T* y [[buffer(1)]],
    device const float* parts [[buffer(2)]], constant ScanArgs& args [[buffer(3)]],
    constant ScanCut& cut [[buffer(4)]], SCAN_PLACE) {
  threadgroup float room[3][8];
  const int each = Pack<T>::kCount;
  const long item = (long(group) + first_group) * (kThreads / kRow) + index / kRow;
  const long piece = cut_up ? item % cut.pieces : 0;
  const long row = cut_up ? item / cut.pieces : item;
  const long first = piece * cut.each;
  const long stop = min(args.count, first + cut.each);
  const long end = row < args.outer ? stop : 0;  // nothing where there is no row
  const long start = row * args.count;
  float sum = 0;
  if (cut_up) {
    for (long p = index; p < piece; p += kThreads) sum += parts[row * cut.pieces + p];
    sum = sums_of<kRow>(sum, room[2], lane, simd).all;
  }
  uint turn = 0;
  float v[Pack<T>::kCount];
  for (long tile = first; tile < stop; tile += kRow * each, turn ^= 1) {
    const long at = tile + index % kRow * each;
    load_in_order<T>(args, x + start, at, end, v);
    float own = 0;
    for (int k = 0; k < each; ++k) own += v[k];
    const Sums sums = sums_of<kRow>(own, room[turn], lane, simd);
    float run = sum + sums.before;
    for (int k = 0; k < each; ++k) {
      const float before = run;
      run += v[k];
      v[k] = args.exclusive != 0 ? before : run;
    }
    store_in_order<T>(args, y + start, at, end, v);
    sum += sums.all;
  }
}

// parts: [outer, pieces]
template <typename T>
[[kernel, max_total_threads_per_threadgroup(256)]] void cumsum_row_pieces(
    device const T* x [[buffer(0)]], device float* parts [[buffer(1)]],
    constant ScanArgs& args [[buffer(2)]], constant ScanCut& cut [[buffer(3)]], SCAN_PLACE) {
  threadgroup float room[8];
  const int each = Pack<T>::kCount;
  const long item = long(group) + first_group;
  const long piece = item % cut.pieces;
  const long end = min(args.count, (piece + 1) * cut.each);
  const long start = item / cut.pieces * args.count;
  float own = 0;
  float v[Pack<T>::kCount];
  for (long at = piece * cut.each + index * each; at < end; at += kThreads * each) {
    load_in_order<T>(args, x + start, at, end, v);
    for (int k = 0; k < each; ++k) own += v[k];
  }
  own = sums_of<kThreads>(own, room, lane, simd).all;
  if (index == 0) parts[item] = own;
}

// ---- columns ----

// A thread has a pack of columns, or one, of one piece. kSum: their sums into parts [outer, pieces, inner]; else they are
// scanned from what is there.
template <typename T, bool kSum>
[[kernel, max_total_threads_per_threadgroup(256)]] void cumsum_columns(
    device const T* x [[buffer(0)]], device T* y [[buffer(1)]], device float* parts [[buffer(2)]],
    constant ScanArgs& args [[buffer(3)]], constant ScanCut& cut [[buffer(4)]], SCAN_PLACE) {
  const int columns = packs ? int(Pack<T>::kCount) : 1;
  const long number = (long(group) + first_group) * kThreads + index;
  const long units = args.inner / columns;
  if (number >= args.outer * cut.pieces * units) return;
  const long item = number / units;
  const long column = number % units * columns;
  const long first = item % cut.pieces * cut.each;
  const long n = min(cut.each, args.count - first);
  const long row = args.reverse != 0 ? args.count - 1 - first : first;
  const long step = args.reverse != 0 ? -args.inner : args.inner;
  const long begin = (item / cut.pieces * args.count + row) * args.inner + column;
  const long part = item * args.inner + column;
  float sum[Pack<T>::kCount];
  float v[Pack<T>::kCount];
  for (int k = 0; k < columns; ++k) sum[k] = kSum || !cut_up ? 0.0f : parts[part + k];
  for (long r = 0; r < n; ++r) {
    const long at = begin + r * step;
    if (packs) {
      Pack<T>::unpack(load_pack(x + at), v);
    } else {
      v[0] = widen(x[at]);
    }
    for (int k = 0; k < columns; ++k) {
      const float before = sum[k];
      sum[k] += v[k];
      v[k] = args.exclusive != 0 ? before : sum[k];
    }
    if (kSum) continue;
    if (packs) {
      store_pack(Pack<T>::pack(v), y + at);
    } else {
      y[at] = narrow<T>(v[0]);
    }
  }
  if (!kSum) return;
  for (int k = 0; k < columns; ++k) parts[part + k] = sum[k];
}

// parts: [outer, pieces, inner]. Each piece's sum becomes that of the pieces before, a thread a column.
[[kernel, max_total_threads_per_threadgroup(256)]] void cumsum_join_pieces(
    device float* parts [[buffer(0)]], constant ScanArgs& args [[buffer(1)]],
    constant ScanCut& cut [[buffer(2)]], SCAN_PLACE) {
  const long i = (long(group) + first_group) * kThreads + index;
  if (i >= args.outer * args.inner) return;
  const long begin = i / args.inner * cut.pieces * args.inner + i % args.inner;
  float sum = 0;
  for (long p = 0; p < cut.pieces; ++p) {
    const long at = begin + p * args.inner;
    const float v = parts[at];
    parts[at] = sum;
    sum += v;
  }
}

// ---- integers ----

// Exchanges are of 32 bits.
inline uint from_below(uint v, uint step) { return simd_shuffle_up(v, ushort(step)); }
inline ulong from_below(ulong v, uint step) {
  const uint low = simd_shuffle_up(uint(v), ushort(step));
  const uint high = simd_shuffle_up(uint(v >> 32), ushort(step));
  return ulong(high) << 32 | low;
}
inline uint of_last(uint v) { return simd_shuffle(v, ushort(31)); }
inline ulong of_last(ulong v) {
  const uint low = simd_shuffle(uint(v), ushort(31));
  const uint high = simd_shuffle(uint(v >> 32), ushort(31));
  return ulong(high) << 32 | low;
}

template <typename U, typename Wide>
[[kernel, max_total_threads_per_threadgroup(256)]] void cumsum_whole(
    device const U* x [[buffer(0)]], device U* y [[buffer(1)]],
    constant ScanArgs& args [[buffer(2)]], SCAN_PLACE) {
  const long i = (long(group) + first_group) * kSimds + simd;
  const bool is_row = i < args.outer * args.inner;
  const long begin = i / args.inner * args.count * args.inner + i % args.inner;
  Wide sum = 0;
  for (long tile = 0; tile < args.count; tile += 32) {
    const long at = tile + lane;
    const bool in = is_row && at < args.count;
    const long place = begin + (args.reverse != 0 ? args.count - 1 - at : at) * args.inner;
    const Wide v = in ? Wide(x[place]) : Wide(0);
    Wide upto = v;
    for (uint step = 1; step < 32; step *= 2) {
      const Wide other = from_below(upto, step);
      if (lane >= step) upto += other;
    }
    if (in) y[place] = U(sum + (args.exclusive != 0 ? upto - v : upto));
    sum += of_last(upto);
  }
}

// ---- names ----

#define MAKE(name, ...) template [[host_name(name)]] [[kernel]] decltype(__VA_ARGS__) __VA_ARGS__;
#define MAKE_ALL(type, T)                                \
  MAKE("cumsum_rows8_" type, cumsum_rows<T, 8>)          \
  MAKE("cumsum_rows32_" type, cumsum_rows<T, 32>)        \
  MAKE("cumsum_rows256_" type, cumsum_rows<T, 256>)      \
  MAKE("cumsum_row_pieces_" type, cumsum_row_pieces<T>)  \
  MAKE("cumsum_columns_" type, cumsum_columns<T, false>) \
  MAKE("cumsum_column_pieces_" type, cumsum_columns<T, true>)
MAKE_ALL("f32", float)
MAKE_ALL("f16", half)
MAKE_ALL("bf16", bf16)
MAKE("cumsum_whole_u8", cumsum_whole<uchar, uint>)
MAKE("cumsum_whole_u16", cumsum_whole<ushort, uint>)
MAKE("cumsum_whole_u32", cumsum_whole<uint, uint>)
MAKE("cumsum_whole_u64", cumsum_whole<ulong, ulong>)

#else

#include <algorithm>

#include "backends/metal/launch.h"

namespace mlxtape::ops {

namespace {

using metal::Launch;

constexpr std::int64_t kThreads = 256;
constexpr std::int64_t kEnoughGroups = 512;
constexpr std::int64_t kLeastPiece = 8192;  // of a row: elements worth a group
constexpr std::int64_t kMostPieces = 512;   // of columns: joined one after the other

template <class T>
constexpr std::int64_t kPack = 16 / sizeof(T);

// By shape alone.
template <class T>
ScanCut cut_of(const ScanArgs& a) {
  std::int64_t pieces = 0;
  if (a.inner == 1) {
    pieces = std::min(kEnoughGroups / a.outer, a.count / kLeastPiece);
  } else {
    const std::int64_t threads = a.outer * ceil_div(a.inner, kPack<T>);
    pieces = std::min({kEnoughGroups * kThreads / 2 / threads, a.count / 16, kMostPieces});
  }
  if (pieces < 2) return {a.count, 1};
  // Whole packs, also counted from the end where rows have whole packs.
  const std::int64_t each = ceil_div(ceil_div(a.count, pieces), 8) * 8;
  return {each, ceil_div(a.count, each)};
}

template <class T>
std::size_t workspace(const void* args) {
  const auto& a = *static_cast<const ScanArgs*>(args);
  const std::int64_t pieces = cut_of<T>(a).pieces;
  return pieces == 1 ? 0 : static_cast<std::size_t>(a.outer * pieces * a.inner) * sizeof(float);
}

template <class T>
void scan_rows(const KernelCall& call, const ScanCut& cut, bool packs) {
  const auto& args = call.as<ScanArgs>();
  const std::int64_t items = args.outer * cut.pieces;
  if (cut.pieces > 1) {
    Launch(call, metal::kernel<T>("cumsum_row_pieces"))
        .constant(0, packs)
        .input(0, call.in[0])
        .output(1, call.workspace)
        .bytes(2, args)
        .bytes(3, cut)
        .in_parts()
        .groups(items)
        .threads(kThreads)
        .run();
  }
  const char* name = "cumsum_rows8";
  std::int64_t row_threads = 8;
  if (cut.pieces > 1 || args.count > 16 * metal::kSimd * kPack<T>) {
    name = "cumsum_rows256";
    row_threads = kThreads;
  } else if (args.count > 2 * 8 * kPack<T>) {
    name = "cumsum_rows32";
    row_threads = metal::kSimd;
  }
  Launch(call, metal::kernel<T>(name))
      .constant(0, packs)
      .constant(1, cut.pieces > 1)
      .input(0, call.in[0])
      .output(1, call.out[0])
      .input(2, call.workspace)
      .bytes(3, args)
      .bytes(4, cut)
      .in_parts()
      .groups(ceil_div(items * row_threads, kThreads))
      .threads(kThreads)
      .run();
}

template <class T>
void scan_columns(const KernelCall& call, const ScanCut& cut, bool packs) {
  const auto& args = call.as<ScanArgs>();
  const std::int64_t threads = args.outer * cut.pieces * (args.inner / (packs ? kPack<T> : 1));
  const auto walk = [&](const char* name, bool sums) {
    Launch launch(call, metal::kernel<T>(name));
    launch.constant(0, packs).constant(1, cut.pieces > 1).input(0, call.in[0]);
    sums ? launch.output(2, call.workspace) : launch.output(1, call.out[0]);
    if (sums) {
      launch.output(1, nullptr);
    } else {
      launch.input(2, call.workspace);
    }
    launch.bytes(3, args)
        .bytes(4, cut)
        .in_parts()
        .groups(ceil_div(threads, kThreads))
        .threads(kThreads)
        .run();
  };
  if (cut.pieces > 1) {
    walk("cumsum_column_pieces", true);
    Launch(call, metal::kernel("cumsum_join_pieces"))
        .output(0, call.workspace)
        .bytes(1, args)
        .bytes(2, cut)
        .in_parts()
        .groups(ceil_div(args.outer * args.inner, kThreads))
        .threads(kThreads)
        .run();
  }
  walk("cumsum_columns", false);
}

template <class T>
void cumsum_fwd(const KernelCall& call) {
  const auto& args = call.as<ScanArgs>();
  const ScanCut cut = cut_of<T>(args);
  const bool packs = (args.inner == 1 ? args.count : args.inner) % kPack<T> == 0 &&
                     metal::is_aligned(call.in[0]) && metal::is_aligned(call.out[0]);
  args.inner == 1 ? scan_rows<T>(call, cut, packs) : scan_columns<T>(call, cut, packs);
}

template <class U>
void cumsum_whole_fwd(const KernelCall& call) {
  const auto& args = call.as<ScanArgs>();
  Launch(call, metal::kernel<U>("cumsum_whole"))
      .buffers()
      .in_parts()
      .groups(ceil_div(args.outer * args.inner, kThreads / metal::kSimd))
      .threads(kThreads)
      .run();
}

}  // namespace

void register_scan_metal(KernelRegistry& registry) {
  registry.add(Backend::kMetal, "cumsum_fwd_f32", cumsum_fwd<float>, workspace<float>);
  registry.add(Backend::kMetal, "cumsum_fwd_f16", cumsum_fwd<F16>, workspace<F16>);
  registry.add(Backend::kMetal, "cumsum_fwd_bf16", cumsum_fwd<BF16>, workspace<BF16>);
  registry.add(Backend::kMetal, "cumsum_fwd_u8", cumsum_whole_fwd<std::uint8_t>);
  registry.add(Backend::kMetal, "cumsum_fwd_u16", cumsum_whole_fwd<std::uint16_t>);
  registry.add(Backend::kMetal, "cumsum_fwd_u32", cumsum_whole_fwd<std::uint32_t>);
  registry.add(Backend::kMetal, "cumsum_fwd_u64", cumsum_whole_fwd<std::uint64_t>);
}

}  // namespace mlxtape::ops

#endif
