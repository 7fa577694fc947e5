// What the kernels of experts for compute capability 9.0 have in common (experts_hopper.cu, experts_hopper_back.cu).
//
// A block makes tiles of 192 × 256 one after the other, the same way in every kernel: a group of four warps
// fills a ring of slots in shared memory, each with 64 of the depth of both factors, and goes on to the next tile while
// two other groups multiply, 128 columns each, and store. Rows come in blocks of 64; a block without rows is neither
// brought nor multiplied. Tiles of an expert are made at the same time, so that its weights come from memory once. A factor
// is brought by the copy engine, or by the threads where rows are gathered or may be absent.
//
// A step brings 56 KB from the second-level cache for 112 operations a byte; with tiles of 128 × 256 it would be 85. The
// sums of 192 × 256 are 192 registers a thread; more columns or rows would leave too few for the rest.
#pragma once

#include "backends/cuda/device/exp.cuh"
#include "backends/cuda/device/launch.cuh"
#include "backends/cuda/device/mma16.cuh"
#include "backends/cuda/device/tensor_map.cuh"
#include "backends/cuda/device/wgmma.cuh"
#include "experts_hopper.h"

namespace mlxtape::ops::hopper {

constexpr int kCols = 256, kDepth = cuda::kTileDepth;
constexpr unsigned kBytesB = kCols * cuda::kTileRow;
constexpr unsigned kBlockBytesA =
    64 * cuda::kTileRow;  // 64 rows along the depth, or a turned block of 64
constexpr unsigned kStageBytes =
    16 * 64 * 2;  // 16 rows × 64 columns of a warp on their way to memory

constexpr int kRows = 192, kBlocksDown = kRows / 64;
constexpr int kGroupCols = kCols / 2, kMakerWarps = 8, kMakerThreads = 2 * cuda::kGroup;
constexpr int kThreads = kMakerThreads + cuda::kGroup;
constexpr int kLoaderRegisters = 40, kMakerRegisters = 232;  // of 504 for three groups
constexpr unsigned kBytesA = kRows * cuda::kTileRow;
static_assert(kRows == kTilePairs);

// What the makers must know of the tile that a slot belongs to. Loaders find it out, long before.
struct alignas(16) Note {
  int expert;
  unsigned first;
  int count,
      which;  // pairs, −1: there are no more tiles; of the expert's tiles with the same pairs
};

// kStage: bytes in which a warp puts what it made in order.
template <int kCount, int kStage>
struct RoomOf {
  static constexpr int kSlots = kCount;
  using Cursor = cuda::Cursor<kSlots>;

