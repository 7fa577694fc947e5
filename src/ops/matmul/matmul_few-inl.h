// The CPU's matmul where one side has few rows (or, turned, few columns): bound by reading the other side
// once, which therefore is not copied. S: the few rows [rows, k]; L: the other matrix [k, cols].
#include "backends/cpu/device/dots-inl.h"
#include "matmul_pack-inl.h"

#include "backends/cpu/device/tasks.h"

// Per-target include guard: Highway flips the toggle for each target.
#if defined(MLXTAPE_MATMUL_FEW_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef MLXTAPE_MATMUL_FEW_INL_H_
#undef MLXTAPE_MATMUL_FEW_INL_H_
#else
#define MLXTAPE_MATMUL_FEW_INL_H_
#endif

HWY_BEFORE_NAMESPACE();
namespace mlxtape::ops::HWY_NAMESPACE {
namespace {

constexpr std::int64_t kFew = 16;       // rows, at most
constexpr std::int64_t kFewDepth = 16;  // rows of L that are read side by side

// ---- L lies in rows: streams of a few rows, the sums of a strip of columns wait in the cache ----

// sums [kRows, 2 vectors] (+)= s [kRows, kFewDepth] · depth rows of L. ahead: elements from a row of L to
// the one that is fetched with it.
template <class T, int kRows>
HWY_NOINLINE void few_tile(const float* HWY_RESTRICT s, const T* HWY_RESTRICT l, std::int64_t l_row,
                           std::int64_t depth, float* HWY_RESTRICT sums, std::int64_t pitch,
                           bool add, std::int64_t ahead) {
  const DF d;
  VF sum[kRows][2];
#pragma GCC unroll 14
  for (int r = 0; r < kRows; ++r) {
    sum[r][0] = add ? hn::LoadU(d, sums + r * pitch) : hn::Zero(d);
    sum[r][1] = add ? hn::LoadU(d, sums + r * pitch + kLanes) : hn::Zero(d);
  }
  for (std::int64_t k = 0; k < depth; ++k) {
    __builtin_prefetch(l + ahead, 0, 2);
    if constexpr (sizeof(T) == 4) __builtin_prefetch(l + ahead + kLanes, 0, 2);
    const VF l0 = load(d, l);
    const VF l1 = load(d, l + kLanes);
#pragma GCC unroll 14
    for (int r = 0; r < kRows; ++r) {
      const VF v = hn::Set(d, s[r * kFewDepth + k]);
      sum[r][0] = hn::MulAdd(v, l0, sum[r][0]);
      sum[r][1] = hn::MulAdd(v, l1, sum[r][1]);
    }
    l += l_row;
  }
#pragma GCC unroll 14
  for (int r = 0; r < kRows; ++r) {
    hn::StoreU(sum[r][0], d, sums + r * pitch);
    hn::StoreU(sum[r][1], d, sums + r * pitch + kLanes);
  }
}

// sums [rows, pitch]: the first cols columns of S·L; pitch a multiple of kTileCols.
template <class T>
void few_streams(const Matrix<T>& s, const Matrix<T>& l, std::int64_t rows, std::int64_t cols,
                 std::int64_t depth, float* sums, std::int64_t pitch) {
  static constexpr auto kTiles =
      table_of(std::make_index_sequence<kTileRows>(), [](auto n) { return few_tile<T, n()>; });
  const std::int64_t groups = ceil_div(rows, kTileRows), each = ceil_div(rows, groups);
  const DF d;
  HWY_ALIGN float few[kFew * kFewDepth];
  HWY_ALIGN T edge[kFewDepth * kTileCols];  // the last columns of L, where they fill no tile
  for (std::int64_t r = 0; depth == 0 && r < rows; ++r) {
    std::fill_n(sums + r * pitch, pitch, 0.0F);
  }
  for (std::int64_t k0 = 0; k0 < depth; k0 += kFewDepth) {
    const std::int64_t some = std::min(kFewDepth, depth - k0);
    for (std::int64_t r = 0; r < rows; ++r) {
      const T* from = s.at + r * s.row + k0 * s.col;
      if (s.col == 1) {
        for (std::int64_t k = 0; k < some; k += kLanes) {
          const auto count = static_cast<std::size_t>(std::min(kLanes, some - k));
          hn::Store(load_n(d, from + k, count), d, few + r * kFewDepth + k);
        }
      } else {
        for (std::int64_t k = 0; k < some; ++k) {
          few[r * kFewDepth + k] = static_cast<float>(from[k * s.col]);
        }
      }
    }
    const std::int64_t ahead = k0 + kFewDepth < depth ? kFewDepth * l.row : 0;
    for (std::int64_t c = 0; c < cols; c += kTileCols) {
      const T* from = l.at + k0 * l.row + c;
      std::int64_t l_row = l.row;
      if (c + kTileCols > cols) {
        std::fill_n(edge, kFewDepth * kTileCols, T());
        for (std::int64_t k = 0; k < some; ++k) {
          std::copy_n(from + k * l.row, cols - c, edge + k * kTileCols);
        }
        from = edge;
        l_row = kTileCols;
      }
      for (std::int64_t r = 0; r < rows; r += each) {
        kTiles[static_cast<std::size_t>(std::min(each, rows - r) - 1)](
            few + r * kFewDepth, from, l_row, some, sums + r * pitch + c, pitch, k0 > 0,
            l_row == l.row ? ahead : 0);
      }
    }
  }
}

// ---- L lies in columns: each sum is the product of two rows of memory ----

// As few_streams. room: floats for rows of S, from few_rows_room.
template <class T>
void few_products(const Matrix<T>& s, const Matrix<T>& l, std::int64_t rows, std::int64_t cols,
                  std::int64_t depth, float* sums, std::int64_t pitch, float* room) {
  const float* few = room;
  std::int64_t s_row = ceil_div(depth, kLanes) * kLanes;
  if constexpr (sizeof(T) == 4) {
    if (s.col == 1) {
      few = s.at;
      s_row = s.row;
    }
  }
  if (few == room) {
    for (std::int64_t r = 0; r < rows; ++r) {
      const T* from = s.at + r * s.row;
      if (s.col == 1) {
        widen_row(from, depth, room + r * s_row);
      } else {
        for (std::int64_t k = 0; k < depth; ++k) {
          room[r * s_row + k] = static_cast<float>(from[k * s.col]);
        }
      }
    }
  }
  dot_rows(few, s_row, rows, l.at, l.col, cols, depth, sums, pitch);
}

inline std::int64_t few_rows_room(std::int64_t rows, std::int64_t depth) {
  return rows * ceil_div(depth, kLanes) * kLanes;
}

}  // namespace
}  // namespace mlxtape::ops::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
