// CUDA kernels of experts (formula: mlxtape/ops/experts.h).
//
// Every product is a grouped one: tiles of 128 pairs of one expert by 64 columns, listed on the device from the
// offsets, so that the host never learns how many pairs an expert has. Rows are gathered and activations made as a
// tile is loaded; what follows a product is done before it is stored. Sums over a token's experts are made from the
// pairs' own results, in the order of its choices. 16-bit numbers are exact in tf32, which the tensor cores multiply;
// f32 is split in two (products.cuh). Bound by arithmetic, with few pairs by reading the weights. Most products in
// 16 bits are those of experts_half.h or experts_hopper.h.
#include <algorithm>
#include <string>
#include <type_traits>

#include "backends/cuda/device/launch.cuh"
#include "backends/cuda/device/products.cuh"
#include "backends/cuda/device/rows.cuh"
#include "backends/cuda/device/vectors.cuh"
#include "experts_args.h"
#include "experts_half.h"
#include "mlxtape/base/checked.h"
#include "mlxtape/core/registry.h"

namespace mlxtape::ops {

namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / cuda::kWarp;

// ---- the order of pairs ----

constexpr int kPart = 2048;  // pairs of a block
constexpr int kMostExperts = 1024;

std::int64_t parts_of(const ExpertsArgs& args) {
  return cuda::blocks_for(args.tokens * args.chosen, kPart);
}
std::size_t order_room(const void* opaque) {
  const auto& args = *static_cast<const ExpertsArgs*>(opaque);
  return static_cast<std::size_t>(parts_of(args) * (args.experts + 1)) * sizeof(unsigned);
}

// counts [parts, E+1]: how many pairs of a part go to each expert; the last: to none.
__global__ void __launch_bounds__(kThreads)
    count_pairs(ExpertsArgs args, const unsigned* indices, unsigned* counts) {
  cuda::wait_turn();
  __shared__ unsigned seen[kMostExperts + 1];
  const auto experts = static_cast<unsigned>(args.experts);
  for (unsigned e = threadIdx.x; e <= experts; e += kThreads) seen[e] = 0;
  __syncthreads();
  const std::int64_t first = std::int64_t{blockIdx.x} * kPart;
  for (int i = threadIdx.x; i < kPart; i += kThreads) {
    if (first + i < args.tokens * args.chosen)
      atomicAdd(seen + min(indices[first + i], experts), 1U);
  }
  __syncthreads();
  for (unsigned e = threadIdx.x; e <= experts; e += kThreads) {
    counts[std::int64_t{blockIdx.x} * (experts + 1) + e] = seen[e];
  }
}

// fn(part, count) of one expert, part after part; counts are asked for eight at a time.
template <class Fn>
__device__ __forceinline__ void each_part(unsigned* counts, std::int64_t parts, unsigned step,
                                          const Fn& fn) {
  constexpr int kAtOnce = 8;
  for (std::int64_t p = 0; p < parts; p += kAtOnce) {
    unsigned some[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) some[i] = p + i < parts ? counts[(p + i) * step] : 0;
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (p + i < parts) fn(counts[(p + i) * step], some[i]);
    }
  }
}

// counts becomes where each part's pairs of an expert begin. One block; a thread has an expert, and the last thread
// with one also has those of none, which stand behind all others.
__global__ void __launch_bounds__(kMostExperts)
    place_parts(ExpertsArgs args, std::int64_t parts, unsigned* counts) {
  cuda::wait_turn();
  __shared__ unsigned begin[kMostExperts];
  const auto experts = static_cast<unsigned>(args.experts), e = threadIdx.x;
  unsigned mine = 0;
  if (e < experts) {
    each_part(counts + e, parts, experts + 1, [&](unsigned&, unsigned some) { mine += some; });
  }
  begin[e] = mine;
  __syncthreads();
  for (unsigned step = 1; step < kMostExperts; step *= 2) {  // sums up to here
    const unsigned before = e >= step ? begin[e - step] : 0;
    __syncthreads();
    begin[e] += before;
    __syncthreads();
  }
  const auto place = [&](unsigned which, unsigned next) {
    each_part(counts + which, parts, experts + 1, [&](unsigned& here, unsigned some) {
      here = next;
      next += some;
    });
  };
  if (e < experts) place(e, begin[e] - mine);
  if (e + 1 == experts) place(experts, begin[e]);
}