  std::uint64_t full[kSlots], empty[kSlots];
  Note note[kSlots];
  alignas(1024) unsigned char slot[kSlots][kBytesA + kBytesB];
  unsigned char stage[kMakerWarps][kStage];
};
using Room = RoomOf<3, 2 * kStageBytes>;
using Cursor = Room::Cursor;

template <class R>
constexpr int kRoomBytesOf =
    sizeof(R) + 1024;  // so that it can begin where 1024 divides the address
constexpr int kRoomBytes = kRoomBytesOf<Room>;
static_assert(kRoomBytes <= cuda::kSharedBytes);

extern __shared__ unsigned char shared_bytes[];

template <class R = Room>
__device__ __forceinline__ R& room() {
  const unsigned at = cuda::shared_address(shared_bytes);
  return *reinterpret_cast<R*>(shared_bytes + (1024 - at % 1024) % 1024);
}

// arrivals: what the loaders' threads arrive with at a slot that is full.
template <class R>
__device__ __forceinline__ void prepare(R& r, unsigned arrivals) {
  if (threadIdx.x == 0) {
    for (int i = 0; i < R::kSlots; ++i) {
      cuda::barrier_init(&r.full[i], arrivals);
      cuda::barrier_init(&r.empty[i], kMakerWarps);
    }
    cuda::barrier_init_done();
  }
  __syncthreads();
}

// ---- makers: the first groups ----

__device__ __forceinline__ int maker_group() { return threadIdx.x / cuda::kGroup; }
__device__ __forceinline__ int maker_warp() { return threadIdx.x / cuda::kWarp % 4; }

template <class R>
__device__ __forceinline__ void release(R& r, int slot) {
  if (threadIdx.x % cuda::kWarp == 0) cuda::barrier_arrive(&r.empty[slot]);
}

// As if it were not known before: it is to wait in no register.
__device__ __forceinline__ unsigned lane_now() {
  unsigned lane;
  asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
  return lane;
}

// Of the tile that comes next. Read by the lane that releases the slot, for all of its warp.
template <class R>
__device__ __forceinline__ Note next_note(R& r, const typename R::Cursor& at) {
  cuda::barrier_wait(&r.full[at.slot], at.phase);
  Note note{};
  if (lane_now() == 0) note = r.note[at.slot];
  const auto given = [](auto v) {
    return __shfl_sync(cuda::kAll, v, 0);
  };
  return {given(note.expert), given(note.first), given(note.count), given(note.which)};
}
__device__ __forceinline__ int blocks_of(int rows) { return min(kBlocksDown, (rows + 63) / 64); }

// Of each 64 rows of the tile, this group's columns.
using Block = cuda::GroupTile<kGroupCols>;
struct Sums {
  Block block[kBlocksDown];
};

template <class T, bool kTurnedA, bool kTurnedB, bool kByThreads, int kBlocks, class R,
          class Between>
__device__ __forceinline__ void multiply_blocks(R& r, typename R::Cursor& at, int steps, Sums& sums,
                                                const Between& between) {
  // Columns along the depth are rows of the slot; turned, they are blocks of 64.
  static_assert(kGroupCols * cuda::kTileRow == kGroupCols / 64 * cuda::kTurnedBlock);
  const unsigned columns =
      kBytesA + static_cast<unsigned>(maker_group()) * (kGroupCols * cuda::kTileRow);
  int before = 0;
  for (int s = 0; s < steps; ++s) {
    cuda::barrier_wait(&r.full[at.slot], at.phase);
    if constexpr (kByThreads) cuda::see_writes();
    const unsigned from = cuda::shared_address(r.slot[at.slot]);
    const std::uint64_t a = cuda::factor_at(from), b = cuda::factor_at(from + columns);
    cuda::products_begin();
#pragma unroll
    for (int k = 0; k < kDepth / 16; ++k) {
#pragma unroll
      for (int m = 0; m < kBlocks; ++m) {
        cuda::group_product<T, kTurnedA, kTurnedB>(
            sums.block[m], a + m * (kBlockBytesA >> 4U) + k * cuda::kNextDepth<kTurnedA>,
            b + k * cuda::kNextDepth<kTurnedB>, s | k);
      }
    }
    cuda::products_commit();
    if (s == min(1, steps - 1)) between();
    cuda::products_wait<1>();
    if (s > 0) release(r, before);
    before = at.slot;
    at.next();
  }
  cuda::products_wait<0>();
#pragma unroll
  for (int m = 0; m < kBlocks; ++m) sums.block[m].settle();
  release(r, before);
}

struct Nothing {
  __device__ __forceinline__ void operator()() const {}
};

// sums = this group's columns of a · b over `steps` ≥ 1 slots, for the first `blocks` blocks of rows, from 1 to 3.
// kByThreads: threads wrote some of the slots. between: what is to be done while the first products are made.
template <class T, bool kTurnedA, bool kTurnedB, bool kByThreads, class R, class Between = Nothing>
__device__ __forceinline__ void multiply(R& r, typename R::Cursor& at, int steps, int blocks,
                                         Sums& sums, const Between& between = {}) {
  if (blocks == 3) {
    multiply_blocks<T, kTurnedA, kTurnedB, kByThreads, 3>(r, at, steps, sums, between);
  } else if (blocks == 2) {
    multiply_blocks<T, kTurnedA, kTurnedB, kByThreads, 2>(r, at, steps, sums, between);
  } else {
    multiply_blocks<T, kTurnedA, kTurnedB, kByThreads, 1>(r, at, steps, sums, between);
  }
}

// Keeps the compiler from working out what follows from it ahead of time, in registers that are not there.
template <class T>
__device__ __forceinline__ void here(T*& pointer) {
  asm volatile("" : "+l"(pointer));
}
__device__ __forceinline__ void here(unsigned& number) { asm volatile("" : "+r"(number)); }
__device__ __forceinline__ void here(int& number) { asm volatile("" : "+r"(number)); }
__device__ __forceinline__ unsigned warp_now() {
  unsigned thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return thread / cuda::kWarp;
}

// The four words of columns [16·i, 16·i + 16) of this thread's sums, rounded, as stmatrix takes them: 8 × 8 numbers of the
// rows 0-7, 8-15, and the same of the next 8 columns.
template <class T>
__device__ __forceinline__ void words_of(const Block& sums, int i, unsigned (&w)[4]) {
#pragma unroll
  for (int m = 0; m < 4; ++m) {
    const float* two = sums.v[2 * i + m / 2] + m % 2 * 2;
    w[m] = cuda::two_of<T>(two[0], two[1]);
  }
}

// Where this lane's row of the first 16 columns stands for stmatrix in 16 rows of a tile; of the columns
// 16·i on it stands at that ^ 32·i, which needs no register for each i.
__device__ __forceinline__ unsigned matrices_in(unsigned rows) {
  const unsigned lane = lane_now();
  return rows + cuda::tile_place(lane % 16, lane / 16);
}
__device__ __forceinline__ void put_matrices(unsigned at, int i, const unsigned (&w)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                   at ^ static_cast<unsigned>(32 * i)),
               "r"(w[0]), "r"(w[1]), "r"(w[2]), "r"(w[3])
               : "memory");
}
template <class T>
__device__ __forceinline__ cuda::Pack<T> load_shared(unsigned at) {
  cuda::Pack<T> v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.word[0]), "=r"(v.word[1]), "=r"(v.word[2]), "=r"(v.word[3])
               : "r"(at));
  return v;
}

