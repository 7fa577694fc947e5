// CUDA kernels of experts for 16-bit types on any device (formula: mlxtape/ops/experts.h; calls: experts_half.h).
//
// A block makes one tile of 128 × 128: four warps, 64 × 64 each, which reads a byte of shared memory for every 32
// operations. Both factors come in slots of 32 of the depth, copied by all threads two slots ahead; a slot's rows lie
// along the depth, or across it where memory has them so, and then are turned as they are read. 16-byte chunks change
// places within their row so that the eight rows of a matrix are in different banks. Three slots are the 48 KiB that
// every block may have: two blocks run on a multiprocessor, one multiplying while the other stores.
#include "experts_half.h"

#include "backends/cuda/device/exp.cuh"
#include "backends/cuda/device/launch.cuh"
#include "backends/cuda/device/mma16.cuh"
#include "backends/cuda/device/vectors.cuh"
#include "experts_back.cuh"

namespace mlxtape::ops::half_types {

namespace {

constexpr int kSide = 128, kDepth = 32, kSlots = 3;
constexpr int kThreads = 128, kBlocks = 2;  // of a multiprocessor
constexpr unsigned kFactorBytes = kSide * kDepth * 2, kSlotBytes = 2 * kFactorBytes;
constexpr unsigned kRoomBytes = kSlots * kSlotBytes;
constexpr unsigned kStageBytes = 64 * 64 * 2;  // of a warp, its results on their way to memory
static_assert(kThreads / cuda::kWarp * kStageBytes <= kRoomBytes);

// Rows of 64 bytes along the depth, and of 256 bytes across it.
constexpr unsigned kLine = kDepth * 2, kTurnedLine = kSide * 2;
__device__ __forceinline__ unsigned line_place(unsigned row, unsigned chunk) {
  return row * kLine + ((chunk ^ row / 2 % 4) << 4U);
}
__device__ __forceinline__ unsigned turned_place(unsigned row, unsigned chunk) {
  return row * kTurnedLine + ((chunk ^ row % 8) << 4U);
}
// Rows of 128 bytes of what a warp stores.
__device__ __forceinline__ unsigned stage_place(unsigned row, unsigned chunk) {
  return row * 128 + ((chunk ^ row % 8) << 4U);
}

__device__ __forceinline__ unsigned lane() { return threadIdx.x % cuda::kWarp; }
__device__ __forceinline__ unsigned warp() { return threadIdx.x / cuda::kWarp; }
__device__ __forceinline__ int warp_row() { return static_cast<int>(warp() / 2) * 64; }
__device__ __forceinline__ int warp_col() { return static_cast<int>(warp() % 2) * 64; }

// 16 bytes to shared memory, later; zeros where !there. The neighbours will be asked for next.
__device__ __forceinline__ void copy_chunk(unsigned to, const void* from, bool there) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
               "r"(there ? 16 : 0)
               : "memory");
}

// ---- factors on their way to a slot ----

// Rows along the depth. A thread has one chunk of every 32nd row.
template <class T>
struct Lines {
  const T* row[4];
  unsigned there = 0;

  __device__ static unsigned chunk() { return threadIdx.x % 4; }
  // row_of(i): where row i begins, null: zeros.
  template <class RowOf>
  __device__ __forceinline__ Lines(const T* any, const RowOf& row_of) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const T* from = row_of(static_cast<int>(threadIdx.x / 4) + i * 32);
      row[i] = (from == nullptr ? any : from) + chunk() * 8;
      if (from != nullptr) there |= 1U << i;
    }
  }
  // [at, at + kDepth) of the rows; zeros where `left` are over.
  __device__ __forceinline__ void bring(unsigned to, int at, int left) const {
    to += line_place(threadIdx.x / 4, chunk());
    const bool in = static_cast<int>(chunk()) * 8 < left;
#pragma unroll
    for (unsigned i = 0; i < 4; ++i) {
      copy_chunk(to + i * 32 * kLine, row[i] + at, in && (there >> i & 1U) != 0);
    }
  }
};