// Warp after warp, so that pairs of an expert keep their order.
__global__ void __launch_bounds__(kThreads)
    put_pairs(ExpertsArgs args, const unsigned* indices, const unsigned* begins, unsigned* order) {
  cuda::wait_turn();
  __shared__ unsigned next[kMostExperts + 1];
  const auto experts = static_cast<unsigned>(args.experts);
  for (unsigned e = threadIdx.x; e <= experts; e += kThreads) {
    next[e] = begins[std::int64_t{blockIdx.x} * (experts + 1) + e];
  }
  __syncthreads();
  const std::int64_t first = std::int64_t{blockIdx.x} * kPart, all = args.tokens * args.chosen;
  const int lane = threadIdx.x % cuda::kWarp, warp = threadIdx.x / cuda::kWarp;
  for (int i = 0; i < kPart; i += kThreads) {
    const std::int64_t pair = first + i + threadIdx.x;
    const bool there = pair < all;
    const unsigned e = there ? min(indices[pair], experts) : experts + 1;
    const unsigned same = __match_any_sync(cuda::kAll, e);
    const int rank = __popc(same & ((1U << lane) - 1));
    for (int w = 0; w < kWarps; ++w) {
      if (w == warp && there) {
        const unsigned begin = next[e];
        __syncwarp(__activemask());
        order[begin + rank] = static_cast<unsigned>(pair);
        if (rank == 0) next[e] = begin + __popc(same);
      }
      __syncthreads();
    }
  }
}

void experts_order(const KernelCall& call) {
  const auto& args = call.as<ExpertsArgs>();
  const auto stream = static_cast<cudaStream_t>(call.queue);
  const std::int64_t parts = parts_of(args);
  auto* counts = static_cast<unsigned*>(call.workspace);
  cuda::launch(count_pairs, parts, kThreads, 0, 1, stream, args, call.input<unsigned>(0), counts);
  cuda::launch(place_parts, 1, kMostExperts, 0, 1, stream, args, parts, counts);
  cuda::launch(put_pairs, parts, kThreads, 0, 1, stream, args, call.input<unsigned>(0), counts,
               call.output<unsigned>(0));
}

// ---- tiles ----

constexpr int kRows = 128, kCols = 64, kDepth = 32;

using Tile = ExpertsTile;

// As many as any routing can make, of kRows or more.
std::int64_t most_tiles(const ExpertsArgs& args) {
  const std::int64_t pairs = args.tokens * args.chosen;
  return pairs / kRows + std::min(args.experts, pairs);
}
std::size_t tiles_bytes(const ExpertsArgs& args) {
  return static_cast<std::size_t>(most_tiles(args)) * sizeof(Tile);
}

__global__ void __launch_bounds__(kMostExperts)
    list_tiles(ExpertsArgs args, const unsigned* offsets, std::int64_t tiles, unsigned rows,
               Tile* list) {
  cuda::wait_turn();
  __shared__ int begin[kMostExperts + 1];
  const int e = static_cast<int>(threadIdx.x), experts = static_cast<int>(args.experts);
  const auto pairs = static_cast<unsigned>(args.tokens * args.chosen);
  const unsigned from = e < experts ? min(offsets[e], pairs) : 0;
  const unsigned to = e < experts ? max(from, min(offsets[e + 1], pairs)) : 0;
  const int mine = static_cast<int>((to - from + rows - 1) / rows);
  begin[e] = mine;
  __syncthreads();
  for (int step = 1; step < kMostExperts; step *= 2) {  // sums up to here
    const int other = e >= step ? begin[e - step] : 0;
    __syncthreads();
    begin[e] += other;
    __syncthreads();
  }
  const int at = begin[e] - mine;
  for (int i = 0; i < mine && at + i < tiles; ++i) {
    const unsigned first = from + static_cast<unsigned>(i) * rows;
    list[at + i] = {e, first, static_cast<int>(min(to - first, rows)), 0};
  }
  for (std::int64_t i = begin[kMostExperts - 1] + e; i < tiles; i += kMostExperts) {
    list[i] = {-1, 0, 0, 0};
  }
}

// ---- grouped products ----

// Sums of a tile in registers: 8 warps, 4 down and 2 across, each 32 × 32.
struct Sums {
  float v[2][4][4] = {};

  __device__ static int row() {
    return threadIdx.x / cuda::kWarp / 2 * 32 + threadIdx.x % cuda::kWarp / 4;
  }
  __device__ static int col() { return threadIdx.x / cuda::kWarp % 2 * 32 + threadIdx.x % 4 * 2; }

