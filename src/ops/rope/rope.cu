// CUDA kernels of rope (formula: mlxtape/ops/rope.h). A thread has one token's pairs whose channels are two packs of 16 bytes,
// or a pack of channels that stay, and goes through the heads with their sines and cosines in registers. Where rows are no
// whole packs, pairs are neighbours, or tokens are so few that the angles' latency counts, it has one pair. Bound by memory
// from a few heads on; before, by the angle, which is made in f64.
#include <string>

#include "backends/cuda/device/launch.cuh"
#include "backends/cuda/device/rows.cuh"
#include "backends/cuda/device/vectors.cuh"
#include "mlxtape/core/registry.h"
#include "rope_args.h"

namespace mlxtape::ops {

namespace {

constexpr int kThreads = 256;

// The cosine and the sine of a pair's angle.
__device__ __forceinline__ float2 turn_of(const RopeArgs& args, const std::int32_t* offsets,
                                          const float* periods, std::int64_t b, std::int64_t t,
                                          std::int64_t j) {
  std::int64_t position = t + args.offset;
  if (args.offsets != 0) position += offsets[args.offsets == 1 ? 0 : b];
  const double f =
      periods != nullptr
          ? 1 / static_cast<double>(periods[j])
          : exp2(-static_cast<double>(j) / static_cast<double>(args.half) * args.log2_base);
  constexpr double kTurn = 6.283185307179586476925;
  const double turns =
      static_cast<double>(position) * args.scale * (args.back != 0 ? -1 : 1) * f / kTurn;
  float2 both;
  sincospif(static_cast<float>(2 * (turns - rint(turns))), &both.y,
            &both.x);  // sincosf would need a stack frame
  return both;
}

__device__ __forceinline__ std::int64_t token_start(const RopeArgs& args, std::int64_t b,
                                                    std::int64_t t) {
  return b * args.heads * args.tokens * args.cols + t * args.token_step;
}

template <class T>
__global__ void __launch_bounds__(kThreads)
    turn_packs(RopeArgs args, const T* x, const std::int32_t* offsets, const float* periods, T* y) {
  cuda::wait_turn();
  constexpr int kPack = cuda::kPack<T>;
  const std::int64_t turning = args.half / kPack;
  const std::int64_t lanes = args.cols / kPack - turning;
  const std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= args.batch * args.tokens * lanes) return;
  const std::int64_t lane = i % lanes, t = i / lanes % args.tokens, b = i / lanes / args.tokens;
  const std::int64_t start = token_start(args, b, t) + lane * kPack;
  const auto heads = static_cast<int>(args.heads);
  if (lane >= turning) {
    const std::int64_t stays = start + args.half;
#pragma unroll 4
    for (int head = 0; head < heads; ++head) {
      const std::int64_t at = stays + head * args.head_step;
      cuda::store_pack(cuda::load_pack(x + at), y + at);
    }
    return;
  }
  float c[kPack], s[kPack];
#pragma unroll
  for (int k = 0; k < kPack; ++k) {
    const float2 turn = turn_of(args, offsets, periods, b, t, lane * kPack + k);
    c[k] = turn.x;
    s[k] = turn.y;
  }
#pragma unroll 4
  for (int head = 0; head < heads; ++head) {
    const std::int64_t p = start + head * args.head_step, q = p + args.half;
    const cuda::Pack<T> low = cuda::load_pack(x + p), high = cuda::load_pack(x + q);
    float a[kPack], d[kPack];
    cuda::unpack(low, a);
    cuda::unpack(high, d);
#pragma unroll
    for (int k = 0; k < kPack; ++k) {
      const float turned = a[k] * c[k] - d[k] * s[k];
      d[k] = fmaf(a[k], s[k], d[k] * c[k]);
      a[k] = turned;
    }
    cuda::store_pack(cuda::pack_of<T>(a), y + p);
    cuda::store_pack(cuda::pack_of<T>(d), y + q);
  }
}

template <class T>
__global__ void __launch_bounds__(kThreads)
    turn(RopeArgs args, const T* x, const std::int32_t* offsets, const float* periods, T* y) {
  cuda::wait_turn();
  const std::int64_t lanes = args.cols - args.half;  // pairs and channels that stay
  const std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= args.batch * args.tokens * lanes) return;
  const std::int64_t j = i % lanes;
  const std::int64_t t = i / lanes % args.tokens;
  const std::int64_t b = i / lanes / args.tokens;
  const std::int64_t step = args.head_step;
  const std::int64_t at = token_start(args, b, t);
  x += at;
  y += at;
  if (j >= args.half) {
    for (std::int64_t head = 0; head < args.heads; ++head) {
      y[head * step + j + args.half] = x[head * step + j + args.half];
    }
    return;
  }
  const auto [c, s] = turn_of(args, offsets, periods, b, t, j);
  const std::int64_t p = args.traditional != 0 ? 2 * j : j;
  const std::int64_t q = args.traditional != 0 ? 2 * j + 1 : j + args.half;
  for (std::int64_t head = 0; head < args.heads; ++head) {
    const float a = cuda::widen(x[head * step + p]);
    const float d = cuda::widen(x[head * step + q]);
    y[head * step + p] = cuda::narrow<T>(a * c - d * s);
    y[head * step + q] = cuda::narrow<T>(fmaf(a, s, d * c));
  }
}

// Are there many tokens, and are all rows of x and y, and their halves, whole packs?
template <class T>
bool in_packs(const RopeArgs& args, const T* x, const T* y) {
  const auto whole = [](std::int64_t n) {
    return n % cuda::kPack<T> == 0;
  };
  return args.batch * args.tokens >= 256 && args.traditional == 0 && whole(args.half) &&
         whole(args.cols) && whole(args.head_step) && whole(args.token_step) &&
         cuda::is_aligned(x) && cuda::is_aligned(y);
}

template <class T>
void rope_fwd(const KernelCall& call) {
  const auto& args = call.as<RopeArgs>();
  const T* x = call.input<T>(0);
  T* y = call.output<T>(0);
  const auto* offsets = call.input<std::int32_t>(1);
  const auto* periods = call.input<float>(2);
  auto* stream = static_cast<cudaStream_t>(call.queue);
  if (in_packs(args, x, y)) {
    const std::int64_t packs =
        args.batch * args.tokens * ((args.cols - args.half) / cuda::kPack<T>);
    cuda::launch(turn_packs<T>, cuda::blocks_for(packs, kThreads), kThreads, 0, 1, stream, args, x,
                 offsets, periods, y);
    return;
  }
  const std::int64_t threads = args.batch * args.tokens * (args.cols - args.half);
  cuda::launch(turn<T>, cuda::blocks_for(threads, kThreads), kThreads, 0, 1, stream, args, x,
               offsets, periods, y);
}

}  // namespace

void register_rope_cuda(KernelRegistry& registry) {
  registry.add(Backend::kCuda, "rope_fwd_f32", rope_fwd<float>);
  registry.add(Backend::kCuda, "rope_fwd_f16", rope_fwd<F16>);
  registry.add(Backend::kCuda, "rope_fwd_bf16", rope_fwd<BF16>);
}

}  // namespace mlxtape::ops
