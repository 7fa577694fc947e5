// Products of matrices in tiles by simdgroup matrices, for the kernels of every op that multiplies.
//
// A group of 128 threads has a tile of kTile x kTile sums, 64 or 32: four simdgroups, two down and two across, with a
// quarter each. Both factors pass through threadgroup memory, sixteen of the depth at a time, in the type and the order that
// they have in memory; what lies outside of a matrix is 0 there. 8x8 matrices are filled and read by their lanes, so that
// 16 bits are widened on the way: products and sums are f32 for every type.
//
// Tiles of 64: 32 sums and 16 factors a thread, about 80 registers, 10 KB of threadgroup memory in f32 and 6 KB in 16 bits;
// tiles of 32 have a quarter of the sums and half of the memory, for matrices that would not make enough groups.
#pragma once

#include <metal_simdgroup_matrix>

#include "backends/metal/device/vectors.h"

enum { kTileThreads = 128, kTileDepth = 16 };

// A factor in threadgroup memory: [tile, depth], or turned [depth, tile]. Rows are 16 bytes apart, so that neighbours begin in
// different banks.
template <typename T, int kTile>
struct TileRoom {
  enum {
    kPad = 16 / int(sizeof(T)),
    kPitch = kTileDepth + kPad,
    kTurnedPitch = kTile + kPad,
    kPacks = kTile * kPitch * int(sizeof(T)) / 16  // of 16 bytes: turned it needs less
  };
};

// Rows of a matrix in memory, a number of elements apart.
template <typename T>
struct PlainRows {
  device const T* first;
  long step;
};
template <typename T>
inline device const T* row_of(thread const PlainRows<T>& rows, uint r) {
  return rows.first + long(r) * rows.step;
}

// Rows that a list chooses: row list[r] / per.
template <typename T>
struct ListedRows {
  device const T* first;
  long step;
  device const uint* list;
  uint per;
};
template <typename T>
inline device const T* row_of(thread const ListedRows<T>& rows, uint r) {
  return rows.first + long(rows.list[r] / rows.per) * rows.step;
}

// A factor of a product: `outer` rows of a or columns of b. turned: memory has them next to each other, and rows of `from` are
// steps of the depth. packs: rows of `from` begin at multiples of 16 bytes.
template <typename Rows>
struct Factor {
  Rows from;
  uint outer;
  bool turned, packs;
};

// kRows x kCols elements from row and column on, of which so many rows and columns are there.
template <int kRows, int kCols, typename Rows, typename T>
inline void load_tile(thread const Rows& from, bool packs, uint row, uint rows, uint col, uint cols,
                      threadgroup T* to, uint pitch, uint index) {
  enum { kCount = Pack<T>::kCount, kAcross = kCols / kCount };
  for (uint i = index; i < uint(kRows * kAcross); i += kTileThreads) {
    const uint r = i / kAcross, c = i % kAcross * kCount;
    threadgroup T* at = to + r * pitch + c;
    const bool in = row + r < rows;
    if (in && packs && col + c + kCount <= cols) {
      *(threadgroup uint4*)at = load_pack(row_of(from, row + r) + col + c);
      continue;
    }
    for (uint j = 0; j < uint(kCount); ++j) {
      T v = narrow<T>(0.0f);
      if (in && col + c + j < cols) v = row_of(from, row + r)[col + c + j];
      at[j] = v;
    }
  }
}

// The part of a factor from k on.
template <int kTile, typename Rows, typename T>
inline void load_factor(thread const Factor<Rows>& factor, uint k, uint depth, threadgroup T* to,
                        uint index) {
  if (factor.turned) {
    load_tile<kTileDepth, kTile>(factor.from, factor.packs, k, depth, 0, factor.outer, to,
                                 TileRoom<T, kTile>::kTurnedPitch, index);
  } else {
    load_tile<kTile, kTileDepth>(factor.from, factor.packs, 0, factor.outer, k, depth, to,
                                 TileRoom<T, kTile>::kPitch, index);
  }
}

