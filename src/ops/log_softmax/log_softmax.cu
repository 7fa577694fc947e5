// CUDA kernels of log_softmax (formula and layout: mlxtape/ops/log_softmax.h).
//
// Rows of whole 16-byte packs are read once and kept in registers, by a part of a warp up to a cluster of
// blocks (backends/cuda/device/kept_rows.cuh); of a backward dy, whose sum is asked for, while y is read
// when it is needed. Ragged rows, and those that eight blocks cannot hold, are walked twice. Rows that are
// not contiguous: a warp's lanes are neighbouring rows, and the warps of a block share the columns.
// Bound by memory.
#include <cuda_runtime.h>

#include "backends/cuda/device/cluster.cuh"
#include "backends/cuda/device/exp.cuh"
#include "backends/cuda/device/kept_rows.cuh"
#include "backends/cuda/device/launch.cuh"
#include "backends/cuda/device/rows.cuh"
#include "log_softmax_args.h"
#include "mlxtape/core/registry.h"

namespace mlxtape::ops {

namespace {

using cuda::exp_for;
using cuda::finite_reference;
using cuda::kPack;
using cuda::kWarp;
using cuda::narrow;
using cuda::Pack;
using cuda::Share;
using cuda::Total;
using cuda::widen;

// ---- rows that are kept in registers ----

template <class F, class T = typename F::T>
__global__ void __launch_bounds__(F::kBlock, F::kBlocks)
    forward_kept(LogSoftmaxArgs args, const T* x, T* y) {
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
  m = cuda::lanes_max<F::kLanes>(m);
  const float reference = finite_reference(m);
  float sum = 0;
#pragma unroll
  for (int j = 0; j < F::kPacks; ++j) {
    if (!share.has(j)) continue;
    cuda::unpack(pack[j], v);
#pragma unroll
    for (int i = 0; i < kPack<T>; ++i) sum += exp_for<T>(v[i] - reference);
  }
  Total total{m, cuda::lanes_sum<F::kLanes>(sum)};
  if constexpr (!F::kOneWarp) total = cuda::total_over_warps<F::kWarps>(total, room);
  if constexpr (F::kCluster > 1) {
    total = cuda::total_of<F::kCluster>(meeting.tell({total.top, total.sum}));
  }
  const float log_sum = logf(total.sum);
#pragma unroll
  for (int j = 0; j < F::kPacks; ++j) {
    if (!share.has(j)) continue;
    cuda::unpack(pack[j], v);
#pragma unroll
    for (int i = 0; i < kPack<T>; ++i) v[i] = (v[i] - total.top) - log_sum;
    cuda::store_pack(cuda::pack_of<T>(v), y + share.at(j));
  }
}

template <class F, class T = typename F::T>
__global__ void __launch_bounds__(F::kBlock, F::kBlocks)
    backward_kept(LogSoftmaxArgs args, const T* y, const T* dy, T* dx) {
  __shared__ float room[F::kWarps];
  __shared__ cuda::Meeting<F::kCluster> meeting;
  cuda::wait_turn();
  meeting.open();
  const Share<F> share(args.outer, args.cols);
  Pack<T> pack[F::kPacks];
#pragma unroll
  for (int j = 0; j < F::kPacks; ++j) {
    if (share.has(j)) pack[j] = cuda::load_pack(dy + share.at(j));
  }
  float u[kPack<T>];
  float v[kPack<T>];
  float sum = 0;
#pragma unroll
  for (int j = 0; j < F::kPacks; ++j) {
    if (!share.has(j)) continue;
    cuda::unpack(pack[j], v);
#pragma unroll
    for (int i = 0; i < kPack<T>; ++i) sum += v[i];
  }
  sum = cuda::lanes_sum<F::kLanes>(sum);
  if constexpr (!F::kOneWarp) {
    const int lane = threadIdx.x % kWarp;
    if (lane == 0) room[threadIdx.x / kWarp] = sum;
    __syncthreads();
    sum = cuda::lanes_sum(lane < F::kWarps ? room[lane] : 0);
  }
  if constexpr (F::kCluster > 1) {
    const float2* parts = meeting.tell({sum, 0});
    sum = 0;
#pragma unroll
    for (int i = 0; i < F::kCluster; ++i) sum += parts[i].x;
  }
#pragma unroll
  for (int j = 0; j < F::kPacks; ++j) {
    if (!share.has(j)) continue;
    cuda::unpack(cuda::load_pack(y + share.at(j)), u);
    cuda::unpack(pack[j], v);
#pragma unroll
    for (int i = 0; i < kPack<T>; ++i) v[i] -= exp_for<T>(u[i]) * sum;
    cuda::store_pack(cuda::pack_of<T>(v), dx + share.at(j));
  }
}

// ---- any row: walked twice ----

constexpr int kWalkers = 512;
constexpr int kWalkBlocks = 8;               // of a cluster
constexpr std::int64_t kLongWalk = 1 << 16;  // columns from which on a cluster walks together

template <class T, int kCluster>
__global__ void __launch_bounds__(kWalkers) forward_walked(LogSoftmaxArgs args, const T* x, T* y) {
  __shared__ float2 room[kWalkers / kWarp];
  __shared__ cuda::Meeting<kCluster> meeting;
  cuda::wait_turn();
  meeting.open();
  const std::int64_t row = blockIdx.x / kCluster * args.cols;
  const std::int64_t first = blockIdx.x % kCluster * kWalkers + threadIdx.x;
  float m = -INFINITY;
  float sum = 0;
  for (std::int64_t c = first; c < args.cols; c += kWalkers * kCluster) {
    const float v = widen(x[row + c]);
    if (!(v <= m)) {  // larger, or NaN
      sum *= expf(m - v);
      m = v;
    }
    sum += exp_for<T>(v - finite_reference(m));
  }
  const float top = cuda::lanes_max(m);
  sum = cuda::lanes_sum(sum == 0 ? 0 : sum * expf(m - top));
  Total total = cuda::total_over_warps<kWalkers / kWarp>({top, sum}, room);
  if constexpr (kCluster > 1) {
    total = cuda::total_of<kCluster>(meeting.tell({total.top, total.sum}));
  }
  const float log_sum = logf(total.sum);
  for (std::int64_t c = first; c < args.cols; c += kWalkers * kCluster) {
    y[row + c] = narrow<T>((widen(x[row + c]) - total.top) - log_sum);
  }
}

template <class T, int kCluster>
__global__ void __launch_bounds__(kWalkers)
    backward_walked(LogSoftmaxArgs args, const T* y, const T* dy, T* dx) {
  using Row = cuda::RowThreads<kWalkers>;
  __shared__ float room[Row::kWarps];
  __shared__ cuda::Meeting<kCluster> meeting;
  cuda::wait_turn();
  meeting.open();
  const std::int64_t row = blockIdx.x / kCluster * args.cols;
  const std::int64_t first = blockIdx.x % kCluster * kWalkers + threadIdx.x;
  float sum = 0;
  for (std::int64_t c = first; c < args.cols; c += kWalkers * kCluster) sum += widen(dy[row + c]);
  sum = Row::sum(sum, room);
  if constexpr (kCluster > 1) {
    const float2* parts = meeting.tell({sum, 0});
    sum = 0;
#pragma unroll
    for (int i = 0; i < kCluster; ++i) sum += parts[i].x;
  }
  for (std::int64_t c = first; c < args.cols; c += kWalkers * kCluster) {
    dx[row + c] = narrow<T>(widen(dy[row + c]) - exp_for<T>(widen(y[row + c])) * sum);
  }
}

// ---- rows that are not contiguous ----

constexpr int kShares = 8;  // warps that share the columns of 32 rows

// The 32 neighbouring rows of a block: a lane each.
struct Neighbours {
  int lane, share;
  std::int64_t at;  // the row's first element
  bool in;