// Who has what of a warp's 16 staged rows × 64 columns when they are read: a lane 8 columns of every fourth row.
struct Chunks {
  unsigned row, col, place;

  __device__ __forceinline__ Chunks() {
    const unsigned lane = lane_now();
    row = lane / 8;
    col = lane % 8 * 8;
    place = cuda::tile_place(row, lane % 8);
  }
  // Of the row 4·i + row; 4 rows on, the chunk beside.
  template <class T>
  __device__ __forceinline__ cuda::Pack<T> load(unsigned rows, int i) const {
    return load_shared<T>(rows + (i % 2 == 0 ? place : place ^ 64U) +
                          static_cast<unsigned>(i) * 4 * cuda::kTileRow);
  }
};
template <class T>
__device__ __forceinline__ void store_now(const cuda::Pack<T>& v, T* to) {
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(v.word[0]), "r"(v.word[1]),
               "r"(v.word[2]), "r"(v.word[3])
               : "memory");
}

// A warp's staged rows to memory: rows: how many there are.
template <class T>
__device__ __forceinline__ void store_stage(unsigned stage, T* to, std::int64_t pitch, int rows) {
  const Chunks mine;
  to += mine.row * pitch + mine.col;
  rows -= static_cast<int>(mine.row);
  __syncwarp();
#pragma unroll
  for (int i = 0; i < 4; ++i, to += 4 * pitch) {
    const cuda::Pack<T> v = mine.load<T>(stage, i);
    if (4 * i < rows) store_now(v, to);
  }
  __syncwarp();
}

// Of a block this warp's 16 rows and 64 of the group's columns: `to` is the first element.
template <class T>
__device__ __forceinline__ void store_part(unsigned stage, const Block& sums, int part, T* to,
                                           std::int64_t pitch, int rows) {
  const unsigned at = matrices_in(stage);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    unsigned w[4];
    words_of<T>(sums, part * 4 + i, w);
    put_matrices(at, i, w);
  }
  store_stage(stage, to, pitch, rows);
}

// The tile's sums as rows of a matrix: `to` is the tile's first element; rows, cols: how many there are, of columns a
// multiple of 64.
template <class T>
__device__ __forceinline__ void store_sums(unsigned stage, const Sums& sums, T* to,
                                           std::int64_t pitch, int rows, int cols) {
  const int above = maker_warp() * 16, left = maker_group() * kGroupCols;
  to += above * pitch + left;
#pragma unroll
  for (int m = 0; m < kBlocksDown; ++m, to += 64 * pitch) {
    if (m * 64 >= rows) break;
#pragma unroll
    for (int part = 0; part < kGroupCols / 64; ++part) {
      if (left + part * 64 >= cols) break;
      store_part(stage + static_cast<unsigned>(part) % 2 * kStageBytes, sums.block[m], part,
                 to + part * 64, pitch, rows - m * 64 - above);
    }
  }
}

