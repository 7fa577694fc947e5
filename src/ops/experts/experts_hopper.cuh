// What the kernels of experts for compute capability 9.0 have in common (experts_hopper.cu, experts_hopper_back.cu).
//
// A block makes tiles of 128 × 256 one after the other, the same way in every kernel: a group of four warps
// fills a ring of slots in shared memory, each with 64 of the depth of both factors, and goes on to the next tile while
// the other groups multiply, 64 rows each, and store. A group without rows in a tile makes no products. Tiles of an
// expert are made at the same time, so that its weights come from memory once. A factor is brought by the copy engine,
// or by the threads where rows are gathered or may be absent.
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
constexpr unsigned kGroupBytesA =
    64 * cuda::kTileRow;  // 64 rows along the depth, or a turned block of 64
constexpr unsigned kStageBytes =
    16 * 64 * 2;  // 16 rows × 64 columns of a warp on their way to memory

constexpr int kRows = 128, kMakerWarps = 8, kMakerThreads = 2 * cuda::kGroup;
constexpr int kThreads = kMakerThreads + cuda::kGroup;
constexpr int kLoaderRegisters = 40, kMakerRegisters = 232;  // of 504 for three groups
constexpr int kSlots = 4;
constexpr unsigned kBytesA = kRows * cuda::kTileRow;
using Cursor = cuda::Cursor<kSlots>;

struct Room {
  std::uint64_t full[kSlots], empty[kSlots];
  unsigned token[2][kRows];
  alignas(1024) unsigned char slot[kSlots][kBytesA + kBytesB];
  unsigned char stage[kMakerWarps][2 * kStageBytes];
};
constexpr int kRoomBytes =
    sizeof(Room) + 1024;  // so that it can begin where 1024 divides the address

extern __shared__ unsigned char shared_bytes[];

__device__ __forceinline__ Room& room() {
  const unsigned at = cuda::shared_address(shared_bytes);
  return *reinterpret_cast<Room*>(shared_bytes + (1024 - at % 1024) % 1024);
}

// arrivals: what the loaders' threads arrive with at a slot that is full.
__device__ __forceinline__ void prepare(Room& r, unsigned arrivals) {
  if (threadIdx.x == 0) {
    for (int i = 0; i < kSlots; ++i) {
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

__device__ __forceinline__ void release(Room& r, int slot) {
  if (threadIdx.x % cuda::kWarp == 0) cuda::barrier_arrive(&r.empty[slot]);
}

// sums = this group's 64 rows of a · b over `steps` ≥ 1 slots. kByThreads: threads wrote some of it.
template <class T, bool kTurnedA, bool kTurnedB, bool kByThreads>
__device__ __forceinline__ void multiply(Room& r, Cursor& at, int steps, cuda::GroupSums& sums) {
  int before = 0;
  for (int s = 0; s < steps; ++s) {
    cuda::barrier_wait(&r.full[at.slot], at.phase);
    if constexpr (kByThreads) cuda::see_writes();
    const unsigned from = cuda::shared_address(r.slot[at.slot]);
    const std::uint64_t a =
        cuda::factor_at(from + static_cast<unsigned>(maker_group()) * kGroupBytesA);
    const std::uint64_t b = cuda::factor_at(from + kBytesA);
    cuda::products_begin();
#pragma unroll
    for (int k = 0; k < kDepth / 16; ++k) {
      cuda::group_product<T, kTurnedA, kTurnedB>(sums, a + k * cuda::kNextDepth<kTurnedA>,
                                                 b + k * cuda::kNextDepth<kTurnedB>, s | k);
    }
    cuda::products_commit();
    cuda::products_wait<1>();
    if (s > 0) release(r, before);
    before = at.slot;
    at.next();
  }
  cuda::products_wait<0>();
  sums.settle();
  release(r, before);
}

// The same slots, for a group without rows.
__device__ __forceinline__ void pass_by(Room& r, Cursor& at, int steps) {
  for (int s = 0; s < steps; ++s) {
    cuda::barrier_wait(&r.full[at.slot], at.phase);
    release(r, at.slot);
    at.next();
  }
}

// The four words of columns [16·i, 16·i + 16) of this thread's sums, as store_matrices takes them: value(j) of the sums
// v[j], v[j + 1].
template <class Word>
__device__ __forceinline__ void words_of(int i, unsigned (&w)[4], const Word& word) {
#pragma unroll
  for (int m = 0; m < 4; ++m) w[m] = word((2 * i + m / 2) * 4 + m % 2 * 2);
}

// What a lane has of 16 rows × 64 columns in whole chunks: four, of the rows 4·i + lane / 8, the chunk lane % 8.
__device__ __forceinline__ int chunk_row(int i) { return i * 4 + threadIdx.x % cuda::kWarp / 8; }
__device__ __forceinline__ int chunk_col() { return threadIdx.x % 8 * 8; }

// Keeps the compiler from working out what follows from it ahead of time, in registers that are not there.
template <class T>
__device__ __forceinline__ void here(T*& pointer) {
  asm volatile("" : "+l"(pointer));
}
__device__ __forceinline__ void here(unsigned& number) { asm volatile("" : "+r"(number)); }

// A warp's staged rows to memory: rows, cols: how many there are.
template <class T>
__device__ __forceinline__ void store_stage(unsigned stage, T* to, std::int64_t pitch, int rows,
                                            int cols) {
  to += chunk_row(0) * pitch + chunk_col();
  here(to);
  __syncwarp();
#pragma unroll
  for (int i = 0; i < 4; ++i, to += 4 * pitch) {
    const int row = chunk_row(i);
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "r"(stage + cuda::tile_place(static_cast<unsigned>(row), threadIdx.x % 8)));
    if (row < rows && chunk_col() < cols) {
      asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(v.x), "r"(v.y),
                   "r"(v.z), "r"(v.w)
                   : "memory");
    }
  }
  __syncwarp();
}

// This warp's 16 rows of the sums, rounded: to is the tile's first element for this warp.
template <class T>
__device__ __forceinline__ void store_sums(unsigned stage, const cuda::GroupSums& sums, T* to,
                                           std::int64_t pitch, int rows, int cols) {
#pragma unroll
  for (int part = 0; part < kCols / 64; ++part) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      unsigned w[4];
      words_of(part * 4 + i, w, [&](int j) { return cuda::two_of<T>(sums.v[j], sums.v[j + 1]); });
      cuda::store_matrices(stage, i, w);
    }
    store_stage(stage, to + part * 64, pitch, rows, cols - part * 64);
  }
}

