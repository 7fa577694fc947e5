// Metal kernels of experts' gradients (formula: mlxtape/ops/experts.h).
//
// Products in tiles as forward: b of a tile's pairs, from which their gradients and parts of dscores follow in its registers;
// dx of the pairs, summed over a token's experts as y is; and the weights', a tile of an expert's gradient with its pairs as the
// depth. Bound by arithmetic. 128 threads a group, about 90 registers, 6 to 10 KB of threadgroup memory.
#include "experts_metal-inl.h"

#ifdef __METAL_VERSION__

// b[p, i] = Σ_h dy[token(p), h]·down[e, h, i], from which d_hidden and parts of dscores, [2 · columns of tiles, pairs].
template <typename T, int kTile>
[[kernel, max_total_threads_per_threadgroup(128)]] void experts_hidden_back(
    device const T* dy [[buffer(0)]], device const T* hidden [[buffer(1)]],
    device const uint* order [[buffer(2)]], device const T* scores [[buffer(3)]],
    device const T* down [[buffer(4)]], device T* d_hidden [[buffer(5)]],
    device float* parts [[buffer(6)]], device const ExpertsTile* tiles [[buffer(7)]],
    constant ExpertsArgs& args [[buffer(8)]], constant ExpertsGrid& grid [[buffer(9)]],
    EXPERTS_PLACE) {
  threadgroup uint4 room_a[TileRoom<T, kTile>::kPacks], room_b[TileRoom<T, kTile>::kPacks];
  const ExpertsWork work = work_of(tiles, grid, long(group) + first_group);
  const long inner = args.inner, width = args.width, col = work.column * kTile;
  const uint cols = left_of<kTile>(inner, col);
  TileSums<kTile> sums;
  clear(sums);
  add_product(
      gathered(dy, width, order + work.first, uint(args.chosen), work.count, false, a_packs),
      plain(down + work.expert * inner * width + col, inner, cols, true, b_packs),
      work.exists ? uint(width) : 0, (threadgroup T*)room_a, (threadgroup T*)room_b, sums, index,
      lane, simd);

  const uint r0 = tile_row<kTile>(lane, simd), c0 = tile_col<kTile>(lane, simd);
  device float* part = parts + (work.column * 2 + simd % 2) * args.tokens * args.chosen;
  for (int i = 0; i < TileSums<kTile>::kCount; ++i) {
    const uint r = r0 + 8 * i;
    const bool in = r < work.count;
    const float score = in ? widen(scores[order[work.first + r]]) : 0.0f;
    const long at = (work.first + r) * 2 * inner + col;
    float dot = 0;
    for (int j = 0; j < TileSums<kTile>::kCount; ++j) {
      for (int e = 0; e < 2; ++e) {
        const uint c = c0 + 8 * j + e;
        if (!in || c >= cols) continue;
        const float b = sums.v[i][j].thread_elements()[e];
        const float g = widen(hidden[at + c]), u = widen(hidden[at + inner + c]);
        const Sigmoid s = sigmoid<T>(g);
        const float made = g * s.value, da = score * b;
        dot = fma(b, made * u, dot);
        d_hidden[at + c] = narrow<T>(da * u * fma(made, s.rest, s.value));
        d_hidden[at + inner + c] = narrow<T>(da * made);
      }
    }
    // The four lanes that share this row differ in these two bits.
    dot += simd_shuffle_xor(dot, ushort(1));
    dot += simd_shuffle_xor(dot, ushort(8));
    if (in && matrix_col(lane) == 0) part[work.first + r] = dot;
  }
}

// 0 for pairs that no expert has; nobody reads their d_hidden.
template <typename T>
[[kernel, max_total_threads_per_threadgroup(256)]] void experts_scores_back(
    device const float* parts [[buffer(0)]], device const uint* order [[buffer(1)]],
    device const uint* offsets [[buffer(2)]], device T* dscores [[buffer(3)]],
    constant ExpertsArgs& args [[buffer(4)]], constant uint& count [[buffer(5)]], EXPERTS_PLACE) {
  const long at = (long(group) + first_group) * 256 + index, pairs = args.tokens * args.chosen;
  if (at >= pairs) return;
  float sum = 0;
  if (at < long(offsets[args.experts])) {
    for (uint p = 0; p < count; ++p) sum += parts[p * pairs + at];
  }
  dscores[order[at]] = narrow<T>(sum);
}