  // a [kRows, kDepth]: element (r, l) is a[r·a_row + l·a_col]; b [kDepth, kCols]: (l, c) is b[l·b_row + c·b_col].
  template <bool kSplit>
  __device__ void add(const float* a, int a_row, int a_col, const float* b, int b_row, int b_col) {
    const int lane = threadIdx.x % cuda::kWarp, g = lane / 4, t = lane % 4;
    const float* left = a + row() * a_row + t * a_col;
    const float* right = b + t * b_row + (threadIdx.x / cuda::kWarp % 2 * 32 + g) * b_col;
#pragma unroll
    for (int l = 0; l < kDepth; l += 8) {
      unsigned high_a[2][4], low_a[2][4], high_b[4][2], low_b[4][2];
      const auto split = [](float v, unsigned& high, unsigned& low) {
        if constexpr (kSplit) {
          const cuda::Split both(v);
          high = both.high;
          low = both.low;
        } else {
          high = __float_as_uint(v);
          low = 0;
        }
      };
#pragma unroll
      for (int m = 0; m < 2; ++m) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          split(left[(m * 16 + i % 2 * 8) * a_row + (l + i / 2 * 4) * a_col], high_a[m][i],
                low_a[m][i]);
        }
      }
#pragma unroll
      for (int n = 0; n < 4; ++n) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          split(right[(l + i * 4) * b_row + n * 8 * b_col], high_b[n][i], low_b[n][i]);
        }
      }
#pragma unroll
      for (int m = 0; m < 2; ++m) {
#pragma unroll
        for (int n = 0; n < 4; ++n) {
          if constexpr (kSplit) {
            cuda::multiply_add(v[m][n], low_a[m], high_b[n]);
            cuda::multiply_add(v[m][n], high_a[m], low_b[n]);
          }
          cuda::multiply_add(v[m][n], high_a[m], high_b[n]);
        }
      }
    }
  }
  // fn(row, column, value) for each of this thread's sums.
  template <class Fn>
  __device__ void each(const Fn& fn) const {
#pragma unroll
    for (int m = 0; m < 2; ++m) {
#pragma unroll
      for (int n = 0; n < 4; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i)
          fn(row() + m * 16 + i / 2 * 8, col() + n * 8 + i % 2, v[m][n][i]);
      }
    }
  }
};

constexpr int kPitchA = kDepth + 4;  // rows of a: lanes of a load in different banks
constexpr int kPitchB = kCols + 8;   // rows of b [kDepth, kCols]
constexpr int kPitchT = kRows + 8;   // rows of a where it comes turned, [kDepth, kRows]
constexpr int kRoomB = std::max(kDepth * kPitchB, kCols* kPitchA);

// Loads rows × columns numbers into shared memory, a thread one column of every so many rows; value(row, column).
template <int kTileRows, int kTileCols, class Value>
__device__ __forceinline__ void load_tile(float* to, int pitch, const Value& value) {
#pragma unroll
  for (int i = 0; i < kTileRows * kTileCols / kThreads; ++i) {
    const int at = i * kThreads + threadIdx.x;
    to[at / kTileCols * pitch + at % kTileCols] = value(at / kTileCols, at % kTileCols);
  }
}

struct Shared {
  float a[std::max(kRows * kPitchA, kDepth* kPitchT)];
  float b[kRoomB];
};

template <class T>
constexpr bool kSplit = std::is_same_v<T, float>;

template <class T>
__device__ __forceinline__ float silu(float g, float& s) {
  s = 1 / (1 + __expf(-g));
  return g * s;
}

// hidden[p, which, i] = Σ_h x[token(p), h]·w[e, i, h]
template <class T>
__global__ void __launch_bounds__(kThreads)
    hidden_forward(ExpertsArgs args, const Tile* tiles, const T* x, const unsigned* order,
                   const T* gate, const T* up, T* hidden) {
  cuda::wait_turn();
  __shared__ Shared room;
  const Tile tile = tiles[blockIdx.x];
  if (tile.expert < 0) return;
  const auto inner = static_cast<int>(args.inner), width = static_cast<int>(args.width);
  const int across = (inner + kCols - 1) / kCols;
  const int which = static_cast<int>(blockIdx.y) / across,
            col = static_cast<int>(blockIdx.y) % across * kCols;
  const T* w = (which == 0 ? gate : up) + std::int64_t{tile.expert} * inner * width;
  Sums sums;
  for (int l = 0; l < width; l += kDepth) {
    load_tile<kRows, kDepth>(room.a, kPitchA, [&](int r, int c) {
      if (r >= tile.count || l + c >= width) return 0.0F;
      const unsigned token = order[tile.first + r] / static_cast<unsigned>(args.chosen);
      return cuda::widen(x[std::int64_t{token} * width + l + c]);
    });
    load_tile<kCols, kDepth>(room.b, kPitchA, [&](int r, int c) {
      if (col + r >= inner || l + c >= width) return 0.0F;
      return cuda::widen(w[std::int64_t{col + r} * width + l + c]);
    });
    __syncthreads();
    sums.template add<kSplit<T>>(room.a, kPitchA, 1, room.b, 1, kPitchA);
    __syncthreads();
  }
  sums.each([&](int r, int c, float v) {
    if (r < tile.count && col + c < inner) {
      hidden[(std::int64_t{tile.first + r} * 2 + which) * inner + col + c] = cuda::narrow<T>(v);
    }
  });
}

