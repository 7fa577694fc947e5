// What attention's kernels for compute capability 9.0 have in common (attention_hopper.cu, attention_hopper_back.cu).
//
// Rows are filled up to 128 or 256 channels and come in tiles: for each 64 channels a block of all rows. As the factor of scores a tile lies
// along the depth, as the factor of weights it lies turned, without being moved. One warp has the copy engine bring tiles
// into a ring: where threads copied them, with a fence before the products, dq took 1.2 times as long. Two groups of four
// warps make products; one has its products under way while the other makes weights of its scores.
#pragma once

#include <algorithm>
#include <type_traits>

#include "attention_hopper.h"
#include "attention_places.cuh"
#include "attention_rows.cuh"
#include "backends/cuda/device/launch.cuh"
#include "backends/cuda/device/tensor_map.cuh"
#include "backends/cuda/device/wgmma.cuh"

namespace mlxtape::ops::hopper {

constexpr int kTile = 64;      // rows of most tiles
constexpr int kQueries = 128;  // of a block, a tile of each group of makers
constexpr int kThreads = 3 * cuda::kGroup;
constexpr int kMakerWarps = 8;
constexpr int kLoaderRegisters = 40, kMakerRegisters = 232;  // of 504 for three groups
template <int kRows>
constexpr unsigned kBlockBytes = kRows * cuda::kTileRow;
template <int kWidth, int kRows>
constexpr unsigned kTileBytes = kWidth / 64 * kBlockBytes<kRows>;

extern __shared__ unsigned char shared_bytes[];

// Begins where 1024 divides the address.
template <class Room>
__device__ __forceinline__ Room& room_of() {
  const unsigned at = cuda::shared_address(shared_bytes);
  return *reinterpret_cast<Room*>(shared_bytes + (1024 - at % 1024) % 1024);
}
template <class Room>
constexpr int kRoomBytes = static_cast<int>(sizeof(Room)) + 1024;

// When the tiles of a ring are full and empty.
template <int kSlots>
struct Signals {
  using At = cuda::Cursor<kSlots>;
  std::uint64_t full[kSlots], empty[kSlots];