// Rows across the depth, 128 columns of them. A thread has one chunk of every 8th row.
struct Turned {
  __device__ static unsigned chunk() { return threadIdx.x % 16; }
  __device__ static unsigned first() { return threadIdx.x / 16; }

  // row_of(i): where the columns of row i of the slot begin. Zeros in rows from `rows` on, and behind `cols` columns.
  template <class RowOf>
  __device__ static __forceinline__ void bring(unsigned to, int rows, int cols,
                                               const RowOf& row_of) {
    to += turned_place(first(), chunk());
    const bool in = static_cast<int>(chunk()) * 8 < cols;
#pragma unroll
    for (unsigned i = 0; i < kDepth / 8; ++i) {
      const unsigned row = first() + i * 8;
      copy_chunk(to + i * 8 * kTurnedLine, row_of(i, row) + chunk() * 8,
                 in && static_cast<int>(row) < rows);
    }
  }
};

// ---- products ----

// A warp's 64 × 64 sums. v[m][n]: 16 rows from 16·m, 8 columns from 8·n, as the tensor cores have them.
template <class T, bool kTurnedA, bool kTurnedB>
struct Product {
  float v[4][8][4] = {};
  unsigned a[2][4][4], b[2][4][4];

  // The parts of both factors that this warp multiplies, 16 of the depth from 16·k on.
  __device__ __forceinline__ void load(int into, unsigned slot, int k) {
    const unsigned l = lane(), depth = static_cast<unsigned>(k);
    if constexpr (kTurnedA) {
      const unsigned at = slot + turned_place(l % 8 + l / 16 * 8, l / 8 % 2) +
                          static_cast<unsigned>(warp_row()) * 2 + depth * 16 * kTurnedLine;
#pragma unroll
      for (unsigned m = 0; m < 4; ++m) cuda::load_turned_at(a[into][m], at ^ (m << 5U));
    } else {
      const unsigned at =
          (slot + line_place(static_cast<unsigned>(warp_row()) + l % 16, l / 16)) ^ (depth << 5U);
#pragma unroll
      for (unsigned m = 0; m < 4; ++m) cuda::load_matrices_at(a[into][m], at + m * 16 * kLine);
    }
    slot += kFactorBytes;
    if constexpr (kTurnedB) {
      const unsigned at = slot + turned_place(l % 16, l / 16) +
                          static_cast<unsigned>(warp_col()) * 2 + depth * 16 * kTurnedLine;
#pragma unroll
      for (unsigned n = 0; n < 4; ++n) cuda::load_turned_at(b[into][n], at ^ (n << 5U));
    } else {
      const unsigned at =
          (slot + line_place(static_cast<unsigned>(warp_col()) + l % 8 + l / 16 * 8, l / 8 % 2)) ^
          (depth << 5U);
#pragma unroll
      for (unsigned n = 0; n < 4; ++n) cuda::load_matrices_at(b[into][n], at + n * 16 * kLine);
    }
  }
  __device__ __forceinline__ void multiply(int from) {
#pragma unroll
    for (int m = 0; m < 4; ++m) {
#pragma unroll
      for (int n = 0; n < 8; ++n) {
        cuda::multiply_add16<T>(v[m][n], a[from][m], b[from][n / 2][n % 2 * 2],
                                b[from][n / 2][n % 2 * 2 + 1]);
      }
    }
  }

