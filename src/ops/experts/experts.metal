// Metal kernels of experts (formula: mlxtape/ops/experts.h).
//
// Every product is a grouped one: tiles of 64 or 32 pairs of one expert, by the shape alone, and as many columns
// (backends/metal/device/tiles.h), listed on the device from the offsets, so that the host never learns how many pairs an
// expert has. Rows are gathered as a tile is loaded; activations are made once, in f32; what follows a product is done from
// its registers. Sums over a token's experts are made from the pairs' own results, in the order of its choices. Bound by
// arithmetic. 128 threads a group, about 90 registers, 6 to 10 KB of threadgroup memory.
//
// Up to 8 tokens, forward: an expert has so few pairs that a tile would be nearly empty. A simdgroup has four rows of a pair's
// weights, and its lanes go along them; about 60 registers. Bound by reading the weights.
#include "experts_metal-inl.h"

#ifdef __METAL_VERSION__

constant bool weighted [[function_constant(2)]];  // by the scores
constant uint tile_pairs [[function_constant(3)]];

constant constexpr uint kPart = 256;  // pairs of a group, which are put in order

// ---- the order of pairs ----

// The experts of a part's pairs, E for those of none, E + 1 behind the last pair.
inline void read_part(constant ExpertsArgs& args, device const uint* indices, long part, uint index,
                      threadgroup uint* seen) {
  const long pair = part * kPart + index;
  const uint experts = uint(args.experts);
  seen[index] = pair < args.tokens * args.chosen ? min(indices[pair], experts) : experts + 1;
  threadgroup_barrier(mem_flags::mem_threadgroup);
}

// counts [parts, E+1]: how many pairs of a part go to each expert; the last: to none.
[[kernel, max_total_threads_per_threadgroup(256)]] void experts_count(
    device const uint* indices [[buffer(0)]], device uint* counts [[buffer(1)]],
    constant ExpertsArgs& args [[buffer(2)]], EXPERTS_PLACE) {
  threadgroup uint seen[kPart];
  const long part = long(group) + first_group;
  read_part(args, indices, part, index, seen);
  const uint experts = uint(args.experts);
  for (uint e = index; e <= experts; e += kPart) {
    uint count = 0;
    for (uint i = 0; i < kPart; ++i) count += seen[i] == e ? 1u : 0u;
    counts[part * (experts + 1) + e] = count;
  }
}

// The sum of v over the threads before this one, of 1024. room: 32.
inline uint sum_before(uint v, threadgroup uint* room, uint lane, uint simd) {
  const uint before = simd_prefix_exclusive_sum(v);
  if (lane == 31) room[simd] = before + v;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  return before + simd_broadcast(simd_prefix_exclusive_sum(room[lane]), ushort(simd));
}

// counts becomes where each part's pairs of an expert begin. One group; a thread has an expert, and the last thread with one
// also has those of none, which stand behind all others.
[[kernel, max_total_threads_per_threadgroup(1024)]] void experts_place(
    device uint* counts [[buffer(0)]], constant ExpertsArgs& args [[buffer(1)]],
    constant uint& parts [[buffer(2)]], uint e [[thread_position_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]], uint simd [[simdgroup_index_in_threadgroup]]) {
  threadgroup uint room[32];
  const uint experts = uint(args.experts);
  const long step = experts + 1;
  uint mine = 0;
  if (e < experts) {
    for (uint p = 0; p < parts; ++p) mine += counts[p * step + e];
  }
  uint next = sum_before(mine, room, lane, simd);
  if (e >= experts) return;
  for (uint which = e; which < (e + 1 == experts ? experts + 1 : e + 1); ++which) {
    for (uint p = 0; p < parts; ++p) {
      const uint some = counts[p * step + which];
      counts[p * step + which] = next;
      next += some;
    }
  }
}

