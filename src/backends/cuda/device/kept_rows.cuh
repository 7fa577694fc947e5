// Rows of whole packs that are read once and kept in registers: by a part of a warp, a warp, a block, or a
// cluster of blocks that tell each other what they found; and the sum of a row's exponentials.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>

#include "backends/cuda/device/cluster.cuh"
#include "backends/cuda/device/launch.cuh"
#include "backends/cuda/device/rows.cuh"
#include "backends/cuda/device/vectors.cuh"

namespace mlxtape::cuda {

// ---- sums of exponentials ----

// −inf − −inf would be NaN where the row has something else in it.
__device__ __forceinline__ float finite_reference(float m) { return m == -INFINITY ? 0 : m; }

// The largest number of a row and Σ exp(x − that).
struct Total {
  float top, sum;
};
template <int kParts>
__device__ __forceinline__ Total total_of(const float2* parts) {
  float top = parts[0].x;
#pragma unroll
  for (int i = 1; i < kParts; ++i) top = max_nan(top, parts[i].x);
  const float reference = finite_reference(top);
  float sum = 0;
#pragma unroll
  for (int i = 0; i < kParts; ++i) sum += parts[i].y * expf(parts[i].x - reference);
  return {top, sum};
}
// The same over the warps of a block; mine is the warp's. room: a pair a warp.
template <int kWarps>
__device__ __forceinline__ Total total_over_warps(Total mine, float2* room) {
  const int lane = threadIdx.x % kWarp;
  if (lane == 0) room[threadIdx.x / kWarp] = {mine.top, mine.sum};
  __syncthreads();
  const float2 part = lane < kWarps ? room[lane] : make_float2(-INFINITY, 0);
  const float top = lanes_max(part.x);
  return {top, lanes_sum(part.y * expf(part.x - finite_reference(top)))};
}

// exp(x) for sums that are at least 1: in 16 bits the hardware's function, tiny results are 0.
template <class T>
__device__ __forceinline__ float exp_for_sum(float x) {
  constexpr float kLog2e = 1.4426950408889634F;
  if constexpr (sizeof(T) == 4) return expf(x);
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x * kLog2e));
  return y;
}
// The sum over the warps of a block; mine is the warp's. room: a number a warp.
template <int kWarps>
__device__ __forceinline__ float sum_over_warps(float mine, float* room) {
  const int lane = threadIdx.x % kWarp;
  if (lane == 0) room[threadIdx.x / kWarp] = mine;
  __syncthreads();
  return lanes_sum(lane < kWarps ? room[lane] : 0);
}

// Blocks of a cluster that share a row: each tells the others kNumbers, once, as Meeting does a pair.
template <int kBlocks, int kNumbers>
struct Gathering {
  float told[kNumbers][kBlocks];
  std::uint64_t heard;

  // By all threads of the block, early.
  __device__ void open() {
    if constexpr (kBlocks > 1) {
      if (threadIdx.x == 0) {
        barrier_init(&heard, 1);
        barrier_init_done();
        barrier_arrive_expect(&heard, sizeof told);
      }
      asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
    }
  }
  // By all threads of the block; the same mine in each.
  __device__ void tell(const float (&mine)[kNumbers]) {
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");  // the others have opened
    if (threadIdx.x < kBlocks) {
#pragma unroll
      for (int i = 0; i < kNumbers; ++i) {
        send(&told[i][cluster_rank()], mine[i], &heard, threadIdx.x);
      }
    }
    barrier_wait<true>(&heard, 0);
  }
  __device__ Total total(int top, int sum) const {
    float m = told[top][0];
#pragma unroll
    for (int i = 1; i < kBlocks; ++i) m = max_nan(m, told[top][i]);
    float all = 0;
#pragma unroll
    for (int i = 0; i < kBlocks; ++i) {
      all += told[sum][i] * expf(told[top][i] - finite_reference(m));
    }
    return {m, all};
  }
  __device__ float sum(int number) const {
    float all = 0;
#pragma unroll
    for (int i = 0; i < kBlocks; ++i) all += told[number][i];
    return all;
  }
};

