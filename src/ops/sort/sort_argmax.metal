// Metal kernels of argmax and argmin (mlxtape/ops/sort.h). The best is what has the smallest rank, and of those the smallest
// index, in whatever order they meet. Rows: a simdgroup or a group each; other axes: a thread a result, neighbours beside
// each other. Where that would leave the device idle, the elements of a result are cut into pieces and a second kernel joins
// their best. Bound by memory. Threads of a group: 256. Threadgroup memory: 64 bytes; about 24 registers.
#include "sort_args.h"

namespace mlxtape::ops {

// How the elements of each result are cut.
struct ArgmaxPieces {
  int64_t each, count;
};

}  // namespace mlxtape::ops

#ifdef __METAL_VERSION__

#include "sort_order-inl.h"

using namespace mlxtape::ops;

constant bool packs [[function_constant(0)]];     // rows and their pieces are whole packs
constant bool smallest [[function_constant(1)]];  // look for the smallest
constant bool cut_up [[function_constant(2)]];    // there is more than one piece

constant constexpr uint kThreads = 256;
constant constexpr uint kSimds = kThreads / 32;

#define ARGMAX_PLACE                                                                          \
  constant uint &first_group [[buffer(30)]], uint group [[threadgroup_position_in_grid]],     \
      uint index [[thread_position_in_threadgroup]], uint lane [[thread_index_in_simdgroup]], \
      uint simd [[simdgroup_index_in_threadgroup]]

// NaN comes before all: its key is the largest, and those of the smallest are moved up by one, around the end.
template <typename K>
inline uint rank_of(uint bits) {
  const uint key = K::key(bits);
  return (smallest ? key + (K::kHasNan ? 1 : 0) : ~key) & all_bits<K>();
}

// A thread looks at its elements in the order of their indices, so that only what is better replaces what it has. Nothing is
// better than nothing at first where its rank is the largest there is; if that holds for all elements of a result, they
// are equal, and the first is the one.
struct Candidate {
  uint rank, index;
};
inline Candidate nobody() {
  Candidate best;
  best.rank = best.index = 0xffffffffu;
  return best;
}
template <typename K>
inline void look(thread Candidate& best, uint bits, uint at) {
  const uint rank = rank_of<K>(bits);
  if (rank >= best.rank) return;
  best.rank = rank;
  best.index = at;
}
inline Candidate best_of_simd(Candidate own) {
  Candidate best;
  best.rank = simd_min(own.rank);
  best.index = simd_min(own.rank == best.rank ? own.index : 0xffffffffu);
  return best;
}
inline void put_best(device uint* parts, device uint* indices, long number, Candidate best) {
  if (cut_up) {
    parts[2 * number] = best.rank;
    parts[2 * number + 1] = best.index;
  } else {
    indices[number] = best.index == 0xffffffffu ? 0 : best.index;
  }
}

// kPerRow threads have a row's piece: a simdgroup or the group. parts: [results, pieces].
template <typename K, typename Bits, uint kPerRow>
[[kernel, max_total_threads_per_threadgroup(256)]] void argmax_rows(
    device const Bits* x [[buffer(0)]], device uint* indices [[buffer(1)]],
    device uint* parts [[buffer(2)]], constant ArgmaxArgs& args [[buffer(3)]],
    constant ArgmaxPieces& pieces [[buffer(4)]], ARGMAX_PLACE) {
  threadgroup Candidate room[8];
  const long work = (long(group) + first_group) * (kThreads / kPerRow) + index / kPerRow;
  const bool in = work < args.outer * pieces.count;
  const long begin = work % pieces.count * pieces.each;
  const uint n = in ? uint(min(pieces.each, args.count - begin)) : 0;
  device const Bits* row = x + work / pieces.count * args.count + begin;
  const uint t = index % kPerRow;
  Candidate best = nobody();
  if (packs) {
    const uint each = 16 / sizeof(Bits);
    for (uint i = t * each; i < n; i += kPerRow * each) {
      const uint4 bits = *(device const uint4*)(row + i);
      for (uint k = 0; k < each; ++k) {
        const uint v = sizeof(Bits) == 2 ? bits[k / 2] >> (k % 2 * 16) & 0xffffu : bits[k % 4];
        look<K>(best, v, uint(begin) + i + k);
      }
    }
  } else {
    for (uint i = t; i < n; i += kPerRow) look<K>(best, row[i], uint(begin) + i);
  }
  best = best_of_simd(best);
  if (kPerRow > 32) {
    if (lane == 0) room[simd] = best;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    best = nobody();
    if (lane < kSimds) best = room[lane];
    best = best_of_simd(best);
  }
  if (t == 0 && in) put_best(parts, indices, work, best);
}

template <typename K, typename Bits>
[[kernel, max_total_threads_per_threadgroup(256)]] void argmax_columns(
    device const Bits* x [[buffer(0)]], device uint* indices [[buffer(1)]],
    device uint* parts [[buffer(2)]], constant ArgmaxArgs& args [[buffer(3)]],
    constant ArgmaxPieces& pieces [[buffer(4)]], ARGMAX_PLACE) {
  const long results = args.outer * args.inner;
  const long work = (long(group) + first_group) * kThreads + index;
  if (work >= results * pieces.count) return;
  const long result = work % results, piece = work / results;
  const long begin = piece * pieces.each, end = min(args.count, begin + pieces.each);
  device const Bits* from = x + result / args.inner * args.count * args.inner + result % args.inner;
  Candidate best = nobody();
  for (long i = begin; i < end; ++i) look<K>(best, from[i * args.inner], uint(i));
  put_best(parts, indices, result * pieces.count + piece, best);
}