// A pair's place is behind those of its part and expert that come before it.
[[kernel, max_total_threads_per_threadgroup(256)]] void experts_put(
    device const uint* indices [[buffer(0)]], device const uint* begins [[buffer(1)]],
    device uint* order [[buffer(2)]], constant ExpertsArgs& args [[buffer(3)]], EXPERTS_PLACE) {
  threadgroup uint seen[kPart];
  const long part = long(group) + first_group;
  read_part(args, indices, part, index, seen);
  const uint e = seen[index], experts = uint(args.experts);
  if (e > experts) return;
  uint rank = 0;
  for (uint i = 0; i < index; ++i) rank += seen[i] == e ? 1u : 0u;
  order[begins[part * (experts + 1) + e] + rank] = uint(part) * kPart + index;
}

// ---- tiles ----

// One group: a thread has an expert.
[[kernel, max_total_threads_per_threadgroup(1024)]] void experts_tiles(
    device const uint* offsets [[buffer(0)]], device ExpertsTile* list [[buffer(1)]],
    constant ExpertsArgs& args [[buffer(2)]], constant ExpertsGrid& grid [[buffer(3)]],
    uint e [[thread_position_in_threadgroup]], uint lane [[thread_index_in_simdgroup]],
    uint simd [[simdgroup_index_in_threadgroup]]) {
  threadgroup uint room[32];
  const uint pairs = uint(args.tokens * args.chosen), experts = uint(args.experts);
  const uint from = e < experts ? min(offsets[e], pairs) : 0;
  const uint to = e < experts ? max(from, min(offsets[e + 1], pairs)) : 0;
  const uint mine = (to - from + tile_pairs - 1) / tile_pairs;
  const uint at = sum_before(mine, room, lane, simd);
  ExpertsTile tile;
  tile.unused = 0;
  for (uint i = 0; i < mine && at + i < grid.tiles; ++i) {
    tile.expert = int(e);
    tile.first = from + i * tile_pairs;
    tile.count = int(min(to - tile.first, tile_pairs));
    list[at + i] = tile;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);  // the sums before have been read
  if (e == 1023) room[0] = at + mine;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  tile.expert = -1;
  tile.first = 0;
  tile.count = 0;
  for (uint i = room[0] + e; i < grid.tiles; i += 1024) list[i] = tile;
}

// ---- forward ----

// hidden[p, which, i] = Σ_h x[token(p), h]·w[e, i, h]
template <typename T, int kTile>
[[kernel, max_total_threads_per_threadgroup(128)]] void experts_hidden(
    device const T* x [[buffer(0)]], device const uint* order [[buffer(1)]],
    device const T* gate [[buffer(2)]], device const T* up [[buffer(3)]],
    device T* hidden [[buffer(4)]], device const ExpertsTile* tiles [[buffer(5)]],
    constant ExpertsArgs& args [[buffer(6)]], constant ExpertsGrid& grid [[buffer(7)]],
    EXPERTS_PLACE) {
  threadgroup uint4 room_a[TileRoom<T, kTile>::kPacks], room_b[TileRoom<T, kTile>::kPacks];
  const ExpertsWork work = work_of(tiles, grid, long(group) + first_group);
  const long inner = args.inner, width = args.width, half_way = grid.across / 2;
  const long which = work.column / half_way, col = work.column % half_way * kTile;
  device const T* w = (which == 0 ? gate : up) + (work.expert * inner + col) * width;
  const uint cols = left_of<kTile>(inner, col);
  TileSums<kTile> sums;
  clear(sums);
  add_product(gathered(x, width, order + work.first, uint(args.chosen), work.count, false, a_packs),
              plain(w, width, cols, false, b_packs), work.exists ? uint(width) : 0,
              (threadgroup T*)room_a, (threadgroup T*)room_b, sums, index, lane, simd);
  store_sums(sums, hidden + (work.first * 2 + which) * inner + col, 2 * inner, work.count, cols,
             lane, simd);
}