// out[p, h] = Σ_i a[p, i]·down[e, h, i]
template <class T>
__global__ void __launch_bounds__(kThreads)
    out_forward(ExpertsArgs args, const Tile* tiles, const T* hidden, const T* down, float* out) {
  cuda::wait_turn();
  __shared__ Shared room;
  const Tile tile = tiles[blockIdx.x];
  if (tile.expert < 0) return;
  const auto inner = static_cast<int>(args.inner), width = static_cast<int>(args.width);
  const int col = static_cast<int>(blockIdx.y) * kCols;
  const T* w = down + std::int64_t{tile.expert} * inner * width;
  Sums sums;
  for (int l = 0; l < inner; l += kDepth) {
    load_tile<kRows, kDepth>(room.a, kPitchA, [&](int r, int c) {
      if (r >= tile.count || l + c >= inner) return 0.0F;
      const T* pair = hidden + std::int64_t{tile.first + r} * 2 * inner + l + c;
      float s;
      return silu<T>(cuda::widen(pair[0]), s) * cuda::widen(pair[inner]);
    });
    load_tile<kCols, kDepth>(room.b, kPitchA, [&](int r, int c) {
      if (col + r >= width || l + c >= inner) return 0.0F;
      return cuda::widen(w[std::int64_t{col + r} * inner + l + c]);
    });
    __syncthreads();
    sums.template add<true>(room.a, kPitchA, 1, room.b, 1, kPitchA);  // a has more bits than 16
    __syncthreads();
  }
  sums.each([&](int r, int c, float v) {
    if (r < tile.count && col + c < width) {
      out[std::int64_t{tile.first + r} * width + col + c] = v;
    }
  });
}

// ---- sums over a token's experts ----

__global__ void __launch_bounds__(kThreads)
    find_places(std::int64_t pairs, const unsigned* order, unsigned* places) {
  cuda::wait_turn();
  const std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i < pairs) places[order[i]] = static_cast<unsigned>(i);
}

// to[t, h] = Σ_j scores[t, j]·from[place of (t, j), h]; scores null: 1. Pairs of no expert stand behind the others.
template <class T>
__global__ void __launch_bounds__(kThreads)
    combine(ExpertsArgs args, const float* from, const unsigned* places, const unsigned* offsets,
            const T* scores, T* to) {
  cuda::wait_turn();
  const std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= args.tokens * args.width) return;
  const std::int64_t t = i / args.width, h = i % args.width;
  const unsigned end = offsets[args.experts];
  float sum = 0;
  for (std::int64_t j = 0; j < args.chosen; ++j) {
    const unsigned place = places[t * args.chosen + j];
    if (place >= end) continue;
    const float weight = scores == nullptr ? 1 : cuda::widen(scores[t * args.chosen + j]);
    sum = fmaf(weight, from[std::int64_t{place} * args.width + h], sum);
  }
  to[i] = cuda::narrow<T>(sum);
}

// What a kernel's workspace has: the tiles, a number for each pair and channel, a place for each pair, and parts of
// dscores.
struct Workspace {
  Tile* tiles;
  unsigned* places;
  float* values;

  static std::size_t round(std::size_t bytes) { return (bytes + 255) / 256 * 256; }
  Workspace(const ExpertsArgs& args, void* memory) {
    auto* at = static_cast<char*>(memory);
    tiles = reinterpret_cast<Tile*>(at);
    at += round(tiles_bytes(args));
    places = reinterpret_cast<unsigned*>(at);
    at += round(static_cast<std::size_t>(args.tokens * args.chosen) * sizeof(unsigned));
    values = reinterpret_cast<float*>(at);
  }
  static std::size_t bytes(const ExpertsArgs& args, std::int64_t values_each) {
    const auto pairs = static_cast<std::size_t>(args.tokens * args.chosen);
    return round(tiles_bytes(args)) + round(pairs * sizeof(unsigned)) +
           pairs * static_cast<std::size_t>(values_each) * sizeof(float);
  }
};