  __device__ Neighbours(const LogSoftmaxArgs& args, std::int64_t tiles)
      : lane(threadIdx.x % kWarp), share(threadIdx.x / kWarp) {
    const std::int64_t inner = blockIdx.x % tiles * kWarp + lane;
    in = inner < args.inner;
    at = blockIdx.x / tiles * args.cols * args.inner + inner;
  }
};

template <class T>
__global__ void __launch_bounds__(kWarp* kShares)
    forward_strided(LogSoftmaxArgs args, std::int64_t tiles, const T* x, T* y) {
  __shared__ float room[2][kShares][kWarp];
  cuda::wait_turn();
  const Neighbours rows(args, tiles);
  float m = -INFINITY;
  for (std::int64_t c = rows.share; rows.in && c < args.cols; c += kShares) {
    m = cuda::max_nan(m, widen(x[rows.at + c * args.inner]));
  }
  room[0][rows.share][rows.lane] = m;
  __syncthreads();
  for (int s = 0; s < kShares; ++s) m = cuda::max_nan(m, room[0][s][rows.lane]);
  float sum = 0;
  for (std::int64_t c = rows.share; rows.in && c < args.cols; c += kShares) {
    sum += exp_for<T>(widen(x[rows.at + c * args.inner]) - m);
  }
  room[1][rows.share][rows.lane] = sum;
  __syncthreads();
  sum = 0;
  for (int s = 0; s < kShares; ++s) sum += room[1][s][rows.lane];
  const float log_sum = logf(sum);
  for (std::int64_t c = rows.share; rows.in && c < args.cols; c += kShares) {
    const std::int64_t i = rows.at + c * args.inner;
    y[i] = narrow<T>((widen(x[i]) - m) - log_sum);
  }
}

template <class T>
__global__ void __launch_bounds__(kWarp* kShares)
    backward_strided(LogSoftmaxArgs args, std::int64_t tiles, const T* y, const T* dy, T* dx) {
  __shared__ float room[kShares][kWarp];
  cuda::wait_turn();
  const Neighbours rows(args, tiles);
  float sum = 0;
  for (std::int64_t c = rows.share; rows.in && c < args.cols; c += kShares) {
    sum += widen(dy[rows.at + c * args.inner]);
  }
  room[rows.share][rows.lane] = sum;
  __syncthreads();
  sum = 0;
  for (int s = 0; s < kShares; ++s) sum += room[s][rows.lane];
  for (std::int64_t c = rows.share; rows.in && c < args.cols; c += kShares) {
    const std::int64_t i = rows.at + c * args.inner;
    dx[i] = narrow<T>(widen(dy[i]) - exp_for<T>(widen(y[i])) * sum);
  }
}

// ---- launch ----

// Calls body(arguments of some rows, where they begin, blocks each as a constant).
template <class Body>
void in_walks(const LogSoftmaxArgs& args, const Body& body) {
  const auto walk = [&](auto cluster) {
    cuda::in_grids(args.outer, cluster(), [&](std::int64_t first, std::int64_t rows) {
      LogSoftmaxArgs some = args;
      some.outer = rows;
      body(some, first * args.cols, cluster);
    });
  };
  if (args.cols < kLongWalk) return walk(std::integral_constant<int, 1>());
  walk(std::integral_constant<int, kWalkBlocks>());
}

// Calls body(arguments of some rows, where they begin, tiles of 32 neighbours).
template <class Body>
void in_tiles(const LogSoftmaxArgs& args, const Body& body) {
  const std::int64_t tiles = cuda::blocks_for(args.inner, kWarp);
  cuda::in_grids(args.outer, tiles, [&](std::int64_t first, std::int64_t rows) {
    LogSoftmaxArgs some = args;
    some.outer = rows;
    body(some, first * args.cols * args.inner, tiles);
  });
}

template <class T>
void log_softmax_fwd(const KernelCall& call) {
  const auto& args = call.as<LogSoftmaxArgs>();
  const T* x = call.input<T>(0);  // [outer, cols, inner]
  T* y = call.output<T>(0);       // [outer, cols, inner]
  const auto stream = static_cast<cudaStream_t>(call.queue);
  if (args.inner != 1) {
    return in_tiles(args, [&](const LogSoftmaxArgs& some, std::int64_t at, std::int64_t tiles) {
      cuda::launch(forward_strided<T>, some.outer * tiles, kWarp * kShares, 0, 1, stream, some,
                   tiles, x + at, y + at);
    });
  }
  const bool whole = args.cols % kPack<T> == 0 && cuda::is_aligned(x) && cuda::is_aligned(y);
  if (whole && cuda::with_row_form<T>(args.cols / kPack<T>, [&]<class F>(F) {
        cuda::launch(forward_kept<F>, F::blocks(args.outer), F::kBlock, 0, F::kCluster, stream,
                     args, x, y);
      })) {
    return;
  }
  in_walks(args, [&](const LogSoftmaxArgs& some, std::int64_t at, auto cluster) {
    cuda::launch(forward_walked<T, cluster()>, some.outer * cluster(), kWalkers, 0, cluster(),
                 stream, some, x + at, y + at);
  });
}

template <class T>
void log_softmax_bwd(const KernelCall& call) {
  const auto& args = call.as<LogSoftmaxArgs>();
  const T* y = call.input<T>(0);   // [outer, cols, inner]
  const T* dy = call.input<T>(1);  // [outer, cols, inner]
  T* dx = call.output<T>(0);       // [outer, cols, inner]
  const auto stream = static_cast<cudaStream_t>(call.queue);
  if (args.inner != 1) {
    return in_tiles(args, [&](const LogSoftmaxArgs& some, std::int64_t at, std::int64_t tiles) {
      cuda::launch(backward_strided<T>, some.outer * tiles, kWarp * kShares, 0, 1, stream, some,
                   tiles, y + at, dy + at, dx + at);
    });
  }
  const bool whole = args.cols % kPack<T> == 0 && cuda::is_aligned(y) && cuda::is_aligned(dy) &&
                     cuda::is_aligned(dx);
  if (whole && cuda::with_row_form<T>(args.cols / kPack<T>, [&]<class F>(F) {
        cuda::launch(backward_kept<F>, F::blocks(args.outer), F::kBlock, 0, F::kCluster, stream,
                     args, y, dy, dx);
      })) {
    return;
  }
  in_walks(args, [&](const LogSoftmaxArgs& some, std::int64_t at, auto cluster) {
    cuda::launch(backward_walked<T, cluster()>, some.outer * cluster(), kWalkers, 0, cluster(),
                 stream, some, y + at, dy + at, dx + at);
  });
}

template <class T>
void add_kernels(KernelRegistry& registry) {
  const std::string type = name_of(kDType<T>);
  registry.add(Backend::kCuda, "log_softmax_fwd_" + type, log_softmax_fwd<T>);
  registry.add(Backend::kCuda, "log_softmax_bwd_" + type, log_softmax_bwd<T>);
}

}  // namespace

void register_log_softmax_cuda(KernelRegistry& registry) {
  add_kernels<float>(registry);
  add_kernels<F16>(registry);
  add_kernels<BF16>(registry);
}

}  // namespace mlxtape::ops
