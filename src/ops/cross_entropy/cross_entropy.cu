// CUDA kernels of cross_entropy (formula and layout: mlxtape/ops/cross_entropy.h).
//
// Rows of whole 16-byte packs are read once and kept in registers, by a part of a warp up to a cluster of
// blocks (backends/cuda/device/kept_rows.cuh); the thread that has the target's logit writes the loss. Ragged
// rows, and those that eight blocks cannot hold, are walked twice. A row that does not count is not read.
// In place a thread writes what it alone has read. From saved sums the gradient is element by element.
// Bound by memory.
#include <cuda_runtime.h>

#include "backends/cuda/device/exp.cuh"
#include "backends/cuda/device/kept_rows.cuh"
#include "backends/cuda/device/launch.cuh"
#include "backends/cuda/device/rows.cuh"
#include "cross_entropy_args.h"
#include "mlxtape/core/registry.h"

namespace mlxtape::ops {

namespace {

using cuda::exp_for_sum;
using cuda::exp_times_constant;
using cuda::finite_reference;
using cuda::kPack;
using cuda::kWarp;
using cuda::narrow;
using cuda::Pack;
using cuda::Total;
using cuda::widen;

// The arrays of a forward call.
template <class T>
struct Rows {
  CrossEntropyArgs args;
  const T* z;                 // [R, V]
  const float* weight;        // [R]
  const std::int64_t* index;  // [R]
  const float* scale;         // [1]
  float* loss;                // [R]
  float* norm;                // [R, 2] or null
  T* dz;                      // [R, V], null without a gradient

  Rows from(std::int64_t row, std::int64_t rows) const {
    Rows some = *this;
    some.args.rows = rows;
    some.z += row * args.cols;
    some.weight += row;
    some.index += row;
    some.loss += row;
    if (norm != nullptr) some.norm += 2 * row;
    if (dz != nullptr) some.dz += row * args.cols;
    return some;
  }
  // By one thread; z_sum counts with smoothing alone.
  __device__ void write_loss(std::int64_t r, float w, Total total, float z_target,
                             float z_sum) const {
    float from_target = (total.top - z_target) * (1 - args.smoothing);
    if (args.smoothing != 0) {
      from_target += (total.top - z_sum / static_cast<float>(args.cols)) * args.smoothing;
    }
    loss[r] = w * (logf(total.sum) + from_target);
    if (norm != nullptr) {
      norm[2 * r] = total.top;
      norm[2 * r + 1] = total.sum;
    }
  }
};

// dz[v] = e·share − rest, at the target less hit, with e = exp_times_constant(z[v] − m).
template <class T>
struct Gradient {
  float share, rest, hit;
  // What exp_times_constant is too large by.
  static constexpr float kConstant = sizeof(T) == 4 ? 1.0F : 0x1p-64F;