template <class T>
void list(const ExpertsArgs& args, const ExpertsProducts<T>* by, const unsigned* offsets,
          Tile* tiles, cudaStream_t stream) {
  static_assert(hopper::kTilePairs >= kRows && half_types::kTilePairs >= kRows);
  cuda::launch(list_tiles, 1, kMostExperts, 0, 1, stream, args, offsets, most_tiles(args),
               static_cast<unsigned>(by == nullptr ? kRows : by->tile_pairs), tiles);
}
ExpertsTiles tiles_of(const ExpertsArgs& args, const Tile* tiles) {
  return {tiles, static_cast<unsigned>(most_tiles(args))};
}

// What the pairs have become in work.values, as T where made `by` others, else as f32.
template <class T>
void add_up(const ExpertsArgs& args, const Workspace& work, const ExpertsProducts<T>* by,
            const unsigned* order, const unsigned* offsets, const T* scores, T* to,
            cudaStream_t stream) {
  const std::int64_t pairs = args.tokens * args.chosen;
  cuda::launch(find_places, cuda::blocks_for(pairs, kThreads), kThreads, 0, 1, stream, pairs, order,
               work.places);
  if constexpr (sizeof(T) == 2) {
    if (by != nullptr) {
      half_types::combine(args, reinterpret_cast<const T*>(work.values), work.places, offsets,
                          scores, to, stream);
      return;
    }
  }
  cuda::launch(combine<T>, cuda::blocks_for(args.tokens * args.width, kThreads), kThreads, 0, 1,
               stream, args, static_cast<const float*>(work.values),
               static_cast<const unsigned*>(work.places), offsets, scores, to);
}

std::size_t hidden_room(const void* opaque) {
  return tiles_bytes(*static_cast<const ExpertsArgs*>(opaque));
}
std::size_t wide_room(const void* opaque) {
  const auto& args = *static_cast<const ExpertsArgs*>(opaque);
  return Workspace::bytes(args, args.width);
}

template <class T>
void experts_hidden_fwd(const KernelCall& call) {
  const auto& args = call.as<ExpertsArgs>();
  const auto stream = static_cast<cudaStream_t>(call.queue);
  auto* tiles = static_cast<Tile*>(call.workspace);
  const auto* by = products_for<T>(args);
  list(args, by, call.input<unsigned>(2), tiles, stream);
  if (by != nullptr) {
    by->hidden_forward(args, tiles_of(args, tiles), call.input<T>(0), call.input<unsigned>(1),
                       call.input<T>(3), call.input<T>(4), call.output<T>(0), call.output<T>(1),
                       stream);
    return;
  }
  cuda::launch(hidden_forward<T>,
               cuda::Blocks(most_tiles(args), 2 * cuda::blocks_for(args.inner, kCols)), kThreads, 0,
               1, stream, args, static_cast<const Tile*>(tiles), call.input<T>(0),
               call.input<unsigned>(1), call.input<T>(3), call.input<T>(4), call.output<T>(0));
}

template <class T>
void experts_out_fwd(const KernelCall& call) {
  const auto& args = call.as<ExpertsArgs>();
  const auto stream = static_cast<cudaStream_t>(call.queue);
  const Workspace work(args, call.workspace);
  const auto* by = products_for<T>(args);
  list(args, by, call.input<unsigned>(2), work.tiles, stream);
  if (by != nullptr) {
    by->out_forward(args, tiles_of(args, work.tiles), call.input<T>(5), call.input<T>(4),
                    reinterpret_cast<T*>(work.values), stream);
  } else {
    cuda::launch(out_forward<T>,
                 cuda::Blocks(most_tiles(args), cuda::blocks_for(args.width, kCols)), kThreads, 0,
                 1, stream, args, static_cast<const Tile*>(work.tiles), call.input<T>(0),
                 call.input<T>(4), work.values);
  }
  add_up(args, work, by, call.input<unsigned>(1), call.input<unsigned>(2), call.input<T>(3),
         call.output<T>(0), stream);
}

// ---- backward ----