// out[p, h] = Σ_i dg[p, i]·gate[e, i, h] + du[p, i]·up[e, i, h]
template <typename T, int kTile>
[[kernel, max_total_threads_per_threadgroup(128)]] void experts_x_back(
    device const T* d_hidden [[buffer(0)]], device const T* gate [[buffer(1)]],
    device const T* up [[buffer(2)]], device float* out [[buffer(3)]],
    device const ExpertsTile* tiles [[buffer(4)]], constant ExpertsArgs& args [[buffer(5)]],
    constant ExpertsGrid& grid [[buffer(6)]], EXPERTS_PLACE) {
  threadgroup uint4 room_a[TileRoom<T, kTile>::kPacks], room_b[TileRoom<T, kTile>::kPacks];
  const ExpertsWork work = work_of(tiles, grid, long(group) + first_group);
  const long inner = args.inner, width = args.width, col = work.column * kTile;
  const uint cols = left_of<kTile>(width, col);
  TileSums<kTile> sums;
  clear(sums);
  for (int which = 0; which < 2; ++which) {
    device const T* w = (which == 0 ? gate : up) + work.expert * inner * width + col;
    add_product(
        plain(d_hidden + (work.first * 2 + which) * inner, 2 * inner, work.count, false, a_packs),
        plain(w, width, cols, true, b_packs), work.exists ? uint(inner) : 0, (threadgroup T*)room_a,
        (threadgroup T*)room_b, sums, index, lane, simd);
  }
  store_sums(sums, out + work.first * width + col, width, work.count, cols, lane, simd);
}

// An expert's pairs as the depth, and a tile of its weights' gradient.
struct ExpertsDepth {
  long expert, row, col, first;
  uint depth;
};
inline ExpertsDepth depth_of(constant ExpertsArgs& args, device const uint* offsets, long group,
                             long rows, long cols, long side) {
  const long across = (cols + side - 1) / side, tiles = (rows + side - 1) / side * across;
  const uint pairs = uint(args.tokens * args.chosen);
  ExpertsDepth work;
  work.expert = group / tiles;
  work.row = group % tiles / across * side;
  work.col = group % tiles % across * side;
  const uint first = min(offsets[work.expert], pairs);
  work.first = first;
  work.depth = max(first, min(offsets[work.expert + 1], pairs)) - first;
  return work;
}

// dgate and dup, which come one after the other: [I, H] from d_hidden and x.
template <typename T, int kTile>
[[kernel, max_total_threads_per_threadgroup(128)]] void experts_in_back(
    device const T* d_hidden [[buffer(0)]], device const T* x [[buffer(1)]],
    device const uint* order [[buffer(2)]], device const uint* offsets [[buffer(3)]],
    device T* dgate [[buffer(4)]], device T* dup [[buffer(5)]],
    constant ExpertsArgs& args [[buffer(6)]], EXPERTS_PLACE) {
  threadgroup uint4 room_a[TileRoom<T, kTile>::kPacks], room_b[TileRoom<T, kTile>::kPacks];
  const long inner = args.inner, width = args.width, whole = long(group) + first_group;
  const long which = whole % 2;
  const ExpertsDepth work = depth_of(args, offsets, whole / 2, inner, width, kTile);
  const uint rows = left_of<kTile>(inner, work.row), cols = left_of<kTile>(width, work.col);
  TileSums<kTile> sums;
  clear(sums);
  add_product(
      plain(d_hidden + (work.first * 2 + which) * inner + work.row, 2 * inner, rows, true, a_packs),
      gathered(x + work.col, width, order + work.first, uint(args.chosen), cols, true, b_packs),
      work.depth, (threadgroup T*)room_a, (threadgroup T*)room_b, sums, index, lane, simd);
  device T* out = which == 0 ? dgate : dup;
  store_sums(sums, out + (work.expert * inner + work.row) * width + work.col, width, rows, cols,
             lane, simd);
}