  // By one thread, before a barrier of the block. releases: arrivals that make a slot empty.
  __device__ __forceinline__ void init(unsigned releases = kMakerWarps) {
    for (int i = 0; i < kSlots; ++i) {
      cuda::barrier_init(&full[i], cuda::kWarp);
      cuda::barrier_init(&empty[i], releases);
    }
  }
  __device__ __forceinline__ void wait_empty(const At& at) {
    cuda::barrier_wait(&empty[at.slot], at.phase ^ 1U);
  }
  // by_threads: they, not the copy engine, may have brought the tile.
  __device__ __forceinline__ void wait_full(const At& at, bool by_threads) {
    cuda::barrier_wait(&full[at.slot], at.phase);
    if (by_threads) cuda::see_writes();
  }
  // By a warp whose products have read the slot, or by each thread that has.
  __device__ __forceinline__ void release(const At& at) {
    if (threadIdx.x % cuda::kWarp == 0) cuda::barrier_arrive(&empty[at.slot]);
  }
  __device__ __forceinline__ void release_by_each(const At& at) {
    cuda::barrier_arrive(&empty[at.slot]);
  }
};

// ---- the loaders' warp; the others of its group have nothing to do ----

__device__ __forceinline__ bool is_loader() { return threadIdx.x < 2 * cuda::kGroup + cuda::kWarp; }

// A tensor [batch, tokens, heads, channels] as the copy engine finds it, and as threads do.
template <class T>
struct Rows {
  const CUtensorMap& map;
  const T* from;
  const std::int64_t (&stride)[3];
  std::int64_t channels;
};

// A tile of a head's rows from `token` of the batch entry on, later, and then arrive_with_rows. By the copy engine, with
// whatever rows follow in the tensor, or by threads, with zeros but for the first `there` rows: another sequence's rows
// may be anything, and a weight of 0 times infinity would be a number of this one's.
template <int kWidth, int kRows, class T>
__device__ __forceinline__ void bring_rows(unsigned to, const Rows<T>& rows, std::int64_t batch,
                                           std::int64_t token, unsigned head, int there,
                                           bool by_threads, std::uint64_t* barrier) {
  const unsigned lane = threadIdx.x % cuda::kWarp;
  if (by_threads) {
    if (lane * 8 >= kWidth) return;
    const T* from = rows.from + batch * rows.stride[0] + token * rows.stride[1] +
                    head * rows.stride[2] + lane * 8;
    const bool inside = static_cast<int>(lane) * 8 < rows.channels;
    to += lane / 8 * kBlockBytes<kRows>;
#pragma unroll 1
    for (unsigned row = 0; row < kRows; ++row, from += rows.stride[1]) {
      const bool counts = inside && static_cast<int>(row) < there;
      cuda::bring_chunk(to + cuda::tile_place(row, lane % 8), counts ? from : rows.from, counts);
    }
  } else if (lane == 0) {
    cuda::barrier_expect(barrier, kTileBytes<kWidth, kRows>);
#pragma unroll
    for (int c = 0; c < kWidth / 64; ++c) {
      cuda::bring_tile(to + c * kBlockBytes<kRows>, rows.map, c * 64, static_cast<int>(token),
                       static_cast<int>(head), static_cast<int>(batch), barrier);
    }
  }
}
__device__ __forceinline__ void arrive_with_rows(std::uint64_t* barrier, bool by_threads) {
  if (by_threads) {
    cuda::arrive_with_chunks(barrier);
  } else {
    cuda::barrier_arrive(barrier);
  }
}

// ---- makers ----

// sums = a · bᵀ over all channels.
template <class T, int kWidth, int kCols>
__device__ __forceinline__ void begin_scores(cuda::GroupTile<kCols>& sums, std::uint64_t a,
                                             std::uint64_t b) {
#pragma unroll
  for (int l = 0; l < kWidth / 16; ++l) {
    const std::uint64_t next = l % 4 * cuda::kNextDepth<false>;
    cuda::group_product<T, false, false>(sums, a + l / 4 * (kBlockBytes<kTile> >> 4) + next,
                                         b + l / 4 * (kBlockBytes<kCols> >> 4) + next, l);
  }
}
// sums += weights · b, weights [64, 16 · kSteps] in registers.
template <class T, int kWidth, int kSteps>
__device__ __forceinline__ void begin_sums(cuda::GroupTile<kWidth>& sums,
                                           const unsigned (&weights)[kSteps][4], std::uint64_t b) {
#pragma unroll
  for (int l = 0; l < kSteps; ++l) {
    cuda::group_product<T, true>(sums, weights[l], b + l * cuda::kNextDepth<true>, 1);
  }
}

__device__ __forceinline__ int maker_group() { return threadIdx.x / cuda::kGroup; }

// ---- host ----

// Tiles of `rows` rows of a tensor [batch, tokens, heads, channels] with these strides of batch entries, tokens, heads.
template <class T>
CUtensorMap rows_map(const T* from, std::int64_t batch, std::int64_t tokens, std::int64_t heads,
                     std::int64_t channels, const std::int64_t (&stride)[3], int rows) {
  // Where there is one alone its stride may be anything.
  const auto step = [](std::int64_t count, std::int64_t numbers) {
    return count == 1 ? cuuint64_t{16} : static_cast<cuuint64_t>(numbers) * sizeof(T);
  };
  const cuuint64_t size[4] = {static_cast<cuuint64_t>(channels), static_cast<cuuint64_t>(tokens),
                              static_cast<cuuint64_t>(heads), static_cast<cuuint64_t>(batch)};
  const cuuint64_t steps[3] = {step(tokens, stride[1]), step(heads, stride[2]),
                               step(batch, stride[0])};
  return cuda::tiles_of(from, size, steps, rows);
}
// fn with the width that both kinds of rows fit into.
template <class Fn>
void with_width(const AttentionArgs& args, const Fn& fn) {
  if (std::max(args.dim, args.value_dim) <= 128) return fn(std::integral_constant<int, 128>());
  fn(std::integral_constant<int, 256>());
}
// Of the queries in tiles of 64, of keys and values in tiles of `keys`.
template <class T>
struct Maps {
  CUtensorMap q, k, v;
  Maps(const AttentionArgs& args, const AttentionInputs<T>& in, int keys)
      : q(rows_map(in.q, args.batch, args.queries, args.heads, args.dim, args.q, kTile)),
        k(rows_map(in.k, args.batch, args.keys, args.key_heads, args.dim, args.k, keys)),
        v(rows_map(in.v, args.batch, args.keys, args.key_heads, args.value_dim, args.v, keys)) {}
};

}  // namespace mlxtape::ops::hopper