// active[p, i] = g·σ(g)·u, times the pair's score if it is weighted; of pairs that no expert has nothing.
template <typename T>
[[kernel, max_total_threads_per_threadgroup(256)]] void experts_active(
    device const T* hidden [[buffer(0)]], device const uint* order [[buffer(1)]],
    device const uint* offsets [[buffer(2)]], device const T* scores [[buffer(3)]],
    device float* active [[buffer(4)]], constant ExpertsArgs& args [[buffer(5)]], EXPERTS_PLACE) {
  const long at = (long(group) + first_group) * 256 + index;
  const long pair = at / args.inner, i = at % args.inner;
  if (pair >= args.tokens * args.chosen || pair >= long(offsets[args.experts])) return;
  const float g = widen(hidden[pair * 2 * args.inner + i]);
  const float u = widen(hidden[(pair * 2 + 1) * args.inner + i]);
  const float a = g * sigmoid<T>(g).value * u;
  active[at] = weighted ? a * widen(scores[order[pair]]) : a;
}

// out[p, h] = Σ_i active[p, i]·down[e, h, i]
template <typename T, int kTile>
[[kernel, max_total_threads_per_threadgroup(128)]] void experts_out(
    device const float* active [[buffer(0)]], device const T* down [[buffer(1)]],
    device float* out [[buffer(2)]], device const ExpertsTile* tiles [[buffer(3)]],
    constant ExpertsArgs& args [[buffer(4)]], constant ExpertsGrid& grid [[buffer(5)]],
    EXPERTS_PLACE) {
  threadgroup uint4 room_a[TileRoom<float, kTile>::kPacks], room_b[TileRoom<T, kTile>::kPacks];
  const ExpertsWork work = work_of(tiles, grid, long(group) + first_group);
  const long inner = args.inner, width = args.width, col = work.column * kTile;
  const uint cols = left_of<kTile>(width, col);
  TileSums<kTile> sums;
  clear(sums);
  add_product(plain(active + work.first * inner, inner, work.count, false, a_packs),
              plain(down + (work.expert * width + col) * inner, inner, cols, false, b_packs),
              work.exists ? uint(inner) : 0, (threadgroup float*)room_a, (threadgroup T*)room_b,
              sums, index, lane, simd);
  store_sums(sums, out + work.first * width + col, width, work.count, cols, lane, simd);
}

// Rows of a pair's weights by its row of x: a simdgroup has four. to[p * to_pair + row].
template <typename X, typename T, typename Out>
inline void pair_dots(device const X* x, device const T* w, long rows, long first, uint depth,
                      device Out* to, uint lane) {
  enum { kRows = 4, kStep = 4 };
  float sum[kRows];
  for (int r = 0; r < kRows; ++r) sum[r] = 0;
  for (uint k = lane * kStep; k < depth; k += 32 * kStep) {
    float4 v = float4(0.0f);
    if (a_packs && k + kStep <= depth) {
      v = load_four(x + k);
    } else {
      for (int i = 0; i < kStep; ++i) {
        if (k + i < depth) v[i] = widen(x[k + i]);
      }
    }
    for (int r = 0; r < kRows; ++r) {
      device const T* row = w + min(first + r, rows - 1) * depth + k;
      if (b_packs && k + kStep <= depth) {
        const float4 u = load_four(row);
        for (int i = 0; i < kStep; ++i) sum[r] = fma(u[i], v[i], sum[r]);
      } else {
        for (int i = 0; i < kStep; ++i) {
          if (k + i < depth) sum[r] = fma(widen(row[i]), v[i], sum[r]);
        }
      }
    }
  }
  for (int r = 0; r < kRows; ++r) {
    const float v = simd_sum(sum[r]);
    if (lane == 0 && first + r < rows) to[first + r] = narrow<Out>(v);
  }
}