// ddown: [H, I] from dy and the weighted activations.
template <typename T, int kTile>
[[kernel, max_total_threads_per_threadgroup(128)]] void experts_down_back(
    device const T* dy [[buffer(0)]], device const float* active [[buffer(1)]],
    device const uint* order [[buffer(2)]], device const uint* offsets [[buffer(3)]],
    device T* ddown [[buffer(4)]], constant ExpertsArgs& args [[buffer(5)]], EXPERTS_PLACE) {
  threadgroup uint4 room_a[TileRoom<T, kTile>::kPacks], room_b[TileRoom<float, kTile>::kPacks];
  const long inner = args.inner, width = args.width;
  const ExpertsDepth work = depth_of(args, offsets, long(group) + first_group, width, inner, kTile);
  const uint rows = left_of<kTile>(width, work.row), cols = left_of<kTile>(inner, work.col);
  TileSums<kTile> sums;
  clear(sums);
  add_product(
      gathered(dy + work.row, width, order + work.first, uint(args.chosen), rows, true, a_packs),
      plain(active + work.first * inner + work.col, inner, cols, true, b_packs), work.depth,
      (threadgroup T*)room_a, (threadgroup float*)room_b, sums, index, lane, simd);
  store_sums(sums, ddown + (work.expert * width + work.row) * inner + work.col, inner, rows, cols,
             lane, simd);
}

// ---- names ----

