// CUDA kernels of sort (mlxtape/ops/sort.h).
//
// Rows of up to kMostSorted columns: a block each, sorted in registers and shared memory. Longer ones: radix
// passes of 8 bits over memory, from the lowest digit up. In each pass a block counts the digits of a tile, then
// one block a row turns the counts into places, then a block puts its tile in the order of the digit in
// shared memory and writes it in runs. The first pass makes the entries, the last writes the result.
#include <algorithm>
#include <string>

#include "backends/cuda/device/launch.cuh"
#include "backends/cuda/device/rows.cuh"
#include "backends/cuda/device/vectors.cuh"
#include "mlxtape/base/dtype.h"
#include "mlxtape/core/registry.h"
#include "sort_args.h"
#include "sort_block.cuh"
#include "sort_keys.h"
#include "sort_rows.cuh"

namespace mlxtape::ops {

namespace {

using cuda::kWarp;

// ---- long rows ----

constexpr int kThreads = 256;
constexpr int kItems = 16;
constexpr int kWarps = kThreads / kWarp;
constexpr int kTile = kThreads * kItems;
constexpr int kDigits = 256;
constexpr int kScanThreads = 4 * kDigits;
constexpr std::int64_t kMostScratch = std::int64_t{256} << 20;  // bytes, but for one row

struct LongRows {
  std::int64_t first, cols, tiles;  // the first row of this launch
  int shift;                        // of the digit in an entry
  bool down;
};

__device__ __forceinline__ int digit_of(Entry e, int shift) {
  return static_cast<int>(e >> shift) & (kDigits - 1);
}

// Where the entries of a pass come from: x, or the pass before. Behind the row's end: the last entry, which
// has the last digit and so stays behind all others.
template <class T>
struct FromX {
  const T* x;
  __device__ Entry get(const LongRows& rows, std::int64_t row, std::int64_t i) const {
    return i < rows.cols ? entry_of(x[(rows.first + row) * rows.cols + i], i, rows.down)
                         : kLastEntry;
  }
};
struct FromEntries {
  const Entry* entries;
  __device__ Entry get(const LongRows& rows, std::int64_t row, std::int64_t i) const {
    return i < rows.cols ? entries[row * rows.cols + i] : kLastEntry;
  }
};
template <class T>
struct ToResult {
  Result<T> result;
  __device__ void put(const LongRows& rows, std::int64_t row, std::int64_t at, Entry e) const {
    result.put(rows.first + row, at, e);
  }
};
struct ToEntries {
  Entry* entries;
  __device__ void put(const LongRows& rows, std::int64_t row, std::int64_t at, Entry e) const {
    entries[row * rows.cols + at] = e;
  }
};

// counts [rows, tiles, digits]
template <class From>
__global__ void __launch_bounds__(kThreads)
    count_tiles(LongRows rows, From from, unsigned* counts) {
  cuda::wait_turn();
  __shared__ unsigned own[kDigits];
  const int t = static_cast<int>(threadIdx.x);
  const std::int64_t row = blockIdx.x / rows.tiles, tile = blockIdx.x % rows.tiles;
  own[t] = 0;
  __syncthreads();
#pragma unroll
  for (int r = 0; r < kItems; ++r) {
    const std::int64_t i = tile * kTile + r * kThreads + t;
    // Where keys are alike all lanes would wait for one counter: one of them adds for its equals.
    const int d = i < rows.cols ? digit_of(from.get(rows, row, i), rows.shift) : kDigits;
    const unsigned equals = __match_any_sync(cuda::kAll, d);
    if (d < kDigits && t % kWarp == __ffs(static_cast<int>(equals)) - 1) {
      atomicAdd(&own[d], static_cast<unsigned>(__popc(equals)));
    }
  }
  __syncthreads();
  counts[std::int64_t{blockIdx.x} * kDigits + t] = own[t];
}

// The sum of v over the threads before this one; every thread of kCount takes part. room: a word for each warp.
template <int kCount>
__device__ __forceinline__ unsigned sum_before(unsigned v, unsigned* room) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp,
            warp = static_cast<int>(threadIdx.x) / kWarp;
  unsigned sum = v;
#pragma unroll
  for (int step = 1; step < kWarp; step *= 2) {
    const unsigned left = __shfl_up_sync(cuda::kAll, sum, step);
    if (lane >= step) sum += left;
  }
  if (lane == kWarp - 1) room[warp] = sum;
  __syncthreads();
  unsigned before = sum - v;
#pragma unroll
  for (int w = 0; w < kCount / kWarp; ++w) before += w < warp ? room[w] : 0;
  return before;
}

// A row's counts become the places of each tile's digits: after all smaller digits, and the same of the tiles
// before. A quarter of the block has a quarter of the tiles.
__global__ void __launch_bounds__(kScanThreads) place_tiles(LongRows rows, unsigned* counts) {
  cuda::wait_turn();
  __shared__ unsigned parts[4][kDigits];
  __shared__ unsigned room[kScanThreads / kWarp];
  const int d = static_cast<int>(threadIdx.x) % kDigits;
  const int part = static_cast<int>(threadIdx.x) / kDigits;
  unsigned* own = counts + std::int64_t{blockIdx.x} * rows.tiles * kDigits + d;
  const std::int64_t begin = rows.tiles * part / 4, end = rows.tiles * (part + 1) / 4;
  unsigned sum = 0;
#pragma unroll 8
  for (std::int64_t i = begin; i < end; ++i) sum += own[i * kDigits];
  parts[part][d] = sum;
  __syncthreads();
  // The first quarter brings each digit's total, the others nothing.
  const unsigned total = part == 0 ? parts[0][d] + parts[1][d] + parts[2][d] + parts[3][d] : 0;
  const unsigned before = sum_before<kScanThreads>(total, room);
  __syncthreads();
  if (part == 0) {
    unsigned place = before;
    for (int q = 0; q < 4; ++q) {
      const unsigned count = parts[q][d];
      parts[q][d] = place;
      place += count;
    }
  }
  __syncthreads();
  unsigned place = parts[part][d];
#pragma unroll 8
  for (std::int64_t i = begin; i < end; ++i) {
    const unsigned count = own[i * kDigits];
    own[i * kDigits] = place;
    place += count;
  }
}

template <class From, class To>
__global__ void __launch_bounds__(kThreads)
    move_tiles(LongRows rows, From from, const unsigned* places, To to) {
  cuda::wait_turn();
  __shared__ Entry sorted[kTile];
  __shared__ unsigned counts[kWarps][kDigits];
  __shared__ unsigned moved[kDigits];  // from a place in the tile to one in the row
  __shared__ unsigned room[kWarps];
  const int t = static_cast<int>(threadIdx.x), lane = t % kWarp, warp = t / kWarp;
  const std::int64_t row = blockIdx.x / rows.tiles, tile = blockIdx.x % rows.tiles;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) counts[w][t] = 0;
  __syncthreads();

