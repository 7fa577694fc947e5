// CUDA kernels of softmax (formula and layout: mlxtape/ops/softmax.h).
//
// Rows of whole 16-byte packs are read once. Up to 16 KiB they are kept in registers, up to 4 KiB by
// a warp or a part of one, then by a block. Longer ones are kept in shared memory, by a cluster of
// blocks where one has not enough of it: a producer thread streams row after row into a ring of slots;
// the others sum what has come, tell each other, go over it again to write the result and free the
// slots, so that the next row is on its way before this one is done. Ragged rows, and those that eight
// blocks cannot hold, are walked twice by one block. Rows that are not contiguous: a warp's lanes are
// neighbouring rows, so its accesses are whole lines, and the warps of a block share the columns.
// Bound by memory, the forward of long rows by its exponentials.
#include <cuda_runtime.h>

#include <algorithm>

#include "backends/cuda/device/exp.cuh"
#include "backends/cuda/device/launch.cuh"
#include "backends/cuda/device/rows.cuh"
#include "mlxtape/core/registry.h"
#include "softmax_args.h"

namespace mlxtape::ops {

namespace {

using cuda::exp_for;
using cuda::kPack;
using cuda::kWarp;
using cuda::narrow;
using cuda::Pack;
using cuda::RowThreads;
using cuda::widen;

// −inf − −inf would be NaN where the row has something else in it.
__device__ __forceinline__ float finite_reference(float m) { return m == -INFINITY ? 0 : m; }

template <class T, int kThreads, int kPacks>
__global__ void __launch_bounds__(RowThreads<kThreads>::kBlock)
    forward_kept(SoftmaxArgs args, const T* x, T* y) {
  using Row = RowThreads<kThreads>;
  __shared__ float room[2][Row::kWarps];
  const std::int64_t row = Row::row();
  const int packs = row < args.outer ? static_cast<int>(args.cols / kPack<T>) : 0;
  x += row * args.cols;
  y += row * args.cols;
  Pack<T> kept[kPacks];
#pragma unroll
  for (int j = 0; j < kPacks; ++j) {
    const int p = Row::rank() + j * kThreads;
    if (p < packs) kept[j] = cuda::load_pack(x + p * kPack<T>);
  }
  float v[kPack<T>];
  float m = -INFINITY;
#pragma unroll
  for (int j = 0; j < kPacks; ++j) {
    if (Row::rank() + j * kThreads >= packs) continue;
    cuda::unpack(kept[j], v);
#pragma unroll
    for (int i = 0; i < kPack<T>; ++i) m = cuda::max_nan(m, v[i]);
  }
  m = Row::max(m, room[0]);
  float sum = 0;
#pragma unroll
  for (int j = 0; j < kPacks; ++j) {
    if (Row::rank() + j * kThreads >= packs) continue;
    cuda::unpack(kept[j], v);
#pragma unroll
    for (int i = 0; i < kPack<T>; ++i) {
      v[i] = exp_for<T>(v[i] - m);
      sum += v[i];
    }
    if constexpr (sizeof(T) == 4) kept[j] = cuda::pack_of<T>(v);  // 16 bits: made again below
  }
  const float share = 1 / Row::sum(sum, room[1]);
#pragma unroll
  for (int j = 0; j < kPacks; ++j) {
    const int p = Row::rank() + j * kThreads;
    if (p >= packs) continue;
    cuda::unpack(kept[j], v);
#pragma unroll
    for (int i = 0; i < kPack<T>; ++i) {
      v[i] = (sizeof(T) == 4 ? v[i] : exp_for<T>(v[i] - m)) * share;
    }
    cuda::store_pack(cuda::pack_of<T>(v), y + p * kPack<T>);
  }
}

template <class T, int kThreads, int kPacks>
__global__ void __launch_bounds__(RowThreads<kThreads>::kBlock)
    backward_kept(SoftmaxArgs args, const T* y, const T* dy, T* dx) {
  using Row = RowThreads<kThreads>;
  __shared__ float room[Row::kWarps];
  const std::int64_t row = Row::row();
  const int packs = row < args.outer ? static_cast<int>(args.cols / kPack<T>) : 0;
  y += row * args.cols;
  dy += row * args.cols;
  dx += row * args.cols;
  Pack<T> a[kPacks];
  Pack<T> b[kPacks];
#pragma unroll
  for (int j = 0; j < kPacks; ++j) {
    const int p = Row::rank() + j * kThreads;
    if (p < packs) {
      a[j] = cuda::load_pack(y + p * kPack<T>);
      b[j] = cuda::load_pack(dy + p * kPack<T>);
    }
  }
  float u[kPack<T>];
  float v[kPack<T>];
  float s = 0;
#pragma unroll
  for (int j = 0; j < kPacks; ++j) {
    if (Row::rank() + j * kThreads >= packs) continue;
    cuda::unpack(a[j], u);
    cuda::unpack(b[j], v);
#pragma unroll
    for (int i = 0; i < kPack<T>; ++i) s += u[i] * v[i];
  }
  s = Row::sum(s, room);
#pragma unroll
  for (int j = 0; j < kPacks; ++j) {
    const int p = Row::rank() + j * kThreads;
    if (p >= packs) continue;
    cuda::unpack(a[j], u);
    cuda::unpack(b[j], v);
#pragma unroll
    for (int i = 0; i < kPack<T>; ++i) u[i] *= v[i] - s;
    cuda::store_pack(cuda::pack_of<T>(u), dx + p * kPack<T>);
  }
}

// ---- long rows: kept in the shared memory of a cluster ----

constexpr int kConsumers = 512;
constexpr int kChunk = 8192;  // bytes of a slot: a pack for each consumer
constexpr int kSlots = 27;    // 221,184 of 232,448 bytes
constexpr int kMostBlocks = 8;

struct LongRow {
  cuda::Ring<kSlots, kChunk> ring;
  float2 parts[2][kMostBlocks];             // of the blocks of the cluster; rows take turns
  std::uint64_t told[2];                    // parts have come
  float warp_parts[2][kConsumers / kWarp];  // of the warps of this block: sums, maxima
};
constexpr int kLongBytes = sizeof(LongRow);
constexpr int kLongThreads = kConsumers + kWarp;
static_assert(kLongBytes <= cuda::kSharedBytes);

// The packs of a row that this block of the cluster keeps.
struct Slice {
  std::int64_t first;
  int packs;
};
template <int kBlocks>
__device__ __forceinline__ Slice slice_of(std::int64_t packs) {
  const unsigned rank = kBlocks == 1 ? 0 : cuda::cluster_rank();
  const std::int64_t first = packs * rank / kBlocks;
  return {first, static_cast<int>(packs * (rank + 1) / kBlocks - first)};
}

__device__ __forceinline__ void consumers_sync() {
  asm volatile("bar.sync 1, %0;" ::"n"(kConsumers) : "memory");
}

// The sum (or the maximum) over all consumers of this block, in a fixed order.
template <bool kMax>
__device__ __forceinline__ float over_block(LongRow& s, float v) {
  v = kMax ? cuda::lanes_max(v) : cuda::lanes_sum(v);
  if (threadIdx.x % kWarp == 0) s.warp_parts[kMax][threadIdx.x / kWarp] = v;
  consumers_sync();
  float all = s.warp_parts[kMax][0];
#pragma unroll
  for (int w = 1; w < kConsumers / kWarp; ++w) {
    const float part = s.warp_parts[kMax][w];
    all = kMax ? cuda::max_nan(all, part) : all + part;
  }
  return all;
}

// Tells the other blocks of the cluster this block's value; s.parts[turn mod 2] then has everybody's.
template <int kBlocks>
__device__ __forceinline__ const float2* tell(LongRow& s, float2 mine, unsigned turn) {
  const unsigned side = turn % 2;
  if (threadIdx.x < kBlocks) {
    cuda::send(&s.parts[side][cuda::cluster_rank()], mine, &s.told[side], threadIdx.x);
  }
  if (threadIdx.x == 0) cuda::barrier_arrive_expect(&s.told[side], kBlocks * sizeof(float2));
  cuda::barrier_wait<true>(&s.told[side], turn / 2 % 2);
  return s.parts[side];
}

// Streams rows from sources into the ring: chunk by chunk, one of each source after the other.
template <int kSources, class T>
__device__ void produce(LongRow& s, const SoftmaxArgs& args, const Slice& slice,
                        std::int64_t cluster, std::int64_t clusters,
                        const T* const (&sources)[kSources]) {
  typename decltype(s.ring)::At at;
  for (std::int64_t row = cluster; row < args.outer; row += clusters) {
    const std::int64_t start = row * args.cols + slice.first * kPack<T>;
    for (int done = 0; done < slice.packs; done += kConsumers) {
      const int packs = min(kConsumers, slice.packs - done);
#pragma unroll
      for (int i = 0; i < kSources; ++i) {
        s.ring.fill(at, sources[i] + start + std::int64_t{done} * kPack<T>, packs * 16);
        at.next();
      }
    }
  }
}

// The start of a long-row kernel, by all threads; true for those that consume.
template <int kBlocks>
__device__ bool begin(LongRow& s) {
  if (threadIdx.x == 0) {
    s.ring.init(kConsumers / kWarp);
    cuda::barrier_init(&s.told[0], 1);
    cuda::barrier_init(&s.told[1], 1);
    cuda::barrier_init_done();
  }
  __syncthreads();
  if constexpr (kBlocks > 1) cuda::cluster_sync();
  return threadIdx.x < kConsumers;
}

template <class T>
__device__ __forceinline__ Pack<T> pack_in(const unsigned char* slot) {
  const uint4 bits = reinterpret_cast<const uint4*>(slot)[threadIdx.x];
  return {{bits.x, bits.y, bits.z, bits.w}};
}

template <class T, int kBlocks>
__global__ void __launch_bounds__(kLongThreads, 1)
    forward_long(SoftmaxArgs args, const T* x, T* y) {
  extern __shared__ __align__(128) unsigned char memory[];
  LongRow& s = *reinterpret_cast<LongRow*>(memory);
  const Slice slice = slice_of<kBlocks>(args.cols / kPack<T>);
  const std::int64_t cluster = blockIdx.x / kBlocks;
  const std::int64_t clusters = gridDim.x / kBlocks;
  if (!begin<kBlocks>(s)) {
    if (threadIdx.x == kConsumers) produce<1>(s, args, slice, cluster, clusters, {x});
    return;
  }
  typename decltype(s.ring)::At at;
  unsigned turn = 0;
  float v[kPack<T>];
  for (std::int64_t row = cluster; row < args.outer; row += clusters, ++turn) {
    float m = -INFINITY;
    float sum = 0;
    auto again = at;
    const int rank = threadIdx.x;
    for (int done = 0; done < slice.packs; done += kConsumers, at.next()) {
      const unsigned char* slot = s.ring.wait(at);
      if (done + rank >= slice.packs) continue;
      cuda::unpack(pack_in<T>(slot), v);
      float largest = v[0];
#pragma unroll
      for (int i = 1; i < kPack<T>; ++i) largest = cuda::max_nan(largest, v[i]);
      if (!(largest <= m)) {  // rarely, after the first few; or NaN
        sum *= expf(m - largest);
        m = largest;
      }
      const float ref = finite_reference(m);
#pragma unroll
      for (int i = 0; i < kPack<T>; ++i) sum += exp_for<T>(v[i] - ref);
    }
    float all = over_block<true>(s, m);
    sum = over_block<false>(s, sum == 0 ? 0 : sum * expf(m - all));
    if constexpr (kBlocks > 1) {
      const float2* parts = tell<kBlocks>(s, {all, sum}, turn);
#pragma unroll
      for (int b = 0; b < kBlocks; ++b) all = cuda::max_nan(all, parts[b].x);
      const float ref = finite_reference(all);
      sum = 0;
#pragma unroll
      for (int b = 0; b < kBlocks; ++b) sum += parts[b].y * expf(parts[b].x - ref);
    }
    const float share = 1 / sum;
    T* out = y + row * args.cols + slice.first * kPack<T>;
    for (int done = 0; done < slice.packs; done += kConsumers, again.next()) {
      if (done + rank < slice.packs) {
        cuda::unpack(pack_in<T>(s.ring.slot[again.slot]), v);
#pragma unroll
        for (int i = 0; i < kPack<T>; ++i) v[i] = exp_for<T>(v[i] - all) * share;
        cuda::store_pack(cuda::pack_of<T>(v), out + std::int64_t{done + rank} * kPack<T>);
      }
      s.ring.release(again);
    }
  }
}

template <class T, int kBlocks>
__global__ void __launch_bounds__(kLongThreads, 1)
    backward_long(SoftmaxArgs args, const T* y, const T* dy, T* dx) {
  extern __shared__ __align__(128) unsigned char memory[];
  LongRow& s = *reinterpret_cast<LongRow*>(memory);
  const Slice slice = slice_of<kBlocks>(args.cols / kPack<T>);
  const std::int64_t cluster = blockIdx.x / kBlocks;
  const std::int64_t clusters = gridDim.x / kBlocks;
  if (!begin<kBlocks>(s)) {
    if (threadIdx.x == kConsumers) produce<2>(s, args, slice, cluster, clusters, {y, dy});
    return;
  }
  typename decltype(s.ring)::At at;
  unsigned turn = 0;
  float u[kPack<T>];
  float v[kPack<T>];
  for (std::int64_t row = cluster; row < args.outer; row += clusters, ++turn) {
    float dot = 0;
    auto again = at;
    const int rank = threadIdx.x;
    for (int done = 0; done < slice.packs; done += kConsumers) {
      const unsigned char* y_slot = s.ring.wait(at);
      at.next();
      const unsigned char* dy_slot = s.ring.wait(at);
      at.next();
      if (done + rank >= slice.packs) continue;
      cuda::unpack(pack_in<T>(y_slot), u);
      cuda::unpack(pack_in<T>(dy_slot), v);
#pragma unroll
      for (int i = 0; i < kPack<T>; ++i) dot += u[i] * v[i];
    }
    dot = over_block<false>(s, dot);
    if constexpr (kBlocks > 1) {
      const float2* parts = tell<kBlocks>(s, {dot, 0}, turn);
      dot = 0;
#pragma unroll
      for (int b = 0; b < kBlocks; ++b) dot += parts[b].x;
    }
    consumers_sync();  // warp_parts may be written again
    T* out = dx + row * args.cols + slice.first * kPack<T>;
    for (int done = 0; done < slice.packs; done += kConsumers) {
      auto dy_at = again;
      dy_at.next();
      if (done + rank < slice.packs) {
        cuda::unpack(pack_in<T>(s.ring.slot[again.slot]), u);
        cuda::unpack(pack_in<T>(s.ring.slot[dy_at.slot]), v);
#pragma unroll
        for (int i = 0; i < kPack<T>; ++i) u[i] *= v[i] - dot;
        cuda::store_pack(cuda::pack_of<T>(u), out + std::int64_t{done + rank} * kPack<T>);
      }
      s.ring.release(again);
      s.ring.release(dy_at);
      again = dy_at;
      again.next();
    }
  }
}

// Launches kernel<T, blocks> for the smallest cluster that keeps a row of `sources` arrays with room
// for a third of the next one; false where none does.
template <class Kernel, class... Args>
bool launch_long(std::int64_t packs, int sources, std::int64_t rows, cudaStream_t stream,
                 const Kernel& kernel_of, Args... args) {
  const auto slots = [&](int blocks) {
    return sources * cuda::blocks_for(cuda::blocks_for(packs, blocks), kConsumers);
  };
  const auto launch = [&](auto blocks) {
    constexpr int kBlocks = blocks();
    if (slots(kBlocks) > (kBlocks == kMostBlocks ? kSlots : kSlots * 3 / 4)) return false;
    const auto kernel = kernel_of(blocks);
    static const int clusters = cuda::clusters_at_once(kernel, kBlocks, kLongThreads, kLongBytes);
    cuda::launch(kernel, std::min<std::int64_t>(rows, clusters) * kBlocks, kLongThreads, kLongBytes,
                 kBlocks, stream, args...);
    return true;
  };
  using std::integral_constant;
  return launch(integral_constant<int, 1>()) || launch(integral_constant<int, 2>()) ||
         launch(integral_constant<int, 4>()) || launch(integral_constant<int, kMostBlocks>());
}

// ---- any row: walked twice ----

constexpr int kWalkers = 512;

template <class T>
__global__ void __launch_bounds__(kWalkers) forward_walked(SoftmaxArgs args, const T* x, T* y) {
  using Row = RowThreads<kWalkers>;
  __shared__ float room[2][Row::kWarps];
  const std::int64_t row = std::int64_t{blockIdx.x} * args.cols;
  float m = -INFINITY;
  float sum = 0;
  for (std::int64_t c = threadIdx.x; c < args.cols; c += kWalkers) {
    const float v = widen(x[row + c]);
    if (!(v <= m)) {  // larger, or NaN
      sum *= expf(m - v);
      m = v;
    }
    sum += exp_for<T>(v - finite_reference(m));
  }
  const float all = Row::max(m, room[0]);
  sum = Row::sum(sum == 0 ? 0 : sum * expf(m - all), room[1]);
  const float share = 1 / sum;
  for (std::int64_t c = threadIdx.x; c < args.cols; c += kWalkers) {
    y[row + c] = narrow<T>(exp_for<T>(widen(x[row + c]) - all) * share);
  }
}

template <class T>
__global__ void __launch_bounds__(kWalkers)
    backward_walked(SoftmaxArgs args, const T* y, const T* dy, T* dx) {
  using Row = RowThreads<kWalkers>;
  __shared__ float room[Row::kWarps];
  const std::int64_t row = std::int64_t{blockIdx.x} * args.cols;
  float s = 0;
  for (std::int64_t c = threadIdx.x; c < args.cols; c += kWalkers) {
    s += widen(y[row + c]) * widen(dy[row + c]);
  }
  s = Row::sum(s, room);
  for (std::int64_t c = threadIdx.x; c < args.cols; c += kWalkers) {
    dx[row + c] = narrow<T>(widen(y[row + c]) * (widen(dy[row + c]) - s));
  }
}

// ---- rows that are not contiguous ----

constexpr int kShares = 8;  // warps that share the columns of 32 rows

template <class T>
__global__ void __launch_bounds__(kWarp* kShares)
    forward_strided(SoftmaxArgs args, std::int64_t tiles, const T* x, T* y) {
  __shared__ float room[2][kShares][kWarp];
  const int lane = threadIdx.x % kWarp;
  const int share = threadIdx.x / kWarp;
  const std::int64_t inner = blockIdx.x % tiles * kWarp + lane;
  const bool in = inner < args.inner;
  const std::int64_t at = blockIdx.x / tiles * args.cols * args.inner + inner;
  float m = -INFINITY;
  for (std::int64_t c = share; in && c < args.cols; c += kShares) {
    m = cuda::max_nan(m, widen(x[at + c * args.inner]));
  }
  room[0][share][lane] = m;
  __syncthreads();
  for (int s = 0; s < kShares; ++s) m = cuda::max_nan(m, room[0][s][lane]);
  float sum = 0;
  for (std::int64_t c = share; in && c < args.cols; c += kShares) {
    sum += exp_for<T>(widen(x[at + c * args.inner]) - m);
  }
  room[1][share][lane] = sum;
  __syncthreads();
  sum = 0;
  for (int s = 0; s < kShares; ++s) sum += room[1][s][lane];
  for (std::int64_t c = share; in && c < args.cols; c += kShares) {
    y[at + c * args.inner] = narrow<T>(exp_for<T>(widen(x[at + c * args.inner]) - m) / sum);
  }
}

template <class T>
__global__ void __launch_bounds__(kWarp* kShares)
    backward_strided(SoftmaxArgs args, std::int64_t tiles, const T* y, const T* dy, T* dx) {
  __shared__ float room[kShares][kWarp];
  const int lane = threadIdx.x % kWarp;
  const int share = threadIdx.x / kWarp;
  const std::int64_t inner = blockIdx.x % tiles * kWarp + lane;
  const bool in = inner < args.inner;
  const std::int64_t at = blockIdx.x / tiles * args.cols * args.inner + inner;
  float sum = 0;
  for (std::int64_t c = share; in && c < args.cols; c += kShares) {
    sum += widen(y[at + c * args.inner]) * widen(dy[at + c * args.inner]);
  }
  room[share][lane] = sum;
  __syncthreads();
  sum = 0;
  for (int s = 0; s < kShares; ++s) sum += room[s][lane];
  for (std::int64_t c = share; in && c < args.cols; c += kShares) {
    const std::int64_t i = at + c * args.inner;
    dx[i] = narrow<T>(widen(y[i]) * (widen(dy[i]) - sum));
  }
}

// ---- launch ----

template <int kThreads>
unsigned grid(const SoftmaxArgs& args) {
  return static_cast<unsigned>(cuda::blocks_for(args.outer, RowThreads<kThreads>::kRows));
}

// Calls body(threads, packs a thread), as constants, for the narrowest form that keeps a row in
// registers; false where the row is too long.
template <class Body>
bool with_form(std::int64_t packs, const Body& body) {
  const auto form = [&](auto threads, auto each) {
    if (packs > threads() * each()) return false;
    body(threads, each);
    return true;
  };
  using std::integral_constant;
  constexpr integral_constant<int, 4> k4;
  return form(integral_constant<int, 4>(), integral_constant<int, 1>()) ||
         form(integral_constant<int, 4>(), k4) || form(integral_constant<int, 8>(), k4) ||
         form(integral_constant<int, 16>(), k4) || form(integral_constant<int, 32>(), k4) ||
         form(integral_constant<int, 32>(), integral_constant<int, 8>()) ||
         form(integral_constant<int, 128>(), k4) || form(integral_constant<int, 256>(), k4);
}

template <class T>
void softmax_fwd(const KernelCall& call) {
  const auto& args = call.as<SoftmaxArgs>();
  const T* x = call.input<T>(0);  // [outer, cols, inner]
  T* y = call.output<T>(0);       // [outer, cols, inner]
  const auto stream = static_cast<cudaStream_t>(call.queue);
  if (args.inner != 1) {
    const std::int64_t tiles = cuda::blocks_for(args.inner, kWarp);
    forward_strided<T><<<static_cast<unsigned>(args.outer * tiles), kWarp * kShares, 0, stream>>>(
        args, tiles, x, y);
    return;
  }
  const bool whole = args.cols % kPack<T> == 0 && cuda::is_aligned(x) && cuda::is_aligned(y);
  if (whole && with_form(args.cols / kPack<T>, [&](auto threads, auto packs) {
        forward_kept<T, threads(), packs()>
            <<<grid<threads()>(args), RowThreads<threads()>::kBlock, 0, stream>>>(args, x, y);
      })) {
    return;
  }
  if (whole && launch_long(
                   args.cols / kPack<T>, 1, args.outer, stream,
                   [](auto blocks) { return forward_long<T, blocks()>; }, args, x, y)) {
    return;
  }
  forward_walked<T><<<static_cast<unsigned>(args.outer), kWalkers, 0, stream>>>(args, x, y);
}

template <class T>
void softmax_bwd(const KernelCall& call) {
  const auto& args = call.as<SoftmaxArgs>();
  const T* y = call.input<T>(0);   // [outer, cols, inner]
  const T* dy = call.input<T>(1);  // [outer, cols, inner]
  T* dx = call.output<T>(0);       // [outer, cols, inner]
  const auto stream = static_cast<cudaStream_t>(call.queue);
  if (args.inner != 1) {
    const std::int64_t tiles = cuda::blocks_for(args.inner, kWarp);
    backward_strided<T><<<static_cast<unsigned>(args.outer * tiles), kWarp * kShares, 0, stream>>>(
        args, tiles, y, dy, dx);
    return;
  }
  const bool whole = args.cols % kPack<T> == 0 && cuda::is_aligned(y) && cuda::is_aligned(dy) &&
                     cuda::is_aligned(dx);
  if (whole && with_form(args.cols / kPack<T>, [&](auto threads, auto packs) {
        backward_kept<T, threads(), packs()>
            <<<grid<threads()>(args), RowThreads<threads()>::kBlock, 0, stream>>>(args, y, dy, dx);
      })) {
    return;
  }
  if (whole && launch_long(
                   args.cols / kPack<T>, 2, args.outer, stream,
                   [](auto blocks) { return backward_long<T, blocks()>; }, args, y, dy, dx)) {
    return;
  }
  backward_walked<T><<<static_cast<unsigned>(args.outer), kWalkers, 0, stream>>>(args, y, dy, dx);
}

template <class T>
void add_kernels(KernelRegistry& registry) {
  const std::string type = name_of(kDType<T>);
  registry.add(Backend::kCuda, "softmax_fwd_" + type, softmax_fwd<T>);
  registry.add(Backend::kCuda, "softmax_bwd_" + type, softmax_bwd<T>);
}

}  // namespace

void register_softmax_cuda(KernelRegistry& registry) {
  add_kernels<float>(registry);
  add_kernels<F16>(registry);
  add_kernels<BF16>(registry);
}

}  // namespace mlxtape::ops