  // bring(s, slot) asks for the copies of step s; it is called for every s in turn. busy: this warp has rows.
  // What is read for the next step is read before the last products of this one.
  template <class Bring>
  __device__ __forceinline__ void run(unsigned room, int steps, bool busy, const Bring& bring) {
#pragma unroll
    for (int s = 0; s < kSlots - 1; ++s) {
      if (s < steps) bring(s, room + static_cast<unsigned>(s) * kSlotBytes);
      cuda::commit_copies();
    }
    cuda::wait_copies<kSlots - 2>();
    __syncthreads();
    unsigned slot = room, later = room + (kSlots - 1) * kSlotBytes;
    const auto next = [&](unsigned at) {
      return at == room + (kSlots - 1) * kSlotBytes ? room : at + kSlotBytes;
    };
    if (busy) load(0, slot, 0);
    for (int s = 0; s < steps; ++s) {
      if (s + kSlots - 1 < steps) bring(s + kSlots - 1, later);
      cuda::commit_copies();
      if (busy) {
        load(1, slot, 1);
        multiply(0);
      }
      cuda::wait_copies<kSlots - 2>();
      __syncthreads();  // step s + 1 is there, and nobody needs the slot of step s
      later = slot;
      slot = next(slot);
      if (busy) {
        load(0, slot, 0);
        multiply(1);
      }
    }
    __syncthreads();  // the slots are free for other use
  }

  // This warp's sums, rounded, to its stage.
  __device__ __forceinline__ void stage_rounded(unsigned stage) const {
    const unsigned row = lane() / 4;
#pragma unroll
    for (int m = 0; m < 4; ++m) {
#pragma unroll
      for (int n = 0; n < 8; ++n) {
        const unsigned at = stage + stage_place(row, static_cast<unsigned>(n)) + lane() % 4 * 4 +
                            static_cast<unsigned>(m) * 16 * 128;
        const unsigned w[2] = {cuda::two_of<T>(v[m][n][0], v[m][n][1]),
                               cuda::two_of<T>(v[m][n][2], v[m][n][3])};
        asm volatile("st.shared.u32 [%0], %1;" ::"r"(at), "r"(w[0]) : "memory");
        asm volatile("st.shared.u32 [%0], %1;" ::"r"(at + 8 * 128), "r"(w[1]) : "memory");
      }
    }
    __syncwarp();
  }
  // To memory: `to` is where this warp's begin, of which there are rows and cols.
  __device__ __forceinline__ void store(unsigned room, T* to, std::int64_t pitch, int rows,
                                        int cols) const {
    if (rows <= 0 || cols <= 0) return;
    const unsigned stage = room + warp() * kStageBytes;
    stage_rounded(stage);
    const int first = static_cast<int>(lane() / 8), col = static_cast<int>(lane() % 8) * 8;
    to += first * pitch + col;
#pragma unroll
    for (int i = 0; i < 16; ++i, to += 4 * pitch) {
      const uint4 chunk =
          staged(stage + stage_place(static_cast<unsigned>(i * 4 + first), lane() % 8));
      if (i * 4 + first < rows && col < cols) *reinterpret_cast<uint4*>(to) = chunk;
    }
  }
  __device__ static __forceinline__ uint4 staged(unsigned at) {
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "r"(at)
                 : "memory");
    return v;
  }
};

__device__ __forceinline__ unsigned room_of_block() {
  __shared__ __align__(128) unsigned char room[kRoomBytes];
  return cuda::shared_address(room);
}

// The tile of a list and the columns that a block has.
struct Place {
  ExpertsTile tile;
  int col;

  __device__ __forceinline__ Place(const ExpertsTiles& tiles, int across)
      : tile(tiles.list[blockIdx.x / static_cast<unsigned>(across)]),
        col(static_cast<int>(blockIdx.x % static_cast<unsigned>(across))) {}
};

__device__ __host__ constexpr int parts_of(int all, int each) { return (all + each - 1) / each; }

// The row of x or dy that belongs to each pair of a tile.
template <class T>
__device__ __forceinline__ Lines<T> gathered(const ExpertsArgs& args, const ExpertsTile& tile,
                                             const T* from, const unsigned* order) {
  return Lines<T>(from, [&](int i) -> const T* {
    if (i >= tile.count) return nullptr;
    const unsigned token =
        order[tile.first + static_cast<unsigned>(i)] / static_cast<unsigned>(args.chosen);
    return from + std::int64_t{token} * args.width;
  });
}
// The row that each pair of a tile has itself.
template <class T>
__device__ __forceinline__ Lines<T> of_pairs(const ExpertsTile& tile, const T* from,
                                             std::int64_t pitch) {
  return Lines<T>(from, [&](int i) {
    return i < tile.count ? from + (std::int64_t{tile.first} + i) * pitch : nullptr;
  });
}