// b[p, i] = Σ_h dy[token(p), h]·down[e, h, i], from which d_hidden and this tile's part of dscores.
template <class T>
__global__ void __launch_bounds__(kThreads)
    hidden_backward(ExpertsArgs args, const Tile* tiles, const T* dy, const T* hidden,
                    const unsigned* order, const T* scores, const T* down, T* d_hidden,
                    float* parts) {
  cuda::wait_turn();
  __shared__ Shared room;
  const Tile tile = tiles[blockIdx.x];
  if (tile.expert < 0) return;
  const auto inner = static_cast<int>(args.inner), width = static_cast<int>(args.width);
  const int col = static_cast<int>(blockIdx.y) * kCols;
  const T* w = down + std::int64_t{tile.expert} * inner * width;
  Sums sums;
  for (int l = 0; l < width; l += kDepth) {
    load_tile<kRows, kDepth>(room.a, kPitchA, [&](int r, int c) {
      if (r >= tile.count || l + c >= width) return 0.0F;
      const unsigned token = order[tile.first + r] / static_cast<unsigned>(args.chosen);
      return cuda::widen(dy[std::int64_t{token} * width + l + c]);
    });
    load_tile<kDepth, kCols>(room.b, kPitchB, [&](int r, int c) {
      if (l + r >= width || col + c >= inner) return 0.0F;
      return cuda::widen(w[std::int64_t{l + r} * inner + col + c]);
    });
    __syncthreads();
    sums.template add<kSplit<T>>(room.a, kPitchA, 1, room.b, kPitchB, 1);
    __syncthreads();
  }
  float* dots = room.a;  // [kRows, kCols + 1]: b∘a
  sums.each([&](int r, int c, float b) {
    float dot = 0;
    if (r < tile.count && col + c < inner) {
      const std::int64_t at = std::int64_t{tile.first + r} * 2 * inner + col + c;
      const float g = cuda::widen(hidden[at]), u = cuda::widen(hidden[at + inner]);
      float s;
      const float made = silu<T>(g, s);
      dot = b * made * u;
      const float da = cuda::widen(scores[order[tile.first + r]]) * b;
      d_hidden[at] = cuda::narrow<T>(da * u * fmaf(made, 1 - s, s));
      d_hidden[at + inner] = cuda::narrow<T>(da * made);
    }
    // Rows past the tile's share of room.a go behind: each row has kCols + 1 places in a ring of half the rows.
    if (r < kRows / 2) dots[r * (kCols + 1) + c] = dot;
  });
  __syncthreads();
  const auto sum_rows = [&](int from) {
    const int r = static_cast<int>(threadIdx.x);
    if (r < kRows / 2 && from + r < tile.count) {
      float sum = 0;
      for (int c = 0; c < kCols; ++c) sum += dots[r * (kCols + 1) + c];
      parts[std::int64_t{blockIdx.y} * args.tokens * args.chosen + tile.first + from + r] = sum;
    }
  };
  sum_rows(0);
  __syncthreads();
  sums.each([&](int r, int c, float b) {
    if (r < kRows / 2) return;
    float dot = 0;
    if (r < tile.count && col + c < inner) {
      const std::int64_t at = std::int64_t{tile.first + r} * 2 * inner + col + c;
      float s;
      dot = b * silu<T>(cuda::widen(hidden[at]), s) * cuda::widen(hidden[at + inner]);
    }
    dots[(r - kRows / 2) * (kCols + 1) + c] = dot;
  });
  __syncthreads();
  sum_rows(kRows / 2);
}

// Of pairs that no expert has, everything is 0.
template <class T>
__global__ void __launch_bounds__(kThreads)
    join_scores(ExpertsArgs args, const unsigned* order, const unsigned* offsets, int parts,
                const float* from, T* dscores, T* d_hidden) {
  cuda::wait_turn();
  const std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
  const std::int64_t pairs = args.tokens * args.chosen;
  if (i >= pairs) return;
  float sum = 0;
  if (i < offsets[args.experts]) {
    for (int p = 0; p < parts; ++p) sum += from[p * pairs + i];
  } else {
    for (std::int64_t c = 0; c < 2 * args.inner; ++c) {
      d_hidden[i * 2 * args.inner + c] = cuda::narrow<T>(0);
    }
  }
  dscores[order[i]] = cuda::narrow<T>(sum);
}

std::size_t hidden_back_room(const void* opaque) {
  const auto& args = *static_cast<const ExpertsArgs*>(opaque);
  return Workspace::bytes(args, cuda::blocks_for(args.inner, kCols));
}

