// What the Metal kernels of experts' two directions share: tiles of pairs, and how they are launched.
#pragma once

#include "experts_args.h"

// Pairs of one expert, in their order; an expert of -1 is none.
struct ExpertsTile {
  int32_t expert;
  uint32_t first;
  int32_t count;
  int32_t unused;
};
// Of a launch with a kernel that takes tiles: how many there are at most, and columns of tiles in its result.
struct ExpertsGrid {
  int64_t tiles, across;
};

#ifdef __METAL_VERSION__

#include "backends/metal/device/exp.h"
#include "backends/metal/device/tiles.h"

using namespace mlxtape::ops;

constant bool a_packs
    [[function_constant(0)]];  // rows of the left factor begin at multiples of 16 bytes
constant bool b_packs [[function_constant(1)]];  // rows of the right one, or all rows

#define EXPERTS_PLACE                                                                         \
  constant uint &first_group [[buffer(30)]], uint group [[threadgroup_position_in_grid]],     \
      uint index [[thread_position_in_threadgroup]], uint lane [[thread_index_in_simdgroup]], \
      uint simd [[simdgroup_index_in_threadgroup]]

// What a group has of a product of tiles: pairs, by columns from col on. Of no expert: no pairs, and no depth.
struct ExpertsWork {
  long expert, first;
  uint count;   // pairs
  long column;  // which tile of columns
  bool exists;
};
inline ExpertsWork work_of(device const ExpertsTile* tiles, constant ExpertsGrid& grid,
                           long group) {
  const ExpertsTile tile = tiles[group / grid.across];
  ExpertsWork work;
  work.exists = tile.expert >= 0;
  work.expert = work.exists ? tile.expert : 0;
  work.first = tile.first;
  work.count = uint(tile.count);
  work.column = group % grid.across;
  return work;
}

template <typename T>
inline Factor<PlainRows<T>> plain(device const T* first, long step, uint outer, bool turned,
                                  bool packs) {
  Factor<PlainRows<T>> factor;
  factor.from.first = first;
  factor.from.step = step;
  factor.outer = outer;
  factor.turned = turned;
  factor.packs = packs;
  return factor;
}
// Rows of the tokens of pairs.
template <typename T>
inline Factor<ListedRows<T>> gathered(device const T* first, long step, device const uint* order,
                                      uint chosen, uint outer, bool turned, bool packs) {
  Factor<ListedRows<T>> factor;
  factor.from.first = first;
  factor.from.step = step;
  factor.from.list = order;
  factor.from.per = chosen;
  factor.outer = outer;
  factor.turned = turned;
  factor.packs = packs;
  return factor;
}
template <int kTile>
inline uint left_of(long all, long begin) {
  return uint(min(long(kTile), all - begin));
}

// Writes a tile's sums: row r, column c to out[r * step + c].
template <int kTile, typename Out>
inline void store_sums(thread TileSums<kTile>& sums, device Out* out, long step, uint rows,
                       uint cols, uint lane, uint simd) {
  const uint r0 = tile_row<kTile>(lane, simd), c0 = tile_col<kTile>(lane, simd);
  for (int i = 0; i < TileSums<kTile>::kCount; ++i) {
    for (int j = 0; j < TileSums<kTile>::kCount; ++j) {
      for (int e = 0; e < 2; ++e) {
        const uint r = r0 + 8 * i, c = c0 + 8 * j + e;
        if (r < rows && c < cols) {
          out[r * step + c] = narrow<Out>(sums.v[i][j].thread_elements()[e]);
        }
      }
    }
  }
}

#else

#include <algorithm>

#include "backends/metal/launch.h"

namespace mlxtape::ops::experts_metal {

using metal::Launch;

constexpr std::int64_t kThreads = 256;  // of a group whose threads have a number each
constexpr std::int64_t kTileThreads = 128;

inline std::int64_t pairs_of(const ExpertsArgs& args) { return args.tokens * args.chosen; }

inline std::int64_t side_of(const ExpertsArgs& args) {
  return pairs_of(args) > 32 * args.experts ? 64 : 32;
}
// As many as any routing can make.
inline std::int64_t most_tiles(const ExpertsArgs& args) {
  return pairs_of(args) / side_of(args) + std::min(args.experts, pairs_of(args));
}

// Names for tiles of 64 and of 32.
struct Names {
  const char *large, *small;
  const char* of(const ExpertsArgs& args) const { return side_of(args) == 64 ? large : small; }
};

// What a workspace has: tiles, a place for each pair, activations, and other numbers, each or none.
struct Workspace {
  void *tiles, *places, *active, *values;

  static std::size_t rounded(std::size_t bytes) { return (bytes + 255) / 256 * 256; }
  static std::size_t tiles_bytes(const ExpertsArgs& args) {
    return rounded(static_cast<std::size_t>(most_tiles(args)) * sizeof(ExpertsTile));
  }
  static std::size_t bytes_of(const ExpertsArgs& args, std::int64_t numbers_each) {
    return rounded(static_cast<std::size_t>(pairs_of(args) * numbers_each) * sizeof(float));
  }
  static std::size_t bytes(const ExpertsArgs& args, bool has_active, std::int64_t values_each) {
    return tiles_bytes(args) + bytes_of(args, 1) + (has_active ? bytes_of(args, args.inner) : 0) +
           bytes_of(args, values_each);
  }
  Workspace(const KernelCall& call, bool has_active) {
    const auto& args = call.as<ExpertsArgs>();
    auto* at = static_cast<char*>(call.workspace);
    tiles = at;
    places = at + tiles_bytes(args);
    active = static_cast<char*>(places) + bytes_of(args, 1);
    values = static_cast<char*>(active) + (has_active ? bytes_of(args, args.inner) : 0);
  }
};

// Do rows of so many elements begin at multiples of 16 bytes?
template <class T>
bool in_packs(std::int64_t row, const void* p, const void* other = nullptr) {
  return row * static_cast<std::int64_t>(sizeof(T)) % 16 == 0 && metal::is_aligned(p) &&
         metal::is_aligned(other);
}

// Operations of a product of all pairs with one of the weights.
inline double work_of(const ExpertsArgs& args) {
  return 2.0 * static_cast<double>(pairs_of(args)) * static_cast<double>(args.inner) *
         static_cast<double>(args.width);
}

// A launch for each tile and so many columns of tiles.
inline void run_tiles(Launch& launch, const ExpertsArgs& args, std::int64_t across,
                      double operations) {
  launch.operations(operations)
      .in_parts()
      .groups(most_tiles(args) * across)
      .threads(kTileThreads)
      .run();
}
inline void run_each(Launch& launch, std::int64_t count) {
  launch.in_parts().groups(ceil_div(count, kThreads)).threads(kThreads).run();
}

// Of all pairs, for the kernels that follow in the queue.
void list_tiles(const KernelCall& call, const void* offsets, void* tiles);

// active[p, i] = a, times the scores if these are not null.
template <class T>
void make_active(const KernelCall& call, const void* hidden, const void* order, const void* offsets,
                 const void* scores, void* active);

// to from what the pairs have become in work.values. scores: null for 1.
template <class T>
void add_up(const KernelCall& call, const Workspace& work, const void* order, const void* offsets,
            const void* scores, void* to);

void register_back(KernelRegistry& registry);

}  // namespace mlxtape::ops::experts_metal

#endif
