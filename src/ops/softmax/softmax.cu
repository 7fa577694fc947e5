// CUDA kernels of softmax (formula and layout: mlxtape/ops/softmax.h).
//
// Rows of whole 16-byte packs are read once and kept in registers: by a part of a warp, a warp, a block,
// or a cluster of blocks that tell each other their sums. Where the two arrays of a backward would need
// more than four blocks, they are kept in shared memory instead: a producer thread streams row after row
// into a ring of slots; the others sum what has come, tell the other blocks, go over it again to write the
// result and free the slots, so that the next row is on its way before this one is done. Ragged rows, and
// those that eight blocks cannot hold, are walked twice. Rows that are not contiguous: a warp's lanes are
// neighbouring rows, so its accesses are whole lines, and the warps of a block share the columns.
// Bound by memory.
#include <cuda_runtime.h>

#include <algorithm>

#include "backends/cuda/device/cluster.cuh"
#include "backends/cuda/device/exp.cuh"
#include "backends/cuda/device/kept_rows.cuh"
#include "backends/cuda/device/launch.cuh"
#include "backends/cuda/device/rows.cuh"
#include "mlxtape/core/registry.h"
#include "softmax_args.h"
#include "softmax_long.cuh"

namespace mlxtape::ops {

namespace {

using cuda::exp_for;
using cuda::exp_times_constant;
using cuda::finite_reference;
using cuda::Form;
using cuda::in_grids;
using cuda::kPack;
using cuda::kWarp;
using cuda::narrow;
using cuda::Pack;
using cuda::Share;
using cuda::Total;
using cuda::total_of;
using cuda::total_over_warps;
using cuda::widen;
using cuda::with_form;

// ---- rows that are kept in registers ----

template <class F, class T = typename F::T>
__global__ void __launch_bounds__(F::kBlock, F::kBlocks)
    forward_kept(SoftmaxArgs args, const T* x, T* y) {
  // Exponentials are kept: f32 in the place of x, 16 bits as f32 where they are few, else they are made
  // again from x.
  constexpr bool kInPlace = sizeof(T) == 4;
  constexpr bool kKeep = kInPlace || F::kPacks <= 2;
  __shared__ float2 room[F::kWarps];
  __shared__ cuda::Meeting<F::kCluster> meeting;
  cuda::wait_turn();
  meeting.open();
  const Share<F> share(args.outer, args.cols);
  Pack<T> pack[F::kPacks];
#pragma unroll
  for (int j = 0; j < F::kPacks; ++j) {
    if (share.has(j)) pack[j] = cuda::load_pack(x + share.at(j));
  }
  float v[kPack<T>];
  float m = -INFINITY;
#pragma unroll
  for (int j = 0; j < F::kPacks; ++j) {
    if (!share.has(j)) continue;
    cuda::unpack(pack[j], v);
#pragma unroll
    for (int i = 0; i < kPack<T>; ++i) m = cuda::max_nan(m, v[i]);
  }
  // A warp's own largest number is its reference: no warp waits for another before its exponentials.
  m = cuda::lanes_max<F::kLanes>(m);
  const float reference = finite_reference(m);
  float kept[kKeep && !kInPlace ? F::kPacks : 1][kPack<T>];
  float sum = 0;
#pragma unroll
  for (int j = 0; j < F::kPacks; ++j) {
    if (!share.has(j)) continue;
    cuda::unpack(pack[j], v);
#pragma unroll
    for (int i = 0; i < kPack<T>; ++i) {
      v[i] = exp_times_constant<T>(v[i] - reference);
      sum += v[i];
      if constexpr (kKeep && !kInPlace) kept[j][i] = v[i];
    }
    if constexpr (kInPlace) pack[j] = cuda::pack_of<T>(v);
  }
  Total total{m, cuda::lanes_sum<F::kLanes>(sum)};
  if constexpr (!F::kOneWarp) total = total_over_warps<F::kWarps>(total, room);
  if constexpr (F::kCluster > 1) {
    total = total_of<F::kCluster>(meeting.tell({total.top, total.sum}));
  }
  // Two factors: their product may be too small for a number where the results are not.
  const float factor = 1 / total.sum;
  const float from_reference = kKeep && !F::kOneWarp ? expf(m - total.top) : 1;
#pragma unroll
  for (int j = 0; j < F::kPacks; ++j) {
    if (!share.has(j)) continue;
    cuda::unpack(pack[j], v);
#pragma unroll
    for (int i = 0; i < kPack<T>; ++i) {
      if constexpr (kKeep && !kInPlace) v[i] = kept[j][i];
      if constexpr (!kKeep) v[i] = exp_times_constant<T>(v[i] - total.top);
      v[i] = v[i] * from_reference * factor;
    }
    cuda::store_pack(cuda::pack_of<T>(v), y + share.at(j));
  }
}

template <class F, class T = typename F::T>
__global__ void __launch_bounds__(F::kBlock, F::kBlocks)
    backward_kept(SoftmaxArgs args, const T* y, const T* dy, T* dx) {
  __shared__ float room[F::kWarps];
  __shared__ cuda::Meeting<F::kCluster> meeting;
  cuda::wait_turn();
  meeting.open();
  const Share<F> share(args.outer, args.cols);
  Pack<T> a[F::kPacks];
  Pack<T> b[F::kPacks];
#pragma unroll
  for (int j = 0; j < F::kPacks; ++j) {
    if (!share.has(j)) continue;
    a[j] = cuda::load_pack(y + share.at(j));
    b[j] = cuda::load_pack(dy + share.at(j));
  }
  float u[kPack<T>];
  float v[kPack<T>];
  float dot = 0;
#pragma unroll
  for (int j = 0; j < F::kPacks; ++j) {
    if (!share.has(j)) continue;
    cuda::unpack(a[j], u);
    cuda::unpack(b[j], v);
#pragma unroll
    for (int i = 0; i < kPack<T>; ++i) dot += u[i] * v[i];
  }
  dot = cuda::lanes_sum<F::kLanes>(dot);
  if constexpr (!F::kOneWarp) {
    const int lane = threadIdx.x % kWarp;
    if (lane == 0) room[threadIdx.x / kWarp] = dot;
    __syncthreads();
    dot = cuda::lanes_sum(lane < F::kWarps ? room[lane] : 0);
  }
  if constexpr (F::kCluster > 1) {
    const float2* parts = meeting.tell({dot, 0});
    dot = 0;
#pragma unroll
    for (int i = 0; i < F::kCluster; ++i) dot += parts[i].x;
  }
#pragma unroll
  for (int j = 0; j < F::kPacks; ++j) {
    if (!share.has(j)) continue;
    cuda::unpack(a[j], u);
    cuda::unpack(b[j], v);
#pragma unroll
    for (int i = 0; i < kPack<T>; ++i) u[i] *= v[i] - dot;
    cuda::store_pack(cuda::pack_of<T>(u), dx + share.at(j));
  }
}

// ---- any row: walked twice ----

constexpr int kWalkers = 512;
constexpr std::int64_t kLongWalk = 1 << 16;  // columns from which on a cluster walks together

// The columns that a thread walks: from first, in steps of step, up to args.cols.
template <int kCluster>
struct Walk {
  std::int64_t row, first;
  static constexpr std::int64_t kStep = kWalkers * kCluster;

