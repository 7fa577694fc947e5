// CUDA kernels of delta_gates (formula: mlxtape/ops/delta_gates.h). A thread has a token's head. At 32 heads a token
// has 384 bytes: bound by the launch up to some ten thousand tokens.
#include "backends/cuda/device/exp.cuh"
#include "backends/cuda/device/launch.cuh"
#include "backends/cuda/device/rows.cuh"
#include "backends/cuda/device/vectors.cuh"
#include "delta_gates_args.h"
#include "mlxtape/core/registry.h"

namespace mlxtape::ops {

namespace {

constexpr int kThreads = 256;

__device__ __forceinline__ float softplus(float z) { return fmaxf(z, 0) + log1pf(expf(-fabsf(z))); }

template <class T>
__global__ void __launch_bounds__(kThreads)
    forward(DeltaGatesArgs args, const T* a, const T* b, const float* a_log, const float* dt_bias,
            float* decay, float* beta) {
  cuda::wait_turn();
  const std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= args.tokens * args.heads) return;
  const std::int64_t h = i % args.heads;
  decay[i] = -expf(a_log[h]) * softplus(cuda::widen(a[i]) + dt_bias[h]);
  beta[i] = cuda::sigmoid<float>(cuda::widen(b[i])).value;
}

template <class T>
__global__ void __launch_bounds__(kThreads)
    backward(DeltaGatesArgs args, const T* a, const T* b, const float* a_log, const float* dt_bias,
             const float* d_decay, const float* d_beta, T* da, T* db, float* rates, float* shifts) {
  cuda::wait_turn();
  const std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= args.tokens * args.heads) return;
  const std::int64_t h = i % args.heads;
  const float z = cuda::widen(a[i]) + dt_bias[h];
  const float speed = -(d_decay != nullptr ? d_decay[i] : 0) * expf(a_log[h]);
  const float dz = speed * cuda::sigmoid<float>(z).value;
  da[i] = cuda::narrow<T>(dz);
  rates[i] = speed * softplus(z);
  shifts[i] = dz;
  const cuda::Sigmoid s = cuda::sigmoid<float>(cuda::widen(b[i]));
  db[i] = cuda::narrow<T>((d_beta != nullptr ? d_beta[i] : 0) * (s.value * s.rest));
}

template <class T>
void delta_gates_fwd(const KernelCall& call) {
  const auto& args = call.as<DeltaGatesArgs>();
  cuda::launch(forward<T>, cuda::blocks_for(args.tokens * args.heads, kThreads), kThreads, 0, 1,
               static_cast<cudaStream_t>(call.queue), args, call.input<T>(0), call.input<T>(1),
               call.input<float>(2), call.input<float>(3), call.output<float>(0),
               call.output<float>(1));
}

template <class T>
void delta_gates_bwd(const KernelCall& call) {
  const auto& args = call.as<DeltaGatesArgs>();
  cuda::launch(backward<T>, cuda::blocks_for(args.tokens * args.heads, kThreads), kThreads, 0, 1,
               static_cast<cudaStream_t>(call.queue), args, call.input<T>(0), call.input<T>(1),
               call.input<float>(2), call.input<float>(3), call.input<float>(4),
               call.input<float>(5), call.output<T>(0), call.output<T>(1), call.output<float>(2),
               call.output<float>(3));
}

}  // namespace

void register_delta_gates_cuda(KernelRegistry& registry) {
  registry.add(Backend::kCuda, "delta_gates_fwd_f32", delta_gates_fwd<float>);
  registry.add(Backend::kCuda, "delta_gates_fwd_f16", delta_gates_fwd<F16>);
  registry.add(Backend::kCuda, "delta_gates_fwd_bf16", delta_gates_fwd<BF16>);
  registry.add(Backend::kCuda, "delta_gates_bwd_f32", delta_gates_bwd<float>);
  registry.add(Backend::kCuda, "delta_gates_bwd_f16", delta_gates_bwd<F16>);
  registry.add(Backend::kCuda, "delta_gates_bwd_bf16", delta_gates_bwd<BF16>);
}

}  // namespace mlxtape::ops