  // A warp has kItems · 32 neighbours, and counts how many with the same digit came before each.
  Entry e[kItems];
  unsigned rank[kItems];
#pragma unroll
  for (int r = 0; r < kItems; ++r) {
    e[r] = from.get(rows, row, tile * kTile + warp * kItems * kWarp + r * kWarp + lane);
  }
#pragma unroll
  for (int r = 0; r < kItems; ++r) {
    const int d = digit_of(e[r], rows.shift);
    const unsigned equals = __match_any_sync(cuda::kAll, d);
    const unsigned before = counts[warp][d];
    const unsigned lower = equals & ((1U << lane) - 1);
    rank[r] = before + static_cast<unsigned>(__popc(lower));
    __syncwarp();
    if (lower == 0) counts[warp][d] = before + static_cast<unsigned>(__popc(equals));
    __syncwarp();
  }
  __syncthreads();
  unsigned total = 0;  // thread t has digit t
#pragma unroll
  for (int w = 0; w < kWarps; ++w) {
    const unsigned count = counts[w][t];
    counts[w][t] = total;
    total += count;
  }
  const unsigned start = sum_before<kThreads>(total, room);
#pragma unroll
  for (int w = 0; w < kWarps; ++w) counts[w][t] += start;
  moved[t] = places[std::int64_t{blockIdx.x} * kDigits + t] - start;
  __syncthreads();
#pragma unroll
  for (int r = 0; r < kItems; ++r) {
    sorted[counts[warp][digit_of(e[r], rows.shift)] + rank[r]] = e[r];
  }
  __syncthreads();
  const std::int64_t left = rows.cols - tile * kTile;
  const int count = left < kTile ? static_cast<int>(left) : kTile;
  for (int i = t; i < count; i += kThreads) {
    const Entry next = sorted[i];
    // moved may have wrapped around below 0; the sum is right again
    to.put(rows, row, moved[digit_of(next, rows.shift)] + static_cast<unsigned>(i), next);
  }
}