template <class T>
void experts_hidden_bwd(const KernelCall& call) {
  const auto& args = call.as<ExpertsArgs>();
  const auto stream = static_cast<cudaStream_t>(call.queue);
  const Workspace work(args, call.workspace);
  const auto* order = call.input<unsigned>(2);
  const auto* offsets = call.input<unsigned>(3);
  const auto* by = products_for<T>(args);
  list(args, by, offsets, work.tiles, stream);
  std::int64_t across = cuda::blocks_for(args.inner, kCols);
  if (by != nullptr) {
    across = by->score_parts(args.inner);
    by->hidden_backward(args, tiles_of(args, work.tiles), call.input<T>(0), call.input<T>(1), order,
                        call.input<T>(4), call.input<T>(5), call.output<T>(0), call.output<T>(2),
                        work.values, stream);
  } else {
    cuda::launch(hidden_backward<T>, cuda::Blocks(most_tiles(args), across), kThreads, 0, 1, stream,
                 args, static_cast<const Tile*>(work.tiles), call.input<T>(0), call.input<T>(1),
                 order, call.input<T>(4), call.input<T>(5), call.output<T>(0), work.values);
  }
  cuda::launch(join_scores<T>, cuda::blocks_for(args.tokens * args.chosen, kThreads), kThreads, 0,
               1, stream, args, order, offsets, static_cast<int>(across),
               static_cast<const float*>(work.values), call.output<T>(1), call.output<T>(0));
}

// out[p, h] = Σ_i dg[p, i]·gate[e, i, h] + du[p, i]·up[e, i, h]
template <class T>
__global__ void __launch_bounds__(kThreads)
    x_backward(ExpertsArgs args, const Tile* tiles, const T* d_hidden, const T* gate, const T* up,
               float* out) {
  cuda::wait_turn();
  __shared__ Shared room;
  const Tile tile = tiles[blockIdx.x];
  if (tile.expert < 0) return;
  const auto inner = static_cast<int>(args.inner), width = static_cast<int>(args.width);
  const int col = static_cast<int>(blockIdx.y) * kCols;
  Sums sums;
  for (int which = 0; which < 2; ++which) {
    const T* w = (which == 0 ? gate : up) + std::int64_t{tile.expert} * inner * width;
    for (int l = 0; l < inner; l += kDepth) {
      load_tile<kRows, kDepth>(room.a, kPitchA, [&](int r, int c) {
        if (r >= tile.count || l + c >= inner) return 0.0F;
        return cuda::widen(d_hidden[(std::int64_t{tile.first + r} * 2 + which) * inner + l + c]);
      });
      load_tile<kDepth, kCols>(room.b, kPitchB, [&](int r, int c) {
        if (l + r >= inner || col + c >= width) return 0.0F;
        return cuda::widen(w[std::int64_t{l + r} * width + col + c]);
      });
      __syncthreads();
      sums.template add<kSplit<T>>(room.a, kPitchA, 1, room.b, kPitchB, 1);
      __syncthreads();
    }
  }
  sums.each([&](int r, int c, float v) {
    if (r < tile.count && col + c < width) {
      out[std::int64_t{tile.first + r} * width + col + c] = v;
    }
  });
}

template <class T>
void experts_x_bwd(const KernelCall& call) {
  const auto& args = call.as<ExpertsArgs>();
  const auto stream = static_cast<cudaStream_t>(call.queue);
  const Workspace work(args, call.workspace);
  const auto* by = products_for<T>(args);
  list(args, by, call.input<unsigned>(2), work.tiles, stream);
  if (by != nullptr) {
    by->x_backward(args, tiles_of(args, work.tiles), call.input<T>(0), call.input<T>(3),
                   call.input<T>(4), reinterpret_cast<T*>(work.values), stream);
  } else {
    cuda::launch(x_backward<T>, cuda::Blocks(most_tiles(args), cuda::blocks_for(args.width, kCols)),
                 kThreads, 0, 1, stream, args, static_cast<const Tile*>(work.tiles),
                 call.input<T>(0), call.input<T>(3), call.input<T>(4), work.values);
  }
  add_up(args, work, by, call.input<unsigned>(1), call.input<unsigned>(2),
         static_cast<const T*>(nullptr), call.output<T>(0), stream);
}

