// CUDA kernels of rope (formula: mlxtape/ops/rope.h). A thread has one pair of channels of one token and goes
// through the heads with its sine and cosine, or one of the channels that stay. Bound by memory from a few
// heads on; before, by the angle, which is made in f64.
#include <string>

#include "backends/cuda/device/launch.cuh"
#include "backends/cuda/device/rows.cuh"
#include "backends/cuda/device/vectors.cuh"
#include "mlxtape/core/registry.h"
#include "rope_args.h"

namespace mlxtape::ops {

namespace {

constexpr int kThreads = 256;

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
  const std::int64_t at = b * args.heads * args.tokens * args.cols + t * args.token_step;
  x += at;
  y += at;
  if (j >= args.half) {
    for (std::int64_t head = 0; head < args.heads; ++head) {
      y[head * step + j + args.half] = x[head * step + j + args.half];
    }
    return;
  }
  std::int64_t position = t + args.offset;
  if (args.offsets != 0) position += offsets[args.offsets == 1 ? 0 : b];
  const double f =
      periods != nullptr
          ? 1 / static_cast<double>(periods[j])
          : exp2(-static_cast<double>(j) / static_cast<double>(args.half) * args.log2_base);
  constexpr double kTurn = 6.283185307179586476925;
  const double turns =
      static_cast<double>(position) * args.scale * (args.back != 0 ? -1 : 1) * f / kTurn;
  float s, c;
  sincospif(static_cast<float>(2 * (turns - rint(turns))), &s,
            &c);  // sincosf would need a stack frame
  const std::int64_t p = args.traditional != 0 ? 2 * j : j;
  const std::int64_t q = args.traditional != 0 ? 2 * j + 1 : j + args.half;
  for (std::int64_t head = 0; head < args.heads; ++head) {
    const float a = cuda::widen(x[head * step + p]);
    const float d = cuda::widen(x[head * step + q]);
    y[head * step + p] = cuda::narrow<T>(a * c - d * s);
    y[head * step + q] = cuda::narrow<T>(fmaf(a, s, d * c));
  }
}

template <class T>
void rope_fwd(const KernelCall& call) {
  const auto& args = call.as<RopeArgs>();
  const std::int64_t threads = args.batch * args.tokens * (args.cols - args.half);
  cuda::launch(turn<T>, cuda::blocks_for(threads, kThreads), kThreads, 0, 1,
               static_cast<cudaStream_t>(call.queue), args, call.input<T>(0),
               call.input<std::int32_t>(1), call.input<float>(2), call.output<T>(0));
}

}  // namespace

void register_rope_cuda(KernelRegistry& registry) {
  registry.add(Backend::kCuda, "rope_fwd_f32", rope_fwd<float>);
  registry.add(Backend::kCuda, "rope_fwd_f16", rope_fwd<F16>);
  registry.add(Backend::kCuda, "rope_fwd_bf16", rope_fwd<BF16>);
}

}  // namespace mlxtape::ops