struct LongPlan {
  std::int64_t rows;  // at once
  std::int64_t tiles;
  std::int64_t entries;  // of one buffer
  int buffers;
  std::size_t bytes;
};
template <class T>
LongPlan plan_of(const SortArgs& args) {
  LongPlan plan{};
  plan.tiles = cuda::blocks_for(args.cols, kTile);
  plan.buffers = sizeof(KeyOf<T>) == 2 ? 1 : 2;
  const std::int64_t each = args.cols * plan.buffers * static_cast<std::int64_t>(sizeof(Entry)) +
                            plan.tiles * kDigits * static_cast<std::int64_t>(sizeof(unsigned));
  plan.rows = std::clamp<std::int64_t>(kMostScratch / each, 1, args.rows);
  plan.entries = plan.rows * args.cols;
  plan.bytes = static_cast<std::size_t>(plan.rows * each);
  return plan;
}

template <class From, class To>
void pass(const LongRows& rows, std::int64_t count, const From& from, unsigned* counts,
          const To& to, cudaStream_t stream) {
  const std::int64_t blocks = count * rows.tiles;
  cuda::launch(count_tiles<From>, blocks, kThreads, 0, 1, stream, rows, from, counts);
  cuda::launch(place_tiles, count, kScanThreads, 0, 1, stream, rows, counts);
  cuda::launch(move_tiles<From, To>, blocks, kThreads, 0, 1, stream, rows, from,
               static_cast<const unsigned*>(counts), to);
}

template <class T>
void sort_long(const SortArgs& args, const Result<T>& result, void* workspace,
               cudaStream_t stream) {
  const LongPlan plan = plan_of<T>(args);
  auto* a = static_cast<Entry*>(workspace);
  Entry* b = a + (plan.buffers == 2 ? plan.entries : 0);
  auto* counts = reinterpret_cast<unsigned*>(b + plan.entries);
  for (std::int64_t first = 0; first < args.rows; first += plan.rows) {
    const std::int64_t count = std::min(plan.rows, args.rows - first);
    LongRows rows{first, args.cols, plan.tiles, 32, args.down != 0};
    pass(rows, count, FromX<T>{result.x}, counts, ToEntries{a}, stream);
    if (plan.buffers == 2) {
      rows.shift = 40;
      pass(rows, count, FromEntries{a}, counts, ToEntries{b}, stream);
      rows.shift = 48;
      pass(rows, count, FromEntries{b}, counts, ToEntries{a}, stream);
    }
    rows.shift += 8;
    pass(rows, count, FromEntries{a}, counts, ToResult<T>{result}, stream);
  }
}

template <class T>
std::size_t workspace(const void* args) {
  const auto& a = *static_cast<const SortArgs*>(args);
  return a.cols <= kMostSorted ? 0 : plan_of<T>(a).bytes;
}

template <class T>
void sort_fwd(const KernelCall& call) {
  const auto& args = call.as<SortArgs>();
  const Result<T> result{call.input<T>(0), call.output<T>(0), call.output<unsigned>(1), args.cols,
                         args.keep};
  auto* stream = static_cast<cudaStream_t>(call.queue);
  if (args.cols > kMostSorted) return sort_long(args, result, call.workspace, stream);
  launch_sort_rows(args.rows, args.down != 0, result, stream);
}

template <class T>
void add_kernels(KernelRegistry& registry) {
  registry.add(Backend::kCuda, std::string("sort_fwd_") + name_of(kDType<T>), sort_fwd<T>,
               workspace<T>);
}

}  // namespace

void register_sort_argmax_cuda(KernelRegistry& registry);
void register_sort_select_cuda(KernelRegistry& registry);

void register_sort_cuda(KernelRegistry& registry) {
  register_sort_argmax_cuda(registry);
  register_sort_select_cuda(registry);
  add_kernels<float>(registry);
  add_kernels<F16>(registry);
  add_kernels<BF16>(registry);
  add_kernels<std::int32_t>(registry);
  add_kernels<std::uint32_t>(registry);
}

}  // namespace mlxtape::ops