// Where a lane's two neighbours of an 8x8 matrix are.
inline uint matrix_row(uint lane) { return (lane / 4 & 4) + lane / 2 % 4; }
inline uint matrix_col(uint lane) { return (lane / 4 & 2) * 2 + lane % 2 * 2; }

// A simdgroup's quarter of the tile.
template <int kTile>
struct TileSums {
  enum { kHalf = kTile / 2, kCount = kHalf / 8 };
  simdgroup_float8x8 v[kCount][kCount];
};
template <int kTile>
inline void clear(thread TileSums<kTile>& sums) {
  for (int i = 0; i < TileSums<kTile>::kCount; ++i) {
    for (int j = 0; j < TileSums<kTile>::kCount; ++j) sums.v[i][j] = simdgroup_float8x8(0.0f);
  }
}
// Of this thread's first number: the others are multiples of eight down and across.
template <int kTile>
inline uint tile_row(uint lane, uint simd) {
  return simd / 2 * (kTile / 2) + matrix_row(lane);
}
template <int kTile>
inline uint tile_col(uint lane, uint simd) {
  return simd % 2 * (kTile / 2) + matrix_col(lane);
}

template <typename T>
inline void fill(thread simdgroup_float8x8& m, threadgroup const T* p, uint step) {
  m.thread_elements()[0] = widen(p[0]);
  m.thread_elements()[1] = widen(p[step]);
}

// Element (r, k) of a is a[r * a_row + k * a_depth], and (k, c) of b is b[c * b_col + k * b_depth].
template <int kTile, typename A, typename B>
inline void multiply_tiles(threadgroup const A* a, uint a_row, uint a_depth, threadgroup const B* b,
                           uint b_col, uint b_depth, thread TileSums<kTile>& sums, uint lane,
                           uint simd) {
  enum { kCount = TileSums<kTile>::kCount };
  const uint row = matrix_row(lane), col = matrix_col(lane);
  a += (simd / 2 * (kTile / 2) + row) * a_row + col * a_depth;
  b += (simd % 2 * (kTile / 2) + col) * b_col + row * b_depth;
  for (uint k = 0; k < uint(kTileDepth); k += 8) {
    simdgroup_float8x8 left[kCount], right[kCount];
    for (int i = 0; i < kCount; ++i) fill(left[i], a + i * 8 * a_row + k * a_depth, a_depth);
    for (int j = 0; j < kCount; ++j) fill(right[j], b + j * 8 * b_col + k * b_depth, b_col);
    for (int i = 0; i < kCount; ++i) {
      for (int j = 0; j < kCount; ++j) {
        simdgroup_multiply_accumulate(sums.v[i][j], left[i], right[j], sums.v[i][j]);
      }
    }
  }
}

// sums += a · b over all of the depth. All 128 threads come here; rooms: TileRoom::kPacks packs each.
template <int kTile, typename A, typename B, typename RowsA, typename RowsB>
inline void add_product(Factor<RowsA> a, Factor<RowsB> b, uint depth, threadgroup A* room_a,
                        threadgroup B* room_b, thread TileSums<kTile>& sums, uint index, uint lane,
                        uint simd) {
  const uint a_row = a.turned ? 1 : uint(TileRoom<A, kTile>::kPitch);
  const uint a_depth = a.turned ? uint(TileRoom<A, kTile>::kTurnedPitch) : 1;
  const uint b_col = b.turned ? 1 : uint(TileRoom<B, kTile>::kPitch);
  const uint b_depth = b.turned ? uint(TileRoom<B, kTile>::kTurnedPitch) : 1;
  for (uint k = 0; k < depth; k += kTileDepth) {
    threadgroup_barrier(mem_flags::mem_threadgroup);  // what is in the rooms has been read
    load_factor<kTile>(a, k, depth, room_a, index);
    load_factor<kTile>(b, k, depth, room_b, index);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    multiply_tiles<kTile>(room_a, a_row, a_depth, room_b, b_col, b_depth, sums, lane, simd);
  }
}
