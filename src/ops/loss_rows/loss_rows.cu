// CUDA kernels of loss_rows (formula and layout: mlxtape/ops/loss_rows.h). A few numbers a row: one block, so
// that sums have one order.
#include <cuda_runtime.h>

#include "backends/cuda/device/launch.cuh"
#include "backends/cuda/device/vectors.cuh"
#include "loss_rows_args.h"
#include "mlxtape/core/registry.h"

namespace mlxtape::ops {

namespace {

using cuda::kWarp;
using cuda::widen;

constexpr int kThreads = 1024;

// The sum of v over the block, in thread 0.
__device__ float block_sum(float v) {
  __shared__ float room[kThreads / kWarp];
  v = cuda::lanes_sum(v);
  if (threadIdx.x % kWarp == 0) room[threadIdx.x / kWarp] = v;
  __syncthreads();
  return threadIdx.x < kWarp ? cuda::lanes_sum(room[threadIdx.x]) : 0;
}

__device__ float mask_at(const void* mask, LossRowsMask kind, std::int64_t r) {
  switch (kind) {
    case kLossRowsNoMask: break;
    case kLossRowsBool: return static_cast<const std::uint8_t*>(mask)[r] != 0 ? 1.0F : 0.0F;
    case kLossRowsF32: return static_cast<const float*>(mask)[r];
    case kLossRowsF16: return widen(static_cast<const F16*>(mask)[r]);
    case kLossRowsBF16: return widen(static_cast<const BF16*>(mask)[r]);
  }
  return 1;
}

template <class Target>
__global__ void __launch_bounds__(kThreads)
    weigh(LossRowsArgs args, const void* mask, const Target* targets, float* weight,
          std::int64_t* index, float* scale) {
  cuda::wait_turn();
  float sum = 0;
  for (std::int64_t r = threadIdx.x; r < args.rows; r += kThreads) {
    float w = mask_at(mask, args.mask, r);
    bool outside = false;
    if (args.has_target != 0) {
      const auto target = static_cast<std::int64_t>(targets[r]);
      if (args.ignores != 0 && target == args.ignore) w = 0;
      outside = target < 0 || target >= args.classes;
      index[r] = outside ? -1 : target;
    }
    sum += w;
    weight[r] = outside && w != 0 ? __int_as_float(0x7fc00000) : w;
  }
  sum = block_sum(sum);
  if (threadIdx.x == 0) *scale = args.mean == 0 ? 1.0F : sum == 0 ? 0.0F : 1 / sum;
}

__global__ void __launch_bounds__(kThreads)
    reduce(std::int64_t rows, const float* losses, const float* scale, float* loss) {
  cuda::wait_turn();
  float sum = 0;
  for (std::int64_t r = threadIdx.x; r < rows; r += kThreads) sum += losses[r];
  sum = block_sum(sum);
  if (threadIdx.x == 0) *loss = sum * *scale;
}

template <class Target>
void loss_rows_fwd(const KernelCall& call) {
  cuda::launch(weigh<Target>, 1, kThreads, 0, 1, static_cast<cudaStream_t>(call.queue),
               call.as<LossRowsArgs>(), call.input<void>(0), call.input<Target>(1),
               call.output<float>(0), call.output<std::int64_t>(1), call.output<float>(2));
}

void loss_rows_reduce_fwd(const KernelCall& call) {
  cuda::launch(reduce, 1, kThreads, 0, 1, static_cast<cudaStream_t>(call.queue),
               call.as<std::int64_t>(), call.input<float>(0), call.input<float>(1),
               call.output<float>(0));
}

}  // namespace

void register_loss_rows_cuda(KernelRegistry& registry) {
  registry.add(Backend::kCuda, "loss_rows_fwd_i32", loss_rows_fwd<std::int32_t>);
  registry.add(Backend::kCuda, "loss_rows_fwd_u32", loss_rows_fwd<std::uint32_t>);
  registry.add(Backend::kCuda, "loss_rows_fwd_i64", loss_rows_fwd<std::int64_t>);
  registry.add(Backend::kCuda, "loss_rows_reduce_fwd_f32", loss_rows_reduce_fwd);
}

}  // namespace mlxtape::ops