// ---- loaders: the last group ----

__device__ __forceinline__ bool is_loader() { return threadIdx.x >= kMakerThreads; }
__device__ __forceinline__ unsigned loader_thread() { return threadIdx.x % cuda::kGroup; }

template <class R>
__device__ __forceinline__ void wait_empty(R& r, const typename R::Cursor& at) {
  cuda::barrier_wait(&r.empty[at.slot], at.phase ^ 1U);
}

// After the last tile. kByAll: all threads arrive at a full slot, and one twice; else that one alone.
template <bool kByAll, class R>
__device__ __forceinline__ void end_notes(R& r, const typename R::Cursor& at) {
  wait_empty(r, at);
  if (loader_thread() == 0) {
    r.note[at.slot] = {0, 0, -1, 0};
    cuda::barrier_arrive(&r.full[at.slot]);
  }
  if constexpr (kByAll) cuda::barrier_arrive(&r.full[at.slot]);
}

// Rows of a matrix [pairs, ...] for the pairs of a tile, along the depth; those that follow in the last block are of
// other pairs, and what they make is not stored. Counts kBlockBytesA for each block.
__device__ __forceinline__ void bring_rows(unsigned to, const CUtensorMap& map, int depth,
                                           const ExpertsTile& tile, std::uint64_t* full) {
  for (int b = 0; b < blocks_of(tile.count); ++b) {
    cuda::bring_tile(to + static_cast<unsigned>(b) * kBlockBytesA, map, depth,
                     static_cast<int>(tile.first) + b * 64, 0, full);
  }
}

// Rows of x or dy for the pairs of a tile, along the depth: a thread has the same chunk of every 16th row. Of rows that
// are not there nothing is brought, or zeros: what they make is not stored.
template <class T>
struct GatheredRows {
  static constexpr unsigned kMine = kRows / 16;
  unsigned token[kMine];
  unsigned rows;

  __device__ __forceinline__ void find(const ExpertsArgs& args, const ExpertsTile& tile,
                                       const unsigned* order) {
    rows = static_cast<unsigned>(tile.count);
    order += tile.first;
#pragma unroll
    for (unsigned i = 0; i < kMine; ++i) {
      const unsigned row = i * 16 + loader_thread() / 8;
      token[i] = row < rows ? __ldg(order + row) / static_cast<unsigned>(args.chosen) : 0;
    }
  }
  __device__ __forceinline__ void bring(unsigned to, const T* from, unsigned width,
                                        int depth) const {
    const unsigned chunk = loader_thread() % 8, first = loader_thread() / 8;
    from += depth + static_cast<int>(chunk) * 8;
    to += cuda::tile_place(first, chunk);  // 16 rows on, the same
    here(width);
#pragma unroll
    for (unsigned i = 0; i < kMine; ++i) {
      if (i * 16 >= rows) break;
      cuda::bring_chunk(to + i * 16 * cuda::kTileRow, from + std::uint64_t{token[i]} * width,
                        i * 16 + first < rows);
    }
  }
};

// ---- the tiles of a list, each `across` times ----

struct Walk {
  const ExpertsTile* list;
  unsigned most, across, at;
  ExpertsTile tile;

  __device__ __forceinline__ Walk(const ExpertsTiles& tiles, int columns)
      : list(tiles.list), most(tiles.most), across(static_cast<unsigned>(columns)), at(blockIdx.x) {
    look();
  }
  __device__ __forceinline__ void look() {
    const unsigned row = at / across;
    tile.expert = -1;
    if (row < most) {
      const int4 bits = __ldg(reinterpret_cast<const int4*>(list + row));
      tile = {bits.x, static_cast<unsigned>(bits.y), bits.z, 0};
    }
  }
  __device__ __forceinline__ void next() {
    at += gridDim.x;
    look();
  }
  __device__ __forceinline__ Note note() const {
    return {tile.expert, tile.first, tile.count, col()};
  }
  __device__ __forceinline__ int col() const { return static_cast<int>(at % across); }
  __device__ __forceinline__ bool more() const { return tile.expert >= 0; }
};

constexpr int kBlocks = cuda::kMultiprocessors;

}  // namespace mlxtape::ops::hopper