  __device__ Gradient(const CrossEntropyArgs& args, float c, float sum)
      : share(c / sum * kConstant),
        rest(c * (args.smoothing / static_cast<float>(args.cols))),
        hit(c * (1 - args.smoothing)) {}
};

// ---- rows that are kept in registers ----

template <class F, bool kGrad, class T = typename F::T>
__global__ void __launch_bounds__(F::kBlock, F::kBlocks) forward_kept(Rows<T> rows) {
  constexpr bool kInPlace = kGrad && sizeof(T) == 4;  // exponentials are kept in the place of z
  constexpr int kStep = F::kThreads * kPack<T>;
  __shared__ float2 room[F::kWarps];
  __shared__ float sum_room[F::kWarps];
  __shared__ cuda::Gathering<F::kCluster, 3> meeting;
  cuda::wait_turn();
  meeting.open();
  const CrossEntropyArgs& args = rows.args;
  const cuda::Share<F> share(args.rows, args.cols);
  const bool in = share.row < args.rows;
  const float w = in ? rows.weight[share.row] : 0;
  const std::int64_t target = in ? rows.index[share.row] : 0;
  // Columns from this thread's first to the target.
  const std::int64_t first = share.first - share.row * args.cols;
  const int to_target = static_cast<int>(target - first);
  Pack<T> pack[F::kPacks];
#pragma unroll
  for (int j = 0; j < F::kPacks; ++j) {
    pack[j] = share.has(j) && w != 0 ? cuda::load_own_pack(rows.z + share.at(j)) : Pack<T>{};
  }
  float v[kPack<T>];
  float m = -INFINITY;
  float z_sum = 0;
  float z_target = 0;
  bool has_target = false;
#pragma unroll
  for (int j = 0; j < F::kPacks; ++j) {
    if (!share.has(j)) continue;
    cuda::unpack(pack[j], v);
#pragma unroll
    for (int i = 0; i < kPack<T>; ++i) m = cuda::max_nan(m, v[i]);
    if (args.smoothing != 0) {
#pragma unroll
      for (int i = 0; i < kPack<T>; ++i) z_sum += v[i];
    }
    const auto at = static_cast<unsigned>(to_target - j * kStep);
    if (at < kPack<T>) {
      has_target = true;
#pragma unroll
      for (unsigned i = 0; i < kPack<T>; ++i) z_target = i == at ? v[i] : z_target;
    }
  }
  // A warp's own largest number is its reference: no warp waits for another before its exponentials.
  m = cuda::lanes_max<F::kLanes>(m);
  const float reference = finite_reference(m);
  float sum = 0;
#pragma unroll
  for (int j = 0; j < F::kPacks; ++j) {
    if (!share.has(j)) continue;
    cuda::unpack(pack[j], v);
#pragma unroll
    for (int i = 0; i < kPack<T>; ++i) {
      v[i] = exp_for_sum<T>(v[i] - reference);
      sum += v[i];
    }
    if constexpr (kInPlace) pack[j] = cuda::pack_of<T>(v);
  }
  Total total{m, cuda::lanes_sum<F::kLanes>(sum)};
  if (args.smoothing != 0) z_sum = cuda::lanes_sum<F::kLanes>(z_sum);
  if constexpr (!F::kOneWarp) {
    total = cuda::total_over_warps<F::kWarps>(total, room);
    if (args.smoothing != 0) z_sum = cuda::sum_over_warps<F::kWarps>(z_sum, sum_room);
  }
  if constexpr (F::kCluster > 1) {
    meeting.tell({total.top, total.sum, z_sum});
    total = meeting.total(0, 1);
    z_sum = meeting.sum(2);
  }
  // Nobody has a target that is outside: then the row's first thread writes, NaN because of w.
  if (in && (has_target || (target < 0 && first == 0))) {
    rows.write_loss(share.row, w, total, z_target, z_sum);
  }
  if constexpr (kGrad) {
    const Gradient<T> g(args, w * *rows.scale, total.sum);
    // Two factors: their product may be too small for a number where the results are not.
    const float from_reference = kInPlace && !F::kOneWarp ? expf(m - total.top) : 1;
#pragma unroll
    for (int j = 0; j < F::kPacks; ++j) {
      if (!share.has(j)) continue;
      const auto at = static_cast<unsigned>(to_target - j * kStep);
      cuda::unpack(pack[j], v);
#pragma unroll
      for (int i = 0; i < kPack<T>; ++i) {
        if constexpr (!kInPlace) v[i] = exp_times_constant<T>(v[i] - total.top);
        v[i] = fmaf(v[i] * from_reference, g.share, -g.rest);
      }
      if (at < kPack<T>) {
#pragma unroll
        for (unsigned i = 0; i < kPack<T>; ++i) v[i] -= i == at ? g.hit : 0;
      }
      cuda::store_pack(cuda::pack_of<T>(v), rows.dz + share.at(j));
    }
  }
}

// ---- any row: walked twice ----

constexpr int kWalkers = 512;
constexpr int kWalkBlocks = 8;               // of a cluster
constexpr std::int64_t kLongWalk = 1 << 16;  // columns from which on a cluster walks together

template <class T, int kCluster>
__global__ void __launch_bounds__(kWalkers) forward_walked(Rows<T> rows) {
  constexpr std::int64_t kStep = kWalkers * kCluster;
  __shared__ float2 room[kWalkers / kWarp];
  __shared__ float sum_room[kWalkers / kWarp];
  __shared__ cuda::Gathering<kCluster, 3> meeting;
  cuda::wait_turn();
  meeting.open();
  const CrossEntropyArgs& args = rows.args;
  const std::int64_t r = blockIdx.x / kCluster;
  const std::int64_t row = r * args.cols;
  const std::int64_t first = blockIdx.x % kCluster * kWalkers + threadIdx.x;
  const float w = rows.weight[r];
  const std::int64_t target = rows.index[r];
  float m = -INFINITY;
  float sum = 0;
  float z_sum = 0;
  float z_target = 0;
  for (std::int64_t c = first; c < args.cols; c += kStep) {
    const float v = w != 0 ? widen(rows.z[row + c]) : 0;
    if (!(v <= m)) {  // larger, or NaN
      sum *= expf(m - v);
      m = v;
    }
    sum += exp_for_sum<T>(v - finite_reference(m));
    z_sum += v;
    if (c == target) z_target = v;
  }
  const float top = cuda::lanes_max(m);
  sum = cuda::lanes_sum(sum == 0 ? 0 : sum * expf(m - top));
  Total total = cuda::total_over_warps<kWalkers / kWarp>({top, sum}, room);
  z_sum = cuda::sum_over_warps<kWalkers / kWarp>(cuda::lanes_sum(z_sum), sum_room);
  if constexpr (kCluster > 1) {
    meeting.tell({total.top, total.sum, z_sum});
    total = meeting.total(0, 1);
    z_sum = meeting.sum(2);
  }
  const bool has_target = target >= first && (target - first) % kStep == 0;
  if (has_target || (target < 0 && first == 0)) rows.write_loss(r, w, total, z_target, z_sum);
  if (rows.dz == nullptr) return;
  const Gradient<T> g(args, w * *rows.scale, total.sum);
  for (std::int64_t c = first; c < args.cols; c += kStep) {
    const float z = w != 0 ? widen(rows.z[row + c]) : 0;
    float v = fmaf(exp_times_constant<T>(z - total.top), g.share, -g.rest);
    if (c == target) v -= g.hit;
    rows.dz[row + c] = narrow<T>(v);
  }
}

// ---- the gradient from saved sums ----

constexpr int kThreads = 256;
constexpr int kEach = 4;  // packs or elements a thread

// A block: kThreads·kEach packs of a row, or fewer at its end; without packs, elements.
template <class T, bool kPacked>
__global__ void __launch_bounds__(kThreads)
    backward(Rows<T> rows, std::int64_t parts, const float* norm, const float* dloss) {
  cuda::wait_turn();
  constexpr int kWidth = kPacked ? kPack<T> : 1;
  const CrossEntropyArgs& args = rows.args;
  const std::int64_t r = blockIdx.x / parts;
  const std::int64_t start = blockIdx.x % parts * kThreads * kEach * kWidth;
  const float w = rows.weight[r];
  const float m = norm[2 * r];
  const std::int64_t target = rows.index[r];
  const Gradient<T> g(args, dloss[r * args.dloss_step] * w * *rows.scale, norm[2 * r + 1]);
  const T* z = rows.z + r * args.cols;
  T* dz = rows.dz + r * args.cols;
#pragma unroll
  for (int k = 0; k < kEach; ++k) {
    const std::int64_t c =
        start + std::int64_t{k * kThreads + static_cast<int>(threadIdx.x)} * kWidth;
    if (c >= args.cols) break;
    if constexpr (kPacked) {
      float v[kPack<T>];
      cuda::unpack(w != 0 ? cuda::load_pack(z + c) : Pack<T>{}, v);
#pragma unroll
      for (int i = 0; i < kPack<T>; ++i) {
        v[i] = w != 0 ? fmaf(exp_times_constant<T>(v[i] - m), g.share, -g.rest) : 0;
        if (c + i == target) v[i] -= w != 0 ? g.hit : 0;
      }
      cuda::store_pack(cuda::pack_of<T>(v), dz + c);
    } else {
      float v = w != 0 ? fmaf(exp_times_constant<T>(widen(z[c]) - m), g.share, -g.rest) : 0;
      if (c == target && w != 0) v -= g.hit;
      dz[c] = narrow<T>(v);
    }
  }
}

// ---- launch ----

template <class T>
void cross_entropy_fwd(const KernelCall& call) {
  const auto& args = call.as<CrossEntropyArgs>();
  const Rows<T> rows{args,
                     call.input<T>(0),
                     call.input<float>(1),
                     call.input<std::int64_t>(2),
                     call.input<float>(3),
                     call.output<float>(0),
                     call.output<float>(1),
                     call.output<T>(2)};
  const auto stream = static_cast<cudaStream_t>(call.queue);
  const bool whole =
      args.cols % kPack<T> == 0 && cuda::is_aligned(rows.z) && cuda::is_aligned(rows.dz);
  if (whole && cuda::with_row_form<T>(args.cols / kPack<T>, [&]<class F>(F) {
        const auto kernel = rows.dz != nullptr ? forward_kept<F, true> : forward_kept<F, false>;
        cuda::launch(kernel, F::blocks(args.rows), F::kBlock, 0, F::kCluster, stream, rows);
      })) {
    return;
  }
  const auto walk = [&](auto cluster) {
    cuda::in_grids(args.rows, cluster(), [&](std::int64_t first, std::int64_t count) {
      cuda::launch(forward_walked<T, cluster()>, count * cluster(), kWalkers, 0, cluster(), stream,
                   rows.from(first, count));
    });
  };
  if (args.cols < kLongWalk) return walk(std::integral_constant<int, 1>());
  walk(std::integral_constant<int, kWalkBlocks>());
}

template <class T>
void cross_entropy_bwd(const KernelCall& call) {
  const auto& args = call.as<CrossEntropyArgs>();
  const Rows<T> rows{args,
                     call.input<T>(0),
                     call.input<float>(1),
                     call.input<std::int64_t>(2),
                     call.input<float>(3),
                     nullptr,
                     nullptr,
                     call.output<T>(0)};
  const auto* norm = call.input<float>(4);   // [R, 2]
  const auto* dloss = call.input<float>(5);  // [R] or [1]
  const bool whole =
      args.cols % kPack<T> == 0 && cuda::is_aligned(rows.z) && cuda::is_aligned(rows.dz);
  const std::int64_t parts =
      cuda::blocks_for(args.cols, std::int64_t{kThreads} * kEach * (whole ? kPack<T> : 1));
  const auto kernel = whole ? backward<T, true> : backward<T, false>;
  cuda::in_grids(args.rows, parts, [&](std::int64_t first, std::int64_t count) {
    cuda::launch(kernel, count * parts, kThreads, 0, 1, static_cast<cudaStream_t>(call.queue),
                 rows.from(first, count), parts, norm + 2 * first, dloss + first * args.dloss_step);
  });
}

template <class T>
void add_kernels(KernelRegistry& registry) {
  const std::string type = name_of(kDType<T>);
  registry.add(Backend::kCuda, "cross_entropy_fwd_" + type, cross_entropy_fwd<T>);
  registry.add(Backend::kCuda, "cross_entropy_bwd_" + type, cross_entropy_bwd<T>);
}

}  // namespace

void register_cross_entropy_cuda(KernelRegistry& registry) {
  add_kernels<float>(registry);
  add_kernels<F16>(registry);
  add_kernels<BF16>(registry);
}

}  // namespace mlxtape::ops