#define MAKE(name, ...) template [[host_name(name)]] [[kernel]] decltype(__VA_ARGS__) __VA_ARGS__;
#define MAKE_TILES(side, type, T)                                          \
  MAKE("experts_hidden_back" #side "_" type, experts_hidden_back<T, side>) \
  MAKE("experts_x_back" #side "_" type, experts_x_back<T, side>)           \
  MAKE("experts_in_back" #side "_" type, experts_in_back<T, side>)         \
  MAKE("experts_down_back" #side "_" type, experts_down_back<T, side>)
#define MAKE_TYPE(type, T) \
  MAKE_TILES(64, type, T)  \
  MAKE_TILES(32, type, T)  \
  MAKE("experts_scores_back_" type, experts_scores_back<T>)
MAKE_TYPE("f32", float)
MAKE_TYPE("f16", half)
MAKE_TYPE("bf16", bf16)

#else

#include <string>

namespace mlxtape::ops::experts_metal {

namespace {

constexpr Names kHiddenBack{"experts_hidden_back64", "experts_hidden_back32"};
constexpr Names kXBack{"experts_x_back64", "experts_x_back32"};
constexpr Names kInBack{"experts_in_back64", "experts_in_back32"};
constexpr Names kDownBack{"experts_down_back64", "experts_down_back32"};

// Parts of dscores: two simdgroups across, in each column of tiles.
std::int64_t score_parts(const ExpertsArgs& args) {
  return 2 * ceil_div(args.inner, side_of(args));
}
std::size_t hidden_back_room(const void* opaque) {
  const auto& args = *static_cast<const ExpertsArgs*>(opaque);
  return Workspace::bytes(args, false, score_parts(args));
}

template <class T>
void experts_hidden_bwd(const KernelCall& call) {
  const auto& args = call.as<ExpertsArgs>();
  const void *dy = call.in[0], *hidden = call.in[1], *order = call.in[2], *offsets = call.in[3];
  const void *scores = call.in[4], *down = call.in[5];
  const Workspace work(call, false);
  list_tiles(call, offsets, work.tiles);
  const std::int64_t across = ceil_div(args.inner, side_of(args));
  Launch launch(call, metal::kernel<T>(kHiddenBack.of(args)));
  launch.constant(0, in_packs<T>(args.width, dy))
      .constant(1, in_packs<T>(args.inner, down))
      .input(0, dy)
      .input(1, hidden)
      .input(2, order)
      .input(3, scores)
      .input(4, down)
      .output(5, call.out[0])
      .output(6, work.values)
      .input(7, work.tiles)
      .bytes(8, args)
      .bytes(9, ExpertsGrid{most_tiles(args), across});
  run_tiles(launch, args, across, work_of(args));
  Launch join(call, metal::kernel<T>("experts_scores_back"));
  join.input(0, work.values)
      .input(1, order)
      .input(2, offsets)
      .output(3, call.out[1])
      .bytes(4, args)
      .bytes(5, static_cast<std::uint32_t>(score_parts(args)));
  run_each(join, pairs_of(args));
}

std::size_t x_room(const void* opaque) {
  const auto& args = *static_cast<const ExpertsArgs*>(opaque);
  return Workspace::bytes(args, false, args.width);
}

template <class T>
void experts_x_bwd(const KernelCall& call) {
  const auto& args = call.as<ExpertsArgs>();
  const void *d_hidden = call.in[0], *order = call.in[1], *offsets = call.in[2];
  const void *gate = call.in[3], *up = call.in[4];
  const Workspace work(call, false);
  list_tiles(call, offsets, work.tiles);
  const std::int64_t across = ceil_div(args.width, side_of(args));
  Launch launch(call, metal::kernel<T>(kXBack.of(args)));
  launch.constant(0, in_packs<T>(args.inner, d_hidden))
      .constant(1, in_packs<T>(args.width, gate, up))
      .input(0, d_hidden)
      .input(1, gate)
      .input(2, up)
      .output(3, work.values)
      .input(4, work.tiles)
      .bytes(5, args)
      .bytes(6, ExpertsGrid{most_tiles(args), across});
  run_tiles(launch, args, across, 2 * work_of(args));
  add_up<T>(call, work, order, offsets, nullptr, call.out[0]);
}

std::size_t weights_room(const void* opaque) {
  const auto& args = *static_cast<const ExpertsArgs*>(opaque);
  return Workspace::bytes_of(args, args.inner);
}

template <class T>
void experts_weights_bwd(const KernelCall& call) {
  const auto& args = call.as<ExpertsArgs>();
  const void *x = call.in[0], *dy = call.in[1], *hidden = call.in[2], *d_hidden = call.in[3];
  const void *order = call.in[4], *offsets = call.in[5], *scores = call.in[6];
  void* active = call.workspace;
  const std::int64_t side = side_of(args);
  const std::int64_t tiles = args.experts * ceil_div(args.inner, side) * ceil_div(args.width, side);
  Launch(call, metal::kernel<T>(kInBack.of(args)))
      .constant(0, in_packs<T>(args.inner, d_hidden))
      .constant(1, in_packs<T>(args.width, x))
      .input(0, d_hidden)
      .input(1, x)
      .input(2, order)
      .input(3, offsets)
      .output(4, call.out[0])
      .output(5, call.out[1])
      .bytes(6, args)
      .operations(2 * work_of(args))
      .in_parts()
      .groups(2 * tiles)
      .threads(kTileThreads)
      .run();
  make_active<T>(call, hidden, order, offsets, scores, active);
  Launch(call, metal::kernel<T>(kDownBack.of(args)))
      .constant(0, in_packs<T>(args.width, dy))
      .constant(1, in_packs<float>(args.inner, active))
      .input(0, dy)
      .input(1, active)
      .input(2, order)
      .input(3, offsets)
      .output(4, call.out[2])
      .bytes(5, args)
      .operations(work_of(args))
      .in_parts()
      .groups(tiles)
      .threads(kTileThreads)
      .run();
}

template <class T>
void add_kernels(KernelRegistry& registry) {
  const std::string type = name_of(kDType<T>);
  registry.add(Backend::kMetal, "experts_hidden_bwd_" + type, experts_hidden_bwd<T>,
               hidden_back_room);
  registry.add(Backend::kMetal, "experts_x_bwd_" + type, experts_x_bwd<T>, x_room);
  registry.add(Backend::kMetal, "experts_weights_bwd_" + type, experts_weights_bwd<T>,
               weights_room);
}

}  // namespace

void register_back(KernelRegistry& registry) {
  add_kernels<float>(registry);
  add_kernels<F16>(registry);
  add_kernels<BF16>(registry);
}

}  // namespace mlxtape::ops::experts_metal

#endif