  __device__ explicit Walk(const SoftmaxArgs& args)
      : row(blockIdx.x / kCluster * args.cols),
        first(blockIdx.x % kCluster * kWalkers + threadIdx.x) {}
};

template <class T, int kCluster>
__global__ void __launch_bounds__(kWalkers) forward_walked(SoftmaxArgs args, const T* x, T* y) {
  __shared__ float2 room[kWalkers / kWarp];
  __shared__ cuda::Meeting<kCluster> meeting;
  cuda::wait_turn();
  meeting.open();
  const Walk<kCluster> walk(args);
  float m = -INFINITY;
  float sum = 0;
  for (std::int64_t c = walk.first; c < args.cols; c += walk.kStep) {
    const float v = widen(x[walk.row + c]);
    if (!(v <= m)) {  // larger, or NaN
      sum *= expf(m - v);
      m = v;
    }
    sum += exp_times_constant<T>(v - finite_reference(m));
  }
  const float top = cuda::lanes_max(m);
  sum = cuda::lanes_sum(sum == 0 ? 0 : sum * expf(m - top));
  Total total = total_over_warps<kWalkers / kWarp>({top, sum}, room);
  if constexpr (kCluster > 1) {
    total = total_of<kCluster>(meeting.tell({total.top, total.sum}));
  }
  const float factor = 1 / total.sum;
  for (std::int64_t c = walk.first; c < args.cols; c += walk.kStep) {
    y[walk.row + c] = narrow<T>(exp_times_constant<T>(widen(x[walk.row + c]) - total.top) * factor);
  }
}

template <class T, int kCluster>
__global__ void __launch_bounds__(kWalkers)
    backward_walked(SoftmaxArgs args, const T* y, const T* dy, T* dx) {
  using Row = cuda::RowThreads<kWalkers>;
  __shared__ float room[Row::kWarps];
  __shared__ cuda::Meeting<kCluster> meeting;
  cuda::wait_turn();
  meeting.open();
  const Walk<kCluster> walk(args);
  float dot = 0;
  for (std::int64_t c = walk.first; c < args.cols; c += walk.kStep) {
    dot += widen(y[walk.row + c]) * widen(dy[walk.row + c]);
  }
  dot = Row::sum(dot, room);
  if constexpr (kCluster > 1) {
    const float2* parts = meeting.tell({dot, 0});
    dot = 0;
#pragma unroll
    for (int i = 0; i < kCluster; ++i) dot += parts[i].x;
  }
  for (std::int64_t c = walk.first; c < args.cols; c += walk.kStep) {
    const std::int64_t i = walk.row + c;
    dx[i] = narrow<T>(widen(y[i]) * (widen(dy[i]) - dot));
  }
}

// ---- rows that are not contiguous ----

constexpr int kShares = 8;  // warps that share the columns of 32 rows

template <class T>
__global__ void __launch_bounds__(kWarp* kShares)
    forward_strided(SoftmaxArgs args, std::int64_t tiles, const T* x, T* y) {
  __shared__ float room[2][kShares][kWarp];
  cuda::wait_turn();
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
  cuda::wait_turn();
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

template <class T, class Body>
bool with_forward_form(std::int64_t packs, const Body& body) {
  constexpr int kWide = sizeof(T) == 4 ? 1024 : 512;  // 16 bits: two blocks on a multiprocessor
  return with_form<Form<T, 4, 1>, Form<T, 4, 4>, Form<T, 8, 4>, Form<T, 16, 4>, Form<T, 32, 2>,
                   Form<T, 32, 4>, Form<T, 128, 2>, Form<T, 256, 2>, Form<T, 512, 2>,
                   Form<T, 512, 4>, Form<T, 512, 8>, Form<T, kWide, 8>, Form<T, kWide, 8, 2>,
                   Form<T, kWide, 10, 4>, Form<T, kWide, 8, 8>, Form<T, 1024, 8, 8>>(packs, body);
}
template <class T, class Body>
bool with_backward_form(std::int64_t packs, const Body& body) {
  return with_form<Form<T, 4, 1>, Form<T, 4, 4>, Form<T, 8, 4>, Form<T, 16, 4>, Form<T, 32, 2>,
                   Form<T, 32, 4>, Form<T, 32, 8>, Form<T, 128, 4>, Form<T, 256, 4>,
                   Form<T, 512, 4>, Form<T, 1024, 4>, Form<T, 1024, 4, 2>, Form<T, 1024, 4, 4>>(
      packs, body);
}

// Calls body(arguments of some rows, where they begin, blocks each as a constant).
template <class Body>
void in_walks(const SoftmaxArgs& args, const Body& body) {
  const auto walk = [&](auto cluster) {
    in_grids(args.outer, cluster(), [&](std::int64_t first, std::int64_t rows) {
      SoftmaxArgs some = args;
      some.outer = rows;
      body(some, first * args.cols, cluster);
    });
  };
  if (args.cols < kLongWalk) return walk(std::integral_constant<int, 1>());
  walk(std::integral_constant<int, kBlocks>());
}

// Calls body(arguments of some rows, where they begin, tiles of 32 neighbours).
template <class Body>
void in_tiles(const SoftmaxArgs& args, const Body& body) {
  const std::int64_t tiles = cuda::blocks_for(args.inner, kWarp);
  in_grids(args.outer, tiles, [&](std::int64_t first, std::int64_t rows) {
    SoftmaxArgs some = args;
    some.outer = rows;
    body(some, first * args.cols * args.inner, tiles);
  });
}

template <class T>
void softmax_fwd(const KernelCall& call) {
  const auto& args = call.as<SoftmaxArgs>();
  const T* x = call.input<T>(0);  // [outer, cols, inner]
  T* y = call.output<T>(0);       // [outer, cols, inner]
  const auto stream = static_cast<cudaStream_t>(call.queue);
  if (args.inner != 1) {
    return in_tiles(args, [&](const SoftmaxArgs& some, std::int64_t at, std::int64_t tiles) {
      cuda::launch(forward_strided<T>, some.outer * tiles, kWarp * kShares, 0, 1, stream, some,
                   tiles, x + at, y + at);
    });
  }
  const bool whole = args.cols % kPack<T> == 0 && cuda::is_aligned(x) && cuda::is_aligned(y);
  if (whole && with_forward_form<T>(args.cols / kPack<T>, [&]<class F>(F) {
        cuda::launch(forward_kept<F>, F::blocks(args.outer), F::kBlock, 0, F::kCluster, stream,
                     args, x, y);
      })) {
    return;
  }
  in_walks(args, [&](const SoftmaxArgs& some, std::int64_t at, auto cluster) {
    cuda::launch(forward_walked<T, cluster()>, some.outer * cluster(), kWalkers, 0, cluster(),
                 stream, some, x + at, y + at);
  });
}

template <class T>
void softmax_bwd(const KernelCall& call) {
  const auto& args = call.as<SoftmaxArgs>();
  const T* y = call.input<T>(0);   // [outer, cols, inner]
  const T* dy = call.input<T>(1);  // [outer, cols, inner]
  T* dx = call.output<T>(0);       // [outer, cols, inner]
  const auto stream = static_cast<cudaStream_t>(call.queue);
  if (args.inner != 1) {
    return in_tiles(args, [&](const SoftmaxArgs& some, std::int64_t at, std::int64_t tiles) {
      cuda::launch(backward_strided<T>, some.outer * tiles, kWarp * kShares, 0, 1, stream, some,
                   tiles, y + at, dy + at, dx + at);
    });
  }
  const bool whole = args.cols % kPack<T> == 0 && cuda::is_aligned(y) && cuda::is_aligned(dy) &&
                     cuda::is_aligned(dx);
  const std::int64_t packs = args.cols / kPack<T>;
  if (whole && with_backward_form<T>(packs, [&]<class F>(F) {
        cuda::launch(backward_kept<F>, F::blocks(args.outer), F::kBlock, 0, F::kCluster, stream,
                     args, y, dy, dx);
      })) {
    return;
  }
  if (whole && 2 * cuda::blocks_for(cuda::blocks_for(packs, kBlocks), kConsumers) <= kSlots) {
    const auto kernel = backward_long<T>;
    static const int clusters = cuda::clusters_at_once(kernel, kBlocks, kLongThreads, kLongBytes);
    if (clusters > 0) {  // a part of a device may have no room for one
      return cuda::launch(kernel, std::min<std::int64_t>(args.outer, clusters) * kBlocks,
                          kLongThreads, kLongBytes, kBlocks, stream, args, y, dy, dx);
    }
  }
  in_walks(args, [&](const SoftmaxArgs& some, std::int64_t at, auto cluster) {
    cuda::launch(backward_walked<T, cluster()>, some.outer * cluster(), kWalkers, 0, cluster(),
                 stream, some, y + at, dy + at, dx + at);
  });
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