// ---- forward ----

// g and u of 128 pairs and 64 channels: a warp has 32 columns of gate and 32 of up, for the same channels.
template <class T>
__global__ void __launch_bounds__(kThreads, kBlocks)
    hidden_kernel(ExpertsArgs args, ExpertsTiles tiles, const T* x, const unsigned* order,
                  const T* gate, const T* up, T* hidden, T* active) {
  cuda::wait_turn();
  const unsigned room = room_of_block();
  const int inner = static_cast<int>(args.inner), width = static_cast<int>(args.width);
  const Place at(tiles, parts_of(inner, kSide / 2));
  if (at.tile.expert < 0) return;
  const int first_col = at.col * (kSide / 2);
  const std::int64_t first_weight = (std::int64_t{at.tile.expert} * inner + first_col) * width;
  const Lines<T> rows = gathered(args, at.tile, x, order);
  const Lines<T> weights(gate, [&](int i) -> const T* {
    const int channel = i / 64 * 32 + i % 32;
    if (first_col + channel >= inner) return nullptr;
    return (i % 64 < 32 ? gate : up) + first_weight + std::int64_t{channel} * width;
  });
  Product<T, false, false> product;
  product.run(room, parts_of(width, kDepth), warp_row() < at.tile.count, [&](int s, unsigned slot) {
    rows.bring(slot, s * kDepth, width - s * kDepth);
    weights.bring(slot + kFactorBytes, s * kDepth, width - s * kDepth);
  });
  const int count = at.tile.count - warp_row();
  if (count <= 0) return;
  const unsigned stage = room + warp() * kStageBytes;
  product.stage_rounded(stage);
  const int row = static_cast<int>(lane() / 4);
  const int col = first_col + warp_col() / 2 + static_cast<int>(lane() % 4) * 8;
  const std::int64_t place = std::int64_t{at.tile.first} + warp_row() + row;
  T* g_to = hidden + place * 2 * inner + col;
  T* a_to = active + place * inner + col;
#pragma unroll 4
  for (int i = 0; i < 8; ++i, g_to += 16 * inner, a_to += 8 * inner) {
    const auto r = static_cast<unsigned>(i * 8 + row);
    const uint4 g = product.staged(stage + stage_place(r, lane() % 4));
    const uint4 u = product.staged(stage + stage_place(r, 4 + lane() % 4));
    const unsigned gs[4] = {g.x, g.y, g.z, g.w}, us[4] = {u.x, u.y, u.z, u.w};
    unsigned made[4];
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      const float2 z = cuda::both_of<T>(gs[w]), v = cuda::both_of<T>(us[w]);
      made[w] = cuda::two_of<T>(z.x * cuda::sigmoid<T>(z.x).value * v.x,
                                z.y * cuda::sigmoid<T>(z.y).value * v.y);
    }
    if (i * 8 + row < count && col < inner) {
      *reinterpret_cast<uint4*>(g_to) = g;
      *reinterpret_cast<uint4*>(g_to + inner) = u;
      *reinterpret_cast<uint4*>(a_to) = make_uint4(made[0], made[1], made[2], made[3]);
    }
  }
}

template <class T>
__global__ void __launch_bounds__(kThreads, kBlocks)
    out_kernel(ExpertsArgs args, ExpertsTiles tiles, const T* active, const T* down, T* out) {
  cuda::wait_turn();
  const unsigned room = room_of_block();
  const int inner = static_cast<int>(args.inner), width = static_cast<int>(args.width);
  const Place at(tiles, parts_of(width, kSide));
  if (at.tile.expert < 0) return;
  const int first_col = at.col * kSide;
  const T* w = down + (std::int64_t{at.tile.expert} * width + first_col) * inner;
  const Lines<T> rows = of_pairs(at.tile, active, inner);
  const Lines<T> weights(
      down, [&](int i) { return first_col + i < width ? w + std::int64_t{i} * inner : nullptr; });
  Product<T, false, false> product;
  product.run(room, parts_of(inner, kDepth), warp_row() < at.tile.count, [&](int s, unsigned slot) {
    rows.bring(slot, s * kDepth, inner - s * kDepth);
    weights.bring(slot + kFactorBytes, s * kDepth, inner - s * kDepth);
  });
  const int col = first_col + warp_col();
  product.store(room, out + (std::int64_t{at.tile.first} + warp_row()) * width + col, width,
                at.tile.count - warp_row(), width - col);
}