// An expert's pairs as depth. Which: 0 dgate, 1 dup: [I, H] from d_hidden and x; 2 ddown: [H, I] from dy and a.
template <class T, int kWhich>
__global__ void __launch_bounds__(kThreads)
    weights_backward(ExpertsArgs args, const T* x, const T* dy, const T* hidden, const T* d_hidden,
                     const unsigned* order, const unsigned* offsets, const T* scores, T* out) {
  cuda::wait_turn();
  __shared__ Shared room;
  const auto inner = static_cast<int>(args.inner), width = static_cast<int>(args.width);
  const int rows = kWhich == 2 ? width : inner, cols = kWhich == 2 ? inner : width;
  const int across = (cols + kCols - 1) / kCols;
  const int row = static_cast<int>(blockIdx.y) / across * kRows;
  const int col = static_cast<int>(blockIdx.y) % across * kCols;
  const auto pairs = static_cast<unsigned>(args.tokens * args.chosen);
  const unsigned begin = min(offsets[blockIdx.x], pairs);
  const unsigned end = max(begin, min(offsets[blockIdx.x + 1], pairs));
  const auto token = [&](unsigned place) {
    return std::int64_t{order[place] / static_cast<unsigned>(args.chosen)};
  };
  Sums sums;
  for (unsigned p = begin; p < end; p += kDepth) {
    load_tile<kDepth, kRows>(room.a, kPitchT, [&](int l, int r) {
      const unsigned place = p + l;
      if (place >= end || row + r >= rows) return 0.0F;
      if constexpr (kWhich == 2) {
        return cuda::widen(scores[order[place]]) * cuda::widen(dy[token(place) * width + row + r]);
      } else {
        return cuda::widen(d_hidden[(std::int64_t{place} * 2 + kWhich) * inner + row + r]);
      }
    });
    load_tile<kDepth, kCols>(room.b, kPitchB, [&](int l, int c) {
      const unsigned place = p + l;
      if (place >= end || col + c >= cols) return 0.0F;
      if constexpr (kWhich == 2) {
        const T* pair = hidden + std::int64_t{place} * 2 * inner + col + c;
        float s;
        return silu<T>(cuda::widen(pair[0]), s) * cuda::widen(pair[inner]);
      } else {
        return cuda::widen(x[token(place) * width + col + c]);
      }
    });
    __syncthreads();
    sums.template add<kSplit<T> || kWhich == 2>(room.a, 1, kPitchT, room.b, kPitchB, 1);
    __syncthreads();
  }
  sums.each([&](int r, int c, float v) {
    if (row + r < rows && col + c < cols) {
      out[(std::int64_t{blockIdx.x} * rows + row + r) * cols + col + c] = cuda::narrow<T>(v);
    }
  });
}

template <class T>
void experts_weights_bwd(const KernelCall& call) {
  const auto& args = call.as<ExpertsArgs>();
  const auto stream = static_cast<cudaStream_t>(call.queue);
  if (const auto* by = products_for<T>(args)) {
    by->weights_backward(args, call.input<T>(0), call.input<T>(1), call.input<T>(3),
                         call.input<T>(7), call.input<unsigned>(4), call.input<unsigned>(5),
                         call.output<T>(0), call.output<T>(1), call.output<T>(2), stream);
    return;
  }
  const auto run = [&](auto kernel, std::int64_t rows, std::int64_t cols, T* out) {
    cuda::launch(
        kernel,
        cuda::Blocks(args.experts, cuda::blocks_for(rows, kRows) * cuda::blocks_for(cols, kCols)),
        kThreads, 0, 1, stream, args, call.input<T>(0), call.input<T>(1), call.input<T>(2),
        call.input<T>(3), call.input<unsigned>(4), call.input<unsigned>(5), call.input<T>(6), out);
  };
  run(weights_backward<T, 0>, args.inner, args.width, call.output<T>(0));
  run(weights_backward<T, 1>, args.inner, args.width, call.output<T>(1));
  run(weights_backward<T, 2>, args.width, args.inner, call.output<T>(2));
}

}  // namespace

void register_experts_cuda(KernelRegistry& registry) {
  registry.add(Backend::kCuda, "experts_order_u32", experts_order, order_room);
  const auto add = [&]<class T>(T, const std::string& type) {
    registry.add(Backend::kCuda, "experts_hidden_fwd_" + type, experts_hidden_fwd<T>, hidden_room);
    registry.add(Backend::kCuda, "experts_out_fwd_" + type, experts_out_fwd<T>, wide_room);
    registry.add(Backend::kCuda, "experts_hidden_bwd_" + type, experts_hidden_bwd<T>,
                 hidden_back_room);
    registry.add(Backend::kCuda, "experts_x_bwd_" + type, experts_x_bwd<T>, wide_room);
    registry.add(Backend::kCuda, "experts_weights_bwd_" + type, experts_weights_bwd<T>);
  };
  add(float(), "f32");
  add(F16(), "f16");
  add(BF16(), "bf16");
}

}  // namespace mlxtape::ops
