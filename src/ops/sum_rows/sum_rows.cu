// CUDA kernels of sum_rows (formula and layout: mlxtape/ops/sum_rows.h).
//
// Sums: the threads of a block are columns, 16 bytes of terms each or one element, and where rows are short several
// chunks of sorted positions. A thread walks through its chunk's terms, four on their way at once, and writes a sum
// when the key changes; sums that reach over an end of the chunk go to scratch memory. A second kernel adds those up:
// a block looks whether a row that goes on begins in its chunk. Bound by reading terms and writing y.
//
// Keys: each block of 1024 sorted positions counts the keys that differ from the one before; a second kernel
// adds up the counts of the blocks before its own, and numbers them.
#include <cuda_runtime.h>

#include <algorithm>
#include <bit>
#include <string>
#include <type_traits>

#include "backends/cuda/device/launch.cuh"
#include "backends/cuda/device/places.cuh"
#include "backends/cuda/device/rows.cuh"
#include "backends/cuda/device/vectors.cuh"
#include "mlxtape/core/registry.h"
#include "sum_rows_args.h"

namespace mlxtape::ops {

namespace {

using cuda::kWarp;
using cuda::narrow;
using cuda::widen;

cudaStream_t stream_of(const KernelCall& call) { return static_cast<cudaStream_t>(call.queue); }

// ---- places and keys ----

constexpr int kThreads = 256;

__global__ void __launch_bounds__(kThreads)
    find_places(SumRowsPlacesArgs a, const void* indices, std::int32_t* places) {
  cuda::wait_turn();
  const std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= a.count) return;
  const std::uint64_t p = cuda::place_of(indices, static_cast<DType>(a.index_type), i, a.rows);
  places[i] =
      p < static_cast<std::uint64_t>(a.rows) ? static_cast<std::int32_t>(p) : kSumRowsNowhere;
}

void sum_rows_places(const KernelCall& call) {
  const auto& a = call.as<SumRowsPlacesArgs>();
  cuda::launch(find_places, cuda::blocks_for(a.count, kThreads), kThreads, 0, 1, stream_of(call), a,
               call.input<void>(0), call.output<std::int32_t>(0));
}

constexpr int kCounted = 1024;  // positions, and threads, of a block

// Is this the first position of its key?
__device__ __forceinline__ bool is_first(std::int32_t key, std::int32_t before, std::int64_t i) {
  return key != kSumRowsNowhere && (i == 0 || key != before);
}

__global__ void __launch_bounds__(kCounted)
    sort_keys(SumRowsKeysArgs a, const std::int32_t* places, const std::uint32_t* order,
              std::int32_t* keys, std::int32_t* counts) {
  cuda::wait_turn();
  const std::int64_t i = std::int64_t{blockIdx.x} * kCounted + threadIdx.x;
  std::int32_t key = kSumRowsNowhere, before = kSumRowsNowhere;
  if (i < a.count) {
    key = places[order[i]];
    if (i > 0) before = places[order[i - 1]];
    keys[i] = key;
  }
  const int count = __syncthreads_count(is_first(key, before, i));
  if (counts != nullptr && threadIdx.x == 0) counts[blockIdx.x] = count;
}

// The sum over the threads of a block, in all of them. room: an int for each warp.
__device__ __forceinline__ int block_sum(int v, int* room) {
  v = __reduce_add_sync(cuda::kAll, v);
  if (threadIdx.x % kWarp == 0) room[threadIdx.x / kWarp] = v;
  __syncthreads();
  return __reduce_add_sync(cuda::kAll, room[threadIdx.x % kWarp]);
}

__global__ void __launch_bounds__(kCounted)
    number_keys(SumRowsKeysArgs a, const std::int32_t* keys, const std::int32_t* counts,
                std::int32_t* slots, std::int32_t* ids) {
  cuda::wait_turn();
  __shared__ int room[3][kCounted / kWarp];
  static_assert(kCounted / kWarp == kWarp);
  const std::int64_t i = std::int64_t{blockIdx.x} * kCounted + threadIdx.x;
  int before = 0, all = 0;
  for (unsigned b = threadIdx.x; b < gridDim.x; b += kCounted) {
    const int count = counts[b];
    all += count;
    if (b < blockIdx.x) before += count;
  }
  before = block_sum(before, room[0]);
  all = block_sum(all, room[1]);
  std::int32_t key = kSumRowsNowhere, last = kSumRowsNowhere;
  if (i < a.count) {
    key = keys[i];
    if (i > 0) last = keys[i - 1];
  }
  const bool first = is_first(key, last, i);
  const unsigned lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const unsigned firsts = __ballot_sync(cuda::kAll, first);
  if (lane == 0) room[2][warp] = __popc(firsts);
  __syncthreads();
  const int above = __reduce_add_sync(cuda::kAll, lane < warp ? room[2][lane] : 0);
  const int slot = before + above + __popc(firsts & (~0U >> (31U - lane))) - 1;
  if (i < a.count) slots[i] = slot;
  if (first) ids[slot] = key;
  if (i >= all && i < a.slots) ids[i] = -1;
}

std::size_t keys_workspace(const void* args) {
  const auto& a = *static_cast<const SumRowsKeysArgs*>(args);
  return static_cast<std::size_t>(cuda::blocks_for(a.count, kCounted)) * sizeof(std::int32_t);
}

void sum_rows_keys(const KernelCall& call) {
  const auto& a = call.as<SumRowsKeysArgs>();
  const std::int64_t blocks = cuda::blocks_for(a.count, kCounted);
  auto* counts = a.slots == 0 ? nullptr : static_cast<std::int32_t*>(call.workspace);
  auto* keys = call.output<std::int32_t>(0);
  cuda::launch(sort_keys, blocks, kCounted, 0, 1, stream_of(call), a, call.input<std::int32_t>(0),
               call.input<std::uint32_t>(1), keys, counts);
  if (a.slots == 0) return;
  cuda::launch(number_keys, blocks, kCounted, 0, 1, stream_of(call), a,
               static_cast<const std::int32_t*>(keys), static_cast<const std::int32_t*>(counts),
               call.output<std::int32_t>(1), call.output<std::int32_t>(2));
}

// ---- sums ----

constexpr int kAdders = 128;  // threads of a block
constexpr int kChunk = static_cast<int>(kSumRowsChunk);
constexpr int kAhead = 4;              // terms on their way
constexpr int kRoom = 2 * kChunk + 2;  // numbers of a chunk in shared memory

// kEach elements that are next to each other, as floats.
template <class T, int kEach>
__device__ __forceinline__ void load_some(const T* p, float (&v)[kEach]) {
  if constexpr (kEach == 1) {
    v[0] = widen(*p);
  } else {
    cuda::unpack(cuda::load_pack(p), v);
  }
}
template <int kEach, class Out>
__device__ __forceinline__ void store_some(const float (&v)[kEach], Out* p) {
  if constexpr (kEach == 1) {
    *p = narrow<Out>(v[0]);
  } else if constexpr (kEach == cuda::kPack<Out>) {
    cuda::store_pack(cuda::pack_of<Out>(v), p);
  } else {  // 8 sums of 16-bit terms as f32
    static_assert(kEach == 8 && sizeof(Out) == 4);
    *reinterpret_cast<float4*>(p) = make_float4(v[0], v[1], v[2], v[3]);
    *reinterpret_cast<float4*>(p + 4) = make_float4(v[4], v[5], v[6], v[7]);
  }
}
// y += v for elements that no other thread has.
template <int kEach, class Out>
__device__ __forceinline__ void add_some(float (&v)[kEach], Out* p) {
  float has[kEach];
  if constexpr (kEach == 1) {
    has[0] = widen(*p);
  } else {
    cuda::unpack(*reinterpret_cast<const cuda::Pack<Out>*>(p), has);
  }
#pragma unroll
  for (int k = 0; k < kEach; ++k) v[k] = has[k] + v[k];
  store_some(v, p);
}

template <class T>
struct Sums {
  SumRowsArgs a;
  std::int64_t chunks;
  int lanes,
      tiles;  // columns of a block, a power of two, in units of what a thread has; blocks to a row
  const T* terms;
  const std::int32_t* keys;
  const std::uint32_t* order;
  const std::int32_t* slots;
  const std::int32_t* ids;
  float*
      partials;  // [outer, chunks, 2, width]: of a row that came from the chunk before, of one that goes on
};

template <class T, class Out, int kEach>
__global__ void __launch_bounds__(kAdders) sum_chunks(__grid_constant__ const Sums<T> s, Out* y) {
  cuda::wait_turn();
  // For each of the block's chunks its keys with those before and behind, and where its terms are.
  extern __shared__ std::int32_t memory[];
  const SumRowsArgs& a = s.a;
  const int lane = threadIdx.x & (s.lanes - 1), own = threadIdx.x / s.lanes;
  const int together = kAdders / s.lanes;
  const std::int64_t group = blockIdx.x / s.tiles, tile = blockIdx.x % s.tiles;
  const std::int64_t number = group * together + own;  // of the chunk, over all outer positions
  const std::int64_t o = number / s.chunks, chunk = number - o * s.chunks;
  const bool exists = o < a.outer;
  const std::int64_t first = chunk * kChunk;
  const int count = exists ? static_cast<int>(min(a.count - first, std::int64_t{kChunk})) : 0;
  std::int32_t* keys = memory + own * kRoom;
  auto* rows = reinterpret_cast<std::uint32_t*>(keys + kChunk + 2);
  for (int k = lane; k < count + 2; k += s.lanes) {
    const std::int64_t at = first + k - 1;
    keys[k] = at >= 0 && at < a.count ? s.keys[at] : -1;
    if (k < count) rows[k] = s.order[first + k];
  }
  __syncthreads();
  const std::int64_t c = (tile * s.lanes + lane) * kEach;
  if (!exists || c >= a.width) return;
  const T* terms = s.terms + o * a.count * a.width + c;
  float sum[kEach] = {};
  int start = 0;
  for (int i = 0; i < count && keys[i + 1] != kSumRowsNowhere; i += kAhead) {
    float v[kAhead][kEach];
#pragma unroll
    for (int k = 0; k < kAhead; ++k) {
      if (i + k < count && keys[i + k + 1] != kSumRowsNowhere) {
        load_some(terms + rows[i + k] * a.width, v[k]);
      }
    }
#pragma unroll
    for (int k = 0; k < kAhead; ++k) {
      const int at = i + k;
      if (at >= count || keys[at + 1] == kSumRowsNowhere) break;
#pragma unroll
      for (int e = 0; e < kEach; ++e) sum[e] = at == start ? v[k][e] : sum[e] + v[k][e];
      const std::int32_t key = keys[at + 1];
      const bool ends_here = keys[at + 2] != key;
      if (!ends_here && at + 1 < count) continue;
      const bool begins = start > 0 || keys[0] != key;
      if (begins && ends_here) {
        const std::int64_t row = a.by_slot != 0 ? s.slots[first + at] : key;
        Out* to = y + (o * a.rows + row) * a.width + c;
        if constexpr (std::is_same_v<T, Out>) {
          a.adds != 0 ? add_some(sum, to) : store_some(sum, to);
        } else {
          store_some(sum, to);
        }
      } else {
        float* to = s.partials + ((o * s.chunks + chunk) * 2 + (begins ? 1 : 0)) * a.width + c;
#pragma unroll
        for (int e = 0; e < kEach; ++e) to[e] = sum[e];
      }
      start = at + 1;
    }
  }
  if (a.by_slot == 0) return;
  const float zero[kEach] = {};
  for (std::int64_t u = first; u < min(a.rows, first + kChunk); ++u) {
    if (s.ids[u] < 0) store_some(zero, y + u * a.width + c);
  }
}

constexpr int kCrossing = 4;  // columns of a thread

// A block has kCrossing · kAdders columns of the row that begins in one chunk and goes on, if there is one.
template <class T, class Out>
__global__ void __launch_bounds__(kAdders)
    sum_crossing(__grid_constant__ const Sums<T> s, std::int64_t tiles, Out* y) {
  cuda::wait_turn();
  const SumRowsArgs& a = s.a;
  const std::int64_t number = blockIdx.x / tiles, tile = blockIdx.x % tiles;
  const std::int64_t o = number / s.chunks, chunk = number - o * s.chunks;
  const std::int64_t first = chunk * kChunk, end = first + kChunk;
  if (end >= a.count) return;
  const std::int32_t key = s.keys[end - 1];
  if (key == kSumRowsNowhere || s.keys[end] != key) return;
  if (s.keys[first] == key && first > 0 && s.keys[first - 1] == key) return;
  // Keys are sorted: the chunks that begin with this one follow each other. 32 are looked at together.
  std::int64_t more = 0;
  for (bool on = true; on;) {
    const std::int64_t at = end + (more + threadIdx.x % kWarp) * kChunk;
    const bool same = at < a.count && s.keys[at] == key;
    const int together = __popc(__ballot_sync(cuda::kAll, same));
    more += together;
    on = together == kWarp;
  }
  const float* parts = s.partials + (o * s.chunks + chunk) * 2 * a.width;
  const std::int64_t row = a.by_slot != 0 ? s.slots[end - 1] : key;
#pragma unroll
  for (int k = 0; k < kCrossing; ++k) {
    const std::int64_t c = (tile * kCrossing + k) * kAdders + threadIdx.x;
    if (c >= a.width) return;
    float sum = parts[a.width + c];
    const float* next = parts + 2 * a.width + c;
#pragma unroll 8
    for (std::int64_t m = 0; m < more; ++m) sum += next[2 * m * a.width];
    Out* to = y + (o * a.rows + row) * a.width + c;
    *to = narrow<Out>(a.adds != 0 ? widen(*to) + sum : sum);
  }
}

std::size_t sum_rows_workspace(const void* args) {
  const auto& a = *static_cast<const SumRowsArgs*>(args);
  return static_cast<std::size_t>(a.outer * cuda::blocks_for(a.count, kSumRowsChunk) * 2 *
                                  a.width) *
         sizeof(float);
}

template <class T, class Out, int kEach>
void launch_sums(const KernelCall& call, Sums<T> s) {
  Out* y = call.output<Out>(0);
  const std::int64_t columns = cuda::blocks_for(s.a.width, kEach);
  s.lanes = static_cast<int>(
      std::bit_ceil(static_cast<std::uint64_t>(std::min<std::int64_t>(columns, kAdders))));
  s.tiles = static_cast<int>(cuda::blocks_for(columns, s.lanes));
  const std::int64_t groups = cuda::blocks_for(s.a.outer * s.chunks, kAdders / s.lanes);
  const int shared = kAdders / s.lanes * kRoom * static_cast<int>(sizeof(std::int32_t));
  cuda::launch(sum_chunks<T, Out, kEach>, groups * s.tiles, kAdders, shared, 1, stream_of(call), s,
               y);
  if (s.chunks == 1) return;
  const std::int64_t tiles = cuda::blocks_for(s.a.width, kCrossing * kAdders);
  cuda::launch(sum_crossing<T, Out>, s.a.outer * s.chunks * tiles, kAdders, 0, 1, stream_of(call),
               s, tiles, y);
}

template <class T, class Out>
void launch_sums(const KernelCall& call) {
  const auto& a = call.as<SumRowsArgs>();
  const Sums<T> s{a,
                  cuda::blocks_for(a.count, kSumRowsChunk),
                  0,
                  0,
                  call.input<T>(0),
                  call.input<std::int32_t>(1),
                  call.input<std::uint32_t>(2),
                  call.input<std::int32_t>(3),
                  call.input<std::int32_t>(4),
                  static_cast<float*>(call.workspace)};
  constexpr int kPack = cuda::kPack<T>;
  const bool packs =
      a.width % kPack == 0 && cuda::is_aligned(call.in[0]) && cuda::is_aligned(call.out[0]);
  packs ? launch_sums<T, Out, kPack>(call, s) : launch_sums<T, Out, 1>(call, s);
}

template <class T>
void sum_rows_fwd(const KernelCall& call) {
  if constexpr (sizeof(T) != 4) {
    if (call.as<SumRowsArgs>().f32_sums != 0) return launch_sums<T, float>(call);
  }
  launch_sums<T, T>(call);
}

// ---- rows onto a dense tensor ----

template <class T, class R>
__global__ void __launch_bounds__(kThreads)
    add_rows_kernel(SumRowsAddArgs a, std::int64_t tiles, const std::int32_t* ids, const R* rows,
                    T* dense) {
  cuda::wait_turn();
  const std::int64_t u = blockIdx.x / tiles;
  const std::int64_t id = ids[u];
  if (id < 0 || id >= a.rows) return;
  constexpr int kEach = 4;
  const std::int64_t first = blockIdx.x % tiles * (kEach * kThreads) + threadIdx.x;
  float v[kEach];
#pragma unroll
  for (int k = 0; k < kEach; ++k) {
    const std::int64_t c = first + k * kThreads;
    if (c < a.width) v[k] = widen(dense[id * a.width + c]) + widen(rows[u * a.width + c]);
  }
#pragma unroll
  for (int k = 0; k < kEach; ++k) {
    const std::int64_t c = first + k * kThreads;
    if (c < a.width) dense[id * a.width + c] = narrow<T>(v[k]);
  }
}

template <class T>
void sum_rows_add(const KernelCall& call) {
  const auto& a = call.as<SumRowsAddArgs>();
  const std::int64_t tiles = cuda::blocks_for(a.width, 4 * kThreads);
  const auto run = [&]<class R>(R) {
    cuda::launch(add_rows_kernel<T, R>, a.count * tiles, kThreads, 0, 1, stream_of(call), a, tiles,
                 call.input<std::int32_t>(0), call.input<R>(1), call.output<T>(0));
  };
  switch (static_cast<DType>(a.from)) {
    case DType::kF16: return run(F16());
    case DType::kBF16: return run(BF16());
    default: return run(float());
  }
}

template <class T>
void add_kernels(KernelRegistry& registry) {
  const std::string type = name_of(kDType<T>);
  registry.add(Backend::kCuda, "sum_rows_fwd_" + type, sum_rows_fwd<T>, sum_rows_workspace);
  registry.add(Backend::kCuda, "sum_rows_add_" + type, sum_rows_add<T>);
}

}  // namespace

void register_sum_rows_cuda(KernelRegistry& registry) {
  registry.add(Backend::kCuda, "sum_rows_places_i32", sum_rows_places);
  registry.add(Backend::kCuda, "sum_rows_keys_i32", sum_rows_keys, keys_workspace);
  add_kernels<float>(registry);
  add_kernels<F16>(registry);
  add_kernels<BF16>(registry);
}

}  // namespace mlxtape::ops