// ---- loaders: the last group ----

__device__ __forceinline__ bool is_loader() { return threadIdx.x >= kMakerThreads; }
__device__ __forceinline__ unsigned loader_thread() { return threadIdx.x % cuda::kGroup; }

__device__ __forceinline__ void wait_empty(Room& r, const Cursor& at) {
  cuda::barrier_wait(&r.empty[at.slot], at.phase ^ 1U);
}

// Rows of x or dy for the pairs of a tile, along the depth: a thread has the same chunk of every 16th row.
template <class T>
struct GatheredRows {
  static constexpr unsigned kNobody = 0xffffffffU;
  unsigned* token;  // of the tile's rows, in shared memory

  // turn: of two tiles after each other one has 0, the other 1.
  __device__ __forceinline__ void find(Room& r, unsigned turn, const ExpertsArgs& args,
                                       const ExpertsTile& tile, const unsigned* order) {
    token = r.token[turn];
    for (unsigned row = loader_thread(); row < kRows; row += cuda::kGroup) {
      token[row] = static_cast<int>(row) < tile.count
                       ? order[tile.first + row] / static_cast<unsigned>(args.chosen)
                       : kNobody;
    }
    asm volatile("bar.sync 1, 128;" ::: "memory");  // loaders alone
  }
  __device__ __forceinline__ void bring(unsigned to, const T* from, unsigned width,
                                        int depth) const {
    const unsigned chunk = loader_thread() % 8, first = loader_thread() / 8;
    from += depth + static_cast<int>(chunk) * 8;
    to += cuda::tile_place(first, chunk);  // 16 rows on, the same
#pragma unroll
    for (unsigned i = 0; i < kRows / 16; ++i) {
      const unsigned which = token[i * 16 + first];
      const bool there = which != kNobody;
      const T* row = from + std::uint64_t{there ? which : 0U} * width;
      cuda::bring_chunk(to + i * 16 * cuda::kTileRow, row, there);
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
  __device__ __forceinline__ int col() const { return static_cast<int>(at % across); }
  __device__ __forceinline__ bool more() const { return tile.expert >= 0; }
};

constexpr int kBlocks = cuda::kMultiprocessors;

}  // namespace mlxtape::ops::hopper