// A thread has 8 channels of a token.
constexpr int kCombineThreads = 256;

template <class T, int kAtOnce>
__global__ void __launch_bounds__(kCombineThreads)
    combine_kernel(ExpertsArgs args, const T* from, const unsigned* places, const unsigned* offsets,
                   const T* scores, T* to) {
  cuda::wait_turn();
  const unsigned packs = static_cast<unsigned>(args.width / 8);
  const std::int64_t i = std::int64_t{blockIdx.x} * kCombineThreads + threadIdx.x;
  const std::int64_t t = i / packs;
  if (t >= args.tokens) return;
  const unsigned h = static_cast<unsigned>(i - t * packs) * 8;
  const unsigned end = offsets[args.experts];
  const int chosen = static_cast<int>(args.chosen);
  float sum[8] = {};
  for (int j = 0; j < chosen; j += kAtOnce) {
    cuda::Pack<T> some[kAtOnce];
    float weight[kAtOnce];
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      weight[k] = 0;
      some[k] = {};
      if (j + k >= chosen) continue;
      const std::int64_t pair = t * chosen + j + k;
      const unsigned place = places[pair];
      if (place >= end) continue;
      weight[k] = scores == nullptr ? 1 : cuda::widen(scores[pair]);
      some[k] = cuda::load_pack(from + std::int64_t{place} * args.width + h);
    }
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      float v[8];
      cuda::unpack(some[k], v);
#pragma unroll
      for (int c = 0; c < 8; ++c) sum[c] = fmaf(weight[k], v[c], sum[c]);
    }
  }
  cuda::store_pack(cuda::pack_of<T>(sum), to + t * args.width + h);
}

// ---- backward ----

// 32 rows × 64 columns of a warp's sums as they are, rows of 256 bytes: 8 columns of row r at the place of the 8 with
// r % 8 exclusive-or'ed.
__device__ __forceinline__ unsigned sums_place(unsigned row, unsigned eight) {
  return row * 256 + ((eight ^ row % 8) << 5U);
}
__device__ __forceinline__ void stage_sums(unsigned stage, const float (&v)[8][4], unsigned row) {
  row += lane() / 4;
#pragma unroll
  for (unsigned n = 0; n < 8; ++n) {
    const unsigned at = stage + sums_place(row, n) + lane() % 4 * 8;
    asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(at), "f"(v[n][0]), "f"(v[n][1])
                 : "memory");
    asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(at + 8 * 256), "f"(v[n][2]), "f"(v[n][3])
                 : "memory");
  }
}
__device__ __forceinline__ void staged_sums(unsigned at, float (&v)[8]) {
#pragma unroll
  for (int i = 0; i < 8; i += 4) {
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(v[i]), "=f"(v[i + 1]), "=f"(v[i + 2]), "=f"(v[i + 3])
                 : "r"(at + static_cast<unsigned>(i) * 4)
                 : "memory");
  }
}