// Whose the pair at this place is; E if nobody's.
inline long expert_at(constant ExpertsArgs& args, device const uint* offsets, long place) {
  long low = 0, high = args.experts;  // the first expert that ends behind the place
  while (low < high) {
    const long middle = (low + high) / 2;
    if (long(offsets[middle + 1]) > place) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  return low;
}

template <typename T>
[[kernel, max_total_threads_per_threadgroup(128)]] void experts_hidden_few(
    device const T* x [[buffer(0)]], device const uint* order [[buffer(1)]],
    device const uint* offsets [[buffer(2)]], device const T* gate [[buffer(3)]],
    device const T* up [[buffer(4)]], device T* hidden [[buffer(5)]],
    constant ExpertsArgs& args [[buffer(6)]], EXPERTS_PLACE) {
  const long blocks = (args.inner + 3) / 4, unit = (long(group) + first_group) * 4 + simd;
  const long place = unit / (2 * blocks), which = unit / blocks % 2;
  const bool in = place < args.tokens * args.chosen;
  const long expert = in ? expert_at(args, offsets, place) : args.experts;
  if (expert < args.experts) {  // alike for a simdgroup
    pair_dots(x + long(order[place] / uint(args.chosen)) * args.width,
              (which == 0 ? gate : up) + expert * args.inner * args.width, args.inner,
              unit % blocks * 4, uint(args.width), hidden + (place * 2 + which) * args.inner, lane);
  }
}

template <typename T>
[[kernel, max_total_threads_per_threadgroup(128)]] void experts_out_few(
    device const float* active [[buffer(0)]], device const uint* offsets [[buffer(1)]],
    device const T* down [[buffer(2)]], device float* out [[buffer(3)]],
    constant ExpertsArgs& args [[buffer(4)]], EXPERTS_PLACE) {
  const long blocks = (args.width + 3) / 4, unit = (long(group) + first_group) * 4 + simd;
  const long place = unit / blocks;
  const bool in = place < args.tokens * args.chosen;
  const long expert = in ? expert_at(args, offsets, place) : args.experts;
  if (expert < args.experts) {
    pair_dots(active + place * args.inner, down + expert * args.inner * args.width, args.width,
              unit % blocks * 4, uint(args.inner), out + place * args.width, lane);
  }
}

// ---- sums over a token's experts ----

[[kernel, max_total_threads_per_threadgroup(256)]] void experts_find(
    device const uint* order [[buffer(0)]], device uint* places [[buffer(1)]],
    constant ExpertsArgs& args [[buffer(2)]], EXPERTS_PLACE) {
  const long at = (long(group) + first_group) * 256 + index;
  if (at < args.tokens * args.chosen) places[order[at]] = uint(at);
}

// to[t, h] = Σ_j scores[t, j]·from[place of (t, j), h]; not weighted: 1. Pairs of no expert stand behind the others.
template <typename T>
[[kernel, max_total_threads_per_threadgroup(256)]] void experts_combine(
    device const float* from [[buffer(0)]], device const uint* places [[buffer(1)]],
    device const uint* offsets [[buffer(2)]], device const T* scores [[buffer(3)]],
    device T* to [[buffer(4)]], constant ExpertsArgs& args [[buffer(5)]], EXPERTS_PLACE) {
  const long at = (long(group) + first_group) * 256 + index;
  if (at >= args.tokens * args.width) return;
  const long t = at / args.width, h = at % args.width;
  const uint end = offsets[args.experts];
  float sum = 0;
  for (long pair = t * args.chosen; pair < (t + 1) * args.chosen; ++pair) {
    const uint place = places[pair];
    if (place >= end) continue;
    const float v = from[place * args.width + h];
    sum = weighted ? fma(widen(scores[pair]), v, sum) : sum + v;
  }
  to[at] = narrow<T>(sum);
}

// ---- names ----

#define MAKE(name, ...) template [[host_name(name)]] [[kernel]] decltype(__VA_ARGS__) __VA_ARGS__;
#define MAKE_TILES(side, type, T)                                \
  MAKE("experts_hidden" #side "_" type, experts_hidden<T, side>) \
  MAKE("experts_out" #side "_" type, experts_out<T, side>)
#define MAKE_TYPE(type, T)                                \
  MAKE_TILES(64, type, T)                                 \
  MAKE_TILES(32, type, T)                                 \
  MAKE("experts_active_" type, experts_active<T>)         \
  MAKE("experts_hidden_few_" type, experts_hidden_few<T>) \
  MAKE("experts_out_few_" type, experts_out_few<T>)       \
  MAKE("experts_combine_" type, experts_combine<T>)
MAKE_TYPE("f32", float)
MAKE_TYPE("f16", half)
MAKE_TYPE("bf16", bf16)

#else

#include <algorithm>
#include <string>

namespace mlxtape::ops {

namespace experts_metal {

constexpr std::int64_t kMostExperts = 1024;

// ---- what both directions need ----

void list_tiles(const KernelCall& call, const void* offsets, void* tiles) {
  const auto& args = call.as<ExpertsArgs>();
  Launch(call, metal::kernel("experts_tiles"))
      .constant(3, static_cast<std::uint32_t>(side_of(args)))
      .input(0, offsets)
      .output(1, tiles)
      .bytes(2, args)
      .bytes(3, ExpertsGrid{most_tiles(args), 0})
      .groups(1)
      .threads(kMostExperts)
      .run();
}

template <class T>
void make_active(const KernelCall& call, const void* hidden, const void* order, const void* offsets,
                 const void* scores, void* active) {
  const auto& args = call.as<ExpertsArgs>();
  Launch launch(call, metal::kernel<T>("experts_active"));
  launch.constant(2, scores != nullptr)
      .input(0, hidden)
      .input(1, order)
      .input(2, offsets)
      .input(3, scores)
      .output(4, active)
      .bytes(5, args);
  run_each(launch, pairs_of(args) * args.inner);
}

template <class T>
void add_up(const KernelCall& call, const Workspace& work, const void* order, const void* offsets,
            const void* scores, void* to) {
  const auto& args = call.as<ExpertsArgs>();
  Launch find(call, metal::kernel("experts_find"));
  find.input(0, order).output(1, work.places).bytes(2, args);
  run_each(find, pairs_of(args));
  Launch combine(call, metal::kernel<T>("experts_combine"));
  combine.constant(2, scores != nullptr)
      .input(0, work.values)
      .input(1, work.places)
      .input(2, offsets)
      .input(3, scores)
      .output(4, to)
      .bytes(5, args);
  run_each(combine, args.tokens * args.width);
}

#define MAKE_SHARED(T)                                                                   \
  template void make_active<T>(const KernelCall&, const void*, const void*, const void*, \
                               const void*, void*);                                      \
  template void add_up<T>(const KernelCall&, const Workspace&, const void*, const void*, \
                          const void*, void*);
MAKE_SHARED(float)
MAKE_SHARED(F16)
MAKE_SHARED(BF16)

}  // namespace experts_metal

namespace {

using namespace experts_metal;

constexpr std::int64_t kPart = 256;  // pairs that a group puts in order
constexpr std::int64_t kFewTokens = 8;
constexpr std::int64_t kFewSimds = 4;  // of a group, each with as many rows of weights

// ---- the order of pairs ----

std::int64_t parts_of(const ExpertsArgs& args) { return ceil_div(pairs_of(args), kPart); }
std::size_t order_room(const void* opaque) {
  const auto& args = *static_cast<const ExpertsArgs*>(opaque);
  return static_cast<std::size_t>(parts_of(args) * (args.experts + 1)) * sizeof(std::uint32_t);
}

void experts_order(const KernelCall& call) {
  const auto& args = call.as<ExpertsArgs>();
  Launch(call, metal::kernel("experts_count"))
      .input(0, call.in[0])
      .output(1, call.workspace)
      .bytes(2, args)
      .in_parts()
      .groups(parts_of(args))
      .threads(kPart)
      .run();
  Launch(call, metal::kernel("experts_place"))
      .output(0, call.workspace)
      .bytes(1, args)
      .bytes(2, static_cast<std::uint32_t>(parts_of(args)))
      .groups(1)
      .threads(kMostExperts)
      .run();
  Launch(call, metal::kernel("experts_put"))
      .input(0, call.in[0])
      .input(1, call.workspace)
      .output(2, call.out[0])
      .bytes(3, args)
      .in_parts()
      .groups(parts_of(args))
      .threads(kPart)
      .run();
}

// ---- forward ----

bool has_few(const ExpertsArgs& args) { return args.tokens <= kFewTokens; }

constexpr Names kHidden{"experts_hidden64", "experts_hidden32"};
constexpr Names kOut{"experts_out64", "experts_out32"};

std::size_t hidden_room(const void* opaque) {
  const auto& args = *static_cast<const ExpertsArgs*>(opaque);
  return has_few(args) ? 0 : Workspace::tiles_bytes(args);
}

template <class T>
void experts_hidden_fwd(const KernelCall& call) {
  const auto& args = call.as<ExpertsArgs>();
  const void *x = call.in[0], *order = call.in[1], *offsets = call.in[2];
  const void *gate = call.in[3], *up = call.in[4];
  void* hidden = call.out[0];
  const bool x_packs = in_packs<T>(args.width, x), w_packs = in_packs<T>(args.width, gate, up);
  if (has_few(args)) {
    Launch(call, metal::kernel<T>("experts_hidden_few"))
        .constant(0, x_packs)
        .constant(1, w_packs)
        .input(0, x)
        .input(1, order)
        .input(2, offsets)
        .input(3, gate)
        .input(4, up)
        .output(5, hidden)
        .bytes(6, args)
        .operations(2 * work_of(args))
        .in_parts()
        .groups(ceil_div(pairs_of(args) * 2 * ceil_div(args.inner, 4), kFewSimds))
        .threads(kFewSimds * metal::kSimd)
        .run();
    return;
  }
  list_tiles(call, offsets, call.workspace);
  const std::int64_t across = 2 * ceil_div(args.inner, side_of(args));
  Launch launch(call, metal::kernel<T>(kHidden.of(args)));
  launch.constant(0, x_packs)
      .constant(1, w_packs)
      .input(0, x)
      .input(1, order)
      .input(2, gate)
      .input(3, up)
      .output(4, hidden)
      .input(5, call.workspace)
      .bytes(6, args)
      .bytes(7, ExpertsGrid{most_tiles(args), across});
  run_tiles(launch, args, across, 2 * work_of(args));
}

std::size_t out_room(const void* opaque) {
  const auto& args = *static_cast<const ExpertsArgs*>(opaque);
  return Workspace::bytes(args, true, args.width);
}

template <class T>
void experts_out_fwd(const KernelCall& call) {
  const auto& args = call.as<ExpertsArgs>();
  const void *hidden = call.in[0], *order = call.in[1], *offsets = call.in[2];
  const void *scores = call.in[3], *down = call.in[4];
  const Workspace work(call, true);
  make_active<T>(call, hidden, order, offsets, nullptr, work.active);
  const bool a_packs = in_packs<float>(args.inner, work.active);
  const bool w_packs = in_packs<T>(args.inner, down);
  if (has_few(args)) {
    Launch(call, metal::kernel<T>("experts_out_few"))
        .constant(0, a_packs)
        .constant(1, w_packs)
        .input(0, work.active)
        .input(1, offsets)
        .input(2, down)
        .output(3, work.values)
        .bytes(4, args)
        .operations(work_of(args))
        .in_parts()
        .groups(ceil_div(pairs_of(args) * ceil_div(args.width, 4), kFewSimds))
        .threads(kFewSimds * metal::kSimd)
        .run();
  } else {
    list_tiles(call, offsets, work.tiles);
    const std::int64_t across = ceil_div(args.width, side_of(args));
    Launch launch(call, metal::kernel<T>(kOut.of(args)));
    launch.constant(0, a_packs)
        .constant(1, w_packs)
        .input(0, work.active)
        .input(1, down)
        .output(2, work.values)
        .input(3, work.tiles)
        .bytes(4, args)
        .bytes(5, ExpertsGrid{most_tiles(args), across});
    run_tiles(launch, args, across, work_of(args));
  }
  add_up<T>(call, work, order, offsets, scores, call.out[0]);
}

}  // namespace

void register_experts_metal(KernelRegistry& registry) {
  registry.add(Backend::kMetal, "experts_order_u32", experts_order, order_room);
  const auto add = [&]<class T>(T, const std::string& type) {
    registry.add(Backend::kMetal, "experts_hidden_fwd_" + type, experts_hidden_fwd<T>, hidden_room);
    registry.add(Backend::kMetal, "experts_out_fwd_" + type, experts_out_fwd<T>, out_room);
  };
  add(float(), "f32");
  add(F16(), "f16");
  add(BF16(), "bf16");
  register_back(registry);
}

}  // namespace mlxtape::ops

#endif