// A simdgroup a result.
[[kernel, max_total_threads_per_threadgroup(256)]] void argmax_join(
    device const uint* parts [[buffer(0)]], device uint* indices [[buffer(1)]],
    constant ArgmaxArgs& args [[buffer(2)]], constant ArgmaxPieces& pieces [[buffer(3)]],
    ARGMAX_PLACE) {
  const long result = (long(group) + first_group) * kSimds + simd;
  const bool in = result < args.outer * args.inner;
  Candidate best = nobody();
  for (long p = lane; in && p < pieces.count; p += 32) {
    const long at = 2 * (result * pieces.count + p);
    if (parts[at] < best.rank || (parts[at] == best.rank && parts[at + 1] < best.index)) {
      best.rank = parts[at];
      best.index = parts[at + 1];
    }
  }
  best = best_of_simd(best);
  if (lane == 0 && in) indices[result] = best.index == 0xffffffffu ? 0 : best.index;
}

#define MAKE(name, ...) template [[host_name(name)]] [[kernel]] decltype(__VA_ARGS__) __VA_ARGS__;
#define MAKE_ALL(type, K, Bits)                           \
  MAKE("argmax_rows32_" type, argmax_rows<K, Bits, 32>)   \
  MAKE("argmax_rows256_" type, argmax_rows<K, Bits, 256>) \
  MAKE("argmax_columns_" type, argmax_columns<K, Bits>)
MAKE_ALL("f32", OfF32, uint)
MAKE_ALL("f16", OfF16, ushort)
MAKE_ALL("bf16", OfBF16, ushort)
MAKE_ALL("i32", OfI32, uint)
MAKE_ALL("u32", OfU32, uint)

#else

#include <algorithm>
#include <string>

#include "backends/metal/launch.h"

namespace mlxtape::ops {

namespace {

using metal::Launch;

constexpr std::int64_t kThreads = 256;
constexpr std::int64_t kEnoughThreads = 1 << 16;
constexpr std::int64_t kByGroup = 2048;  // elements of a piece from which on a group has it

// By the shape alone.
ArgmaxPieces pieces_of(const ArgmaxArgs& args) {
  const std::int64_t results = args.outer * args.inner;
  const std::int64_t threads = args.inner > 1 ? 1 : kThreads;  // of a piece
  const std::int64_t least = args.inner > 1 ? 64 : 8192;       // elements of one
  const std::int64_t wanted =
      std::max<std::int64_t>(1, kEnoughThreads / std::max<std::int64_t>(1, results * threads));
  const std::int64_t count = std::clamp<std::int64_t>(args.count / least, 1, wanted);
  // Packs must not lie across two pieces.
  const std::int64_t each = ceil_div(ceil_div(args.count, count), 8) * 8;
  return {each, ceil_div(args.count, each)};
}

std::size_t workspace(const void* args) {
  const auto& a = *static_cast<const ArgmaxArgs*>(args);
  const std::int64_t pieces = pieces_of(a).count;
  return pieces == 1 ? 0 : static_cast<std::size_t>(a.outer * a.inner * pieces) * 8;
}

template <class T>
void argmax_fwd(const KernelCall& call) {
  const auto& args = call.as<ArgmaxArgs>();
  const ArgmaxPieces pieces = pieces_of(args);
  const std::int64_t results = args.outer * args.inner, work = results * pieces.count;
  const bool packs = args.count % (16 / static_cast<std::int64_t>(sizeof(T))) == 0 &&
                     metal::is_aligned(call.in[0]);
  const bool by_group = pieces.each > kByGroup;
  const char* name = args.inner > 1 ? "argmax_columns"
                     : by_group     ? "argmax_rows256"
                                    : "argmax_rows32";
  const std::int64_t groups = args.inner > 1 ? ceil_div(work, kThreads)
                              : by_group     ? work
                                             : ceil_div(work, kThreads / metal::kSimd);
  Launch(call, metal::kernel<T>(name))
      .constant(0, packs)
      .constant(1, args.smallest != 0)
      .constant(2, pieces.count > 1)
      .input(0, call.in[0])
      .output(1, call.out[0])
      .output(2, pieces.count > 1 ? call.workspace : nullptr)
      .bytes(3, args)
      .bytes(4, pieces)
      .in_parts()
      .groups(groups)
      .threads(kThreads)
      .run();
  if (pieces.count == 1) return;
  Launch(call, metal::kernel("argmax_join"))
      .input(0, call.workspace)
      .output(1, call.out[0])
      .bytes(2, args)
      .bytes(3, pieces)
      .in_parts()
      .groups(ceil_div(results, kThreads / metal::kSimd))
      .threads(kThreads)
      .run();
}

template <class T>
void add_kernels(KernelRegistry& registry) {
  registry.add(Backend::kMetal, std::string("argmax_fwd_") + name_of(kDType<T>), argmax_fwd<T>,
               workspace);
}

}  // namespace

void register_sort_argmax_metal(KernelRegistry& registry) {
  add_kernels<float>(registry);
  add_kernels<F16>(registry);
  add_kernels<BF16>(registry);
  add_kernels<std::int32_t>(registry);
  add_kernels<std::uint32_t>(registry);
}

}  // namespace mlxtape::ops

#endif