template <class T>
__global__ void __launch_bounds__(kThreads, kBlocks)
    hidden_back_kernel(ExpertsArgs args, ExpertsTiles tiles, const T* dy, const T* hidden,
                       const unsigned* order, const T* scores, const T* down, T* d_hidden,
                       T* active, float* parts) {
  cuda::wait_turn();
  const unsigned room = room_of_block();
  const int inner = static_cast<int>(args.inner), width = static_cast<int>(args.width);
  const Place at(tiles, parts_of(inner, kSide));
  if (at.tile.expert < 0) return;
  const int first_col = at.col * kSide;
  const T* w = down + std::int64_t{at.tile.expert} * width * inner + first_col;
  const Lines<T> lines = gathered(args, at.tile, dy, order);
  Product<T, false, true> product;
  product.run(room, parts_of(width, kDepth), warp_row() < at.tile.count, [&](int s, unsigned slot) {
    lines.bring(slot, s * kDepth, width - s * kDepth);
    const T* from = w + std::int64_t{s} * kDepth * inner;
    Turned::bring(slot + kFactorBytes, width - s * kDepth, inner - first_col,
                  [&](unsigned, unsigned row) { return from + std::int64_t{row} * inner; });
  });
  const int rows = at.tile.count - warp_row();
  if (rows <= 0 || first_col + warp_col() >= inner) return;
  const unsigned stage = room + warp() * kStageBytes;
  const int col = first_col + warp_col() + static_cast<int>(lane() % 8) * 8;
  const bool in = col < inner;
  float* dots = parts + std::int64_t{(first_col + warp_col()) / 64} * args.tokens * args.chosen;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    stage_sums(stage, product.v[half * 2], 0);
    stage_sums(stage, product.v[half * 2 + 1], 16);
    __syncwarp();
#pragma unroll 2
    for (int i = 0; i < 8; ++i) {
      const int row = i * 4 + static_cast<int>(lane() / 8);
      const bool there = half * 32 + row < rows;
      const unsigned place = at.tile.first + static_cast<unsigned>(warp_row() + half * 32 + row);
      float dot = 0;
      if (there && in) {
        const std::int64_t pair = std::int64_t{place} * 2 * inner + col;
        float b[8], g[8], u[8], scaled[8];
        const float score = cuda::widen(scores[order[place]]);
        cuda::unpack(cuda::load_pack(hidden + pair), g);
        cuda::unpack(cuda::load_pack(hidden + pair + inner), u);
        staged_sums(stage + sums_place(static_cast<unsigned>(row), lane() % 8), b);
#pragma unroll
        for (int c = 0; c < 8; ++c) {
          const Back back = Back::of<T>(b[c], g[c], u[c], score);
          g[c] = back.dg;
          u[c] = back.du;
          scaled[c] = back.scaled;
          dot += back.dot;
        }
        cuda::store_pack(cuda::pack_of<T>(g), d_hidden + pair);
        cuda::store_pack(cuda::pack_of<T>(u), d_hidden + pair + inner);
        cuda::store_pack(cuda::pack_of<T>(scaled), active + std::int64_t{place} * inner + col);
      }
      dot = cuda::lanes_sum<8>(dot);
      if (there && lane() % 8 == 0) dots[place] = dot;
    }
    __syncwarp();
  }
}

// d_hidden [pairs, 2I] · [gate; up], whose depth is I of one and I of the other.
template <class T>
__global__ void __launch_bounds__(kThreads, kBlocks)
    x_back_kernel(ExpertsArgs args, ExpertsTiles tiles, const T* d_hidden, const T* gate,
                  const T* up, T* out) {
  cuda::wait_turn();
  const unsigned room = room_of_block();
  const int inner = static_cast<int>(args.inner), width = static_cast<int>(args.width);
  const Place at(tiles, parts_of(width, kSide));
  if (at.tile.expert < 0) return;
  const int first_col = at.col * kSide, steps = parts_of(inner, kDepth);
  const std::int64_t first_weight = std::int64_t{at.tile.expert} * inner * width + first_col;
  const Lines<T> rows = of_pairs(at.tile, d_hidden, 2 * args.inner);
  Product<T, false, true> product;
  product.run(room, 2 * steps, warp_row() < at.tile.count, [&](int s, unsigned slot) {
    const bool second = s >= steps;
    const int depth = (second ? s - steps : s) * kDepth, left = inner - depth;
    rows.bring(slot, depth + (second ? inner : 0), left);
    const T* from = (second ? up : gate) + first_weight + std::int64_t{depth} * width;
    Turned::bring(slot + kFactorBytes, left, width - first_col,
                  [&](unsigned, unsigned row) { return from + std::int64_t{row} * width; });
  });
  const int col = first_col + warp_col();
  product.store(room, out + (std::int64_t{at.tile.first} + warp_row()) * width + col, width,
                at.tile.count - warp_row(), width - col);
}

