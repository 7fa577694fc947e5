// What attention's kernels for compute capability 9.0 have in common (attention_hopper.cu, attention_hopper_back.cu).
//
// Rows of up to 256 channels come in tiles of 64: a block of 8192 bytes for each 64 channels. As the factor of scores a
// tile lies along the depth, as the factor of weights it lies turned, without being moved. One group of four warps brings
// tiles into a ring, two make products; these take turns, so that one has its products under way while the other makes
// weights of its scores.
#pragma once

#include "attention_hopper.h"
#include "attention_places.cuh"
#include "attention_rows.cuh"
#include "backends/cuda/device/launch.cuh"
#include "backends/cuda/device/wgmma.cuh"

namespace mlxtape::ops::hopper {

constexpr int kWidth = 256;
constexpr int kTile = 64;      // rows
constexpr int kQueries = 128;  // of a block, a tile of each group of makers
constexpr int kThreads = 3 * cuda::kGroup;
constexpr int kMakerWarps = 8;
constexpr int kLoaderRegisters = 40, kMakerRegisters = 232;
constexpr unsigned kBlockBytes = kTile * cuda::kTileRow;
constexpr unsigned kTileBytes = kWidth / 64 * kBlockBytes;

extern __shared__ unsigned char shared_bytes[];

// Begins where 1024 divides the address.
template <class Room>
__device__ __forceinline__ Room& room_of() {
  const unsigned at = cuda::shared_address(shared_bytes);
  return *reinterpret_cast<Room*>(shared_bytes + (1024 - at % 1024) % 1024);
}
template <class Room>
constexpr int kRoomBytes = static_cast<int>(sizeof(Room)) + 1024;

template <int kSlots>
struct Tiles {
  using At = cuda::Cursor<kSlots>;
  alignas(1024) unsigned char slot[kSlots][kTileBytes];
  std::uint64_t full[kSlots], empty[kSlots];
  std::uint64_t kept;  // what stays for the whole block

  // By all threads.
  __device__ __forceinline__ void prepare() {
    if (threadIdx.x == 0) {
      for (int i = 0; i < kSlots; ++i) {
        cuda::barrier_init(&full[i], cuda::kGroup);
        cuda::barrier_init(&empty[i], kMakerWarps);
      }
      cuda::barrier_init(&kept, cuda::kGroup);
      cuda::barrier_init_done();
    }
    __syncthreads();
  }
  __device__ __forceinline__ unsigned address(const At& at) const {
    return cuda::shared_address(slot[at.slot]);
  }
  __device__ __forceinline__ void wait_empty(const At& at) {
    cuda::barrier_wait(&empty[at.slot], at.phase ^ 1U);
  }
  // The factor that the tile is.
  __device__ __forceinline__ std::uint64_t wait_full(const At& at) {
    cuda::barrier_wait(&full[at.slot], at.phase);
    cuda::see_writes();
    return cuda::factor_at(address(at));
  }
  __device__ __forceinline__ void wait_kept() {
    cuda::barrier_wait(&kept, 0);
    cuda::see_writes();
  }
  __device__ __forceinline__ void release(const At& at) {
    if (threadIdx.x % cuda::kWarp == 0) cuda::barrier_arrive(&empty[at.slot]);
  }
};

// A tile by the loaders, later; zeros where there are no rows or channels. stride: from row to row.
template <class T>
__device__ __forceinline__ void bring_rows(unsigned to, const T* from, std::int64_t stride,
                                           int rows, int channels) {
  const unsigned thread = threadIdx.x % cuda::kGroup, chunk = thread % 32;
  const bool inside = static_cast<int>(chunk) * 8 < channels;
  to += chunk / 8 * kBlockBytes;
#pragma unroll 4
  for (unsigned i = 0; i < kTile / 4; ++i) {
    const unsigned row = thread / 32 + 4 * i;
    const bool there = inside && static_cast<int>(row) < rows;
    cuda::bring_chunk(to + cuda::tile_place(row, chunk % 8),
                      from + (there ? row * stride + chunk * 8 : 0), there);
  }
}

// sums = a · bᵀ over all channels.
template <class T, int kCols>
__device__ __forceinline__ void begin_scores(cuda::GroupTile<kCols>& sums, std::uint64_t a,
                                             std::uint64_t b) {
#pragma unroll
  for (int l = 0; l < kWidth / 16; ++l) {
    const std::uint64_t next = l / 4 * (kBlockBytes >> 4) + l % 4 * cuda::kNextDepth<false>;
    cuda::group_product<T, false, false>(sums, a + next, b + next, l);
  }
}
// sums += weights · b, weights [64, 64] in registers.
template <class T>
__device__ __forceinline__ void begin_sums(cuda::GroupSums& sums, const unsigned (&weights)[4][4],
                                           std::uint64_t b) {
#pragma unroll
  for (int l = 0; l < kTile / 16; ++l) {
    cuda::add_group_product<T, true>(sums, weights[l], b + l * cuda::kNextDepth<true>);
  }
}

// The two groups' turns. The second gives the first one before anything else.
__device__ __forceinline__ int maker_group() { return threadIdx.x / cuda::kGroup; }
__device__ __forceinline__ void my_turn() {
  asm volatile("bar.sync %0, 256;" ::"r"(1 + maker_group()) : "memory");
}
__device__ __forceinline__ void your_turn() {
  asm volatile("bar.arrive %0, 256;" ::"r"(2 - maker_group()) : "memory");
}

}  // namespace mlxtape::ops::hopper