// ---- shares of a row ----

// As load_pack, of memory that this thread may write later.
template <class T>
__device__ __forceinline__ Pack<T> load_own_pack(const T* p) {
  Pack<T> pack;
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(pack.word[0]), "=r"(pack.word[1]), "=r"(pack.word[2]), "=r"(pack.word[3])
               : "l"(p)
               : "memory");
  return pack;
}

// kThreads_ threads of each of kCluster_ blocks share a row, up to kPacks_ packs each.
template <class T_, int kThreads_, int kPacks_, int kCluster_ = 1>
struct Form {
  using T = T_;
  static constexpr int kThreads = kThreads_, kPacks = kPacks_, kCluster = kCluster_;
  static constexpr std::int64_t kMost = std::int64_t{kThreads} * kPacks * kCluster;  // packs
  static constexpr bool kOneWarp = kThreads <= kWarp;
  static constexpr int kWarps = kOneWarp ? 1 : kThreads / kWarp;
  static constexpr int kLanes = kOneWarp ? kThreads : kWarp;
  // Threads of a block; at 16384 × 512 the other size costs 3 and 5 %.
  static constexpr int kBlock = kOneWarp ? (sizeof(T) == 4 ? 64 : 128) : kThreads;
  static constexpr int kBlocks = kThreads == 512 ? 2 : 1;  // on a multiprocessor, at least

  static std::int64_t blocks(std::int64_t rows) {
    return blocks_for(rows, kBlock / kThreads) * kCluster;
  }
};

// What a thread has of its row.
template <class F>
struct Share {
  using T = typename F::T;
  std::int64_t row;
  std::int64_t first;  // element of the row's memory; the next pack is kThreads packs further
  int packs;           // from there to the end of the block's part

  __device__ Share(std::int64_t rows, std::int64_t cols) {
    constexpr int kRows = F::kBlock / F::kThreads;
    const int rank = threadIdx.x % F::kThreads;
    row = kRows == 1 ? blockIdx.x / F::kCluster
                     : std::int64_t{blockIdx.x} * kRows + threadIdx.x / F::kThreads;
    const int whole = static_cast<int>(cols / kPack<T>);
    const int each = (whole + F::kCluster - 1) / F::kCluster;
    const int start = static_cast<int>(blockIdx.x % F::kCluster) * each;
    packs = row < rows ? min(each, whole - start) - rank : 0;
    first = row * cols + std::int64_t{start + rank} * kPack<T>;
  }
  __device__ bool has(int j) const { return j * F::kThreads < packs; }
  __device__ std::int64_t at(int j) const { return first + j * F::kThreads * kPack<T>; }
};

// ---- launch ----

// Calls body(form) with the first of the forms that holds so many packs; false where none does.
template <class... Forms, class Body>
bool with_form(std::int64_t packs, const Body& body) {
  return ((packs <= Forms::kMost && (body(Forms()), true)) || ...);
}

// For kernels that keep one array of rows that are mostly long.
template <class T, class Body>
bool with_row_form(std::int64_t packs, const Body& body) {
  constexpr int kWide = sizeof(T) == 4 ? 1024 : 512;  // 16 bits: two blocks on a multiprocessor
  return with_form<Form<T, 8, 2>, Form<T, 32, 4>, Form<T, 128, 4>, Form<T, 512, 4>, Form<T, 512, 8>,
                   Form<T, kWide, 8>, Form<T, kWide, 8, 2>, Form<T, kWide, 10, 4>,
                   Form<T, 1024, 8, 8>>(packs, body);
}

// Calls body(first row, rows) for all of them, as many at a time as a grid has blocks.
template <class Body>
void in_grids(std::int64_t rows, std::int64_t blocks_each, const Body& body) {
  const std::int64_t most =
      std::max<std::int64_t>(1, std::numeric_limits<std::int32_t>::max() / blocks_each);
  for (std::int64_t first = 0; first < rows; first += most) {
    body(first, std::min(most, rows - first));
  }
}

}  // namespace mlxtape::cuda