// An expert's pairs as depth. kDown: ddown [H, I] from dy, gathered, and scores∘a; else dgate and dup [I, H] from
// d_hidden and x, gathered.
template <class T, bool kDown>
__global__ void __launch_bounds__(kThreads, kBlocks)
    weights_kernel(ExpertsArgs args, const T* by_token, const T* by_pair, const unsigned* order,
                   const unsigned* offsets, T* out, T* out_up) {
  cuda::wait_turn();
  const unsigned room = room_of_block();
  const int inner = static_cast<int>(args.inner), width = static_cast<int>(args.width);
  const int rows = kDown ? width : inner, cols = kDown ? inner : width;
  const auto across = static_cast<unsigned>(parts_of(cols, kSide)),
             down = static_cast<unsigned>(parts_of(rows, kSide));
  const unsigned col_part = blockIdx.x % across, row_part = blockIdx.x / across % down;
  unsigned expert = blockIdx.x / across / down;
  bool second = false;  // dup
  if constexpr (!kDown) {
    second = expert % 2 != 0;
    expert /= 2;
  }
  const int row = static_cast<int>(row_part) * kSide, col = static_cast<int>(col_part) * kSide;
  // Pairs past the end belong to nobody, whatever the offsets say.
  const auto pairs = static_cast<unsigned>(args.tokens * args.chosen);
  const unsigned first = min(offsets[expert], pairs);
  const int count = static_cast<int>(max(first, min(offsets[expert + 1], pairs)) - first);
  const int pair_pitch = kDown ? inner : 2 * inner;
  const T* pair_rows =
      by_pair + std::int64_t{first} * pair_pitch + (kDown ? col : row + (second ? inner : 0));
  const T* token_rows = by_token + (kDown ? row : col);
  unsigned token[kDepth / 8];  // of the next step's rows
  const auto find = [&](int s) {
#pragma unroll
    for (unsigned i = 0; i < kDepth / 8; ++i) {
      const int at = s * kDepth + static_cast<int>(Turned::first() + i * 8);
      token[i] = at < count ? order[first + static_cast<unsigned>(at)] : 0;
    }
  };
  find(0);
  Product<T, true, true> product;
  product.run(room, parts_of(count, kDepth), row + warp_row() < rows, [&](int s, unsigned slot) {
    const int left = count - s * kDepth;
    const T* from = pair_rows + std::int64_t{s} * kDepth * pair_pitch;
    Turned::bring(slot + (kDown ? kFactorBytes : 0), left, kDown ? cols - col : rows - row,
                  [&](unsigned, unsigned r) { return from + std::int64_t{r} * pair_pitch; });
    Turned::bring(slot + (kDown ? 0 : kFactorBytes), left, kDown ? rows - row : cols - col,
                  [&](unsigned i, unsigned) {
                    return token_rows +
                           std::int64_t{token[i] / static_cast<unsigned>(args.chosen)} * args.width;
                  });
    find(s + 1);
  });
  T* to = second ? out_up : out;
  product.store(room,
                to + (std::int64_t{expert} * rows + row + warp_row()) * cols + col + warp_col(),
                cols, rows - row - warp_row(), cols - col - warp_col());
}

std::int64_t across(std::int64_t all, std::int64_t each) { return (all + each - 1) / each; }

}  // namespace

bool takes(const ExpertsArgs& args) {
  // Blocks, of pairs by channels and of weights, are counted in 31 bits.
  constexpr std::int64_t kMostWide = std::int64_t{1} << 16, kMostPairs = std::int64_t{1} << 28;
  return args.width % 8 == 0 && args.inner % 8 == 0 && args.width > 0 && args.inner > 0 &&
         args.width <= kMostWide && args.inner <= kMostWide &&
         args.tokens * args.chosen <= kMostPairs;
}

template <class T>
void hidden_forward(const ExpertsArgs& args, ExpertsTiles tiles, const T* x, const unsigned* order,
                    const T* gate, const T* up, T* hidden, T* active, cudaStream_t stream) {
  cuda::launch(hidden_kernel<T>, tiles.most * across(args.inner, kSide / 2), kThreads, 0, 1, stream,
               args, tiles, x, order, gate, up, hidden, active);
}

template <class T>
void out_forward(const ExpertsArgs& args, ExpertsTiles tiles, const T* active, const T* down,
                 T* out, cudaStream_t stream) {
  cuda::launch(out_kernel<T>, tiles.most * across(args.width, kSide), kThreads, 0, 1, stream, args,
               tiles, active, down, out);
}

template <class T>
void combine(const ExpertsArgs& args, const T* from, const unsigned* places,
             const unsigned* offsets, const T* scores, T* to, cudaStream_t stream) {
  cuda::launch(combine_kernel<T, 5>, across(args.tokens * (args.width / 8), kCombineThreads),
               kCombineThreads, 0, 1, stream, args, from, places, offsets, scores, to);
}

template <class T>
void hidden_backward(const ExpertsArgs& args, ExpertsTiles tiles, const T* dy, const T* hidden,
                     const unsigned* order, const T* scores, const T* down, T* d_hidden, T* active,
                     float* parts, cudaStream_t stream) {
  cuda::launch(hidden_back_kernel<T>, tiles.most * across(args.inner, kSide), kThreads, 0, 1,
               stream, args, tiles, dy, hidden, order, scores, down, d_hidden, active, parts);
}

template <class T>
void x_backward(const ExpertsArgs& args, ExpertsTiles tiles, const T* d_hidden, const T* gate,
                const T* up, T* out, cudaStream_t stream) {
  cuda::launch(x_back_kernel<T>, tiles.most * across(args.width, kSide), kThreads, 0, 1, stream,
               args, tiles, d_hidden, gate, up, out);
}

template <class T>
void weights_backward(const ExpertsArgs& args, const T* x, const T* dy, const T* d_hidden,
                      const T* active, const unsigned* order, const unsigned* offsets, T* dgate,
                      T* dup, T* ddown, cudaStream_t stream) {
  const std::int64_t tiles = args.experts * across(args.width, kSide) * across(args.inner, kSide);
  cuda::launch(weights_kernel<T, false>, 2 * tiles, kThreads, 0, 1, stream, args, x, d_hidden,
               order, offsets, dgate, dup);
  cuda::launch(weights_kernel<T, true>, tiles, kThreads, 0, 1, stream, args, dy, active, order,
               offsets, ddown, static_cast<T*>(nullptr));
}

#define MT_HALF(T)                                                                                \
  template void hidden_forward<T>(const ExpertsArgs&, ExpertsTiles, const T*, const unsigned*,    \
                                  const T*, const T*, T*, T*, cudaStream_t);                      \
  template void out_forward<T>(const ExpertsArgs&, ExpertsTiles, const T*, const T*, T*,          \
                               cudaStream_t);                                                     \
  template void combine<T>(const ExpertsArgs&, const T*, const unsigned*, const unsigned*,        \
                           const T*, T*, cudaStream_t);                                           \
  template void hidden_backward<T>(const ExpertsArgs&, ExpertsTiles, const T*, const T*,          \
                                   const unsigned*, const T*, const T*, T*, T*, float*,           \
                                   cudaStream_t);                                                 \
  template void x_backward<T>(const ExpertsArgs&, ExpertsTiles, const T*, const T*, const T*, T*, \
                              cudaStream_t);                                                      \
  template void weights_backward<T>(const ExpertsArgs&, const T*, const T*, const T*, const T*,   \
                                    const unsigned*, const unsigned*, T*, T*, T*, cudaStream_t);
MT_HALF(F16)
MT_HALF(BF16)
#undef MT_HALF

}  // namespace mlxtape::ops::half_types
