// CUDA kernel of linear_loss (formula and layout: mlxtape/ops/linear_loss.h): gradients made for dloss = 1
// times dloss. The rest is matmul's and the losses'. Bound by memory.
#include <cuda_runtime.h>

#include "backends/cuda/device/launch.cuh"
#include "backends/cuda/device/rows.cuh"
#include "backends/cuda/device/vectors.cuh"
#include "linear_loss_args.h"
#include "mlxtape/core/registry.h"

namespace mlxtape::ops {

namespace {

constexpr int kThreads = 256;
constexpr int kEach = 4;  // packs of the output a thread; elements where they are not aligned

// A pack of the output's elements from as many of the input's.
template <class T, class X>
__device__ __forceinline__ void read(const X* x, float (&v)[cuda::kPack<T>]) {
  constexpr int kWidth = cuda::kPack<X>;
#pragma unroll
  for (int i = 0; i < cuda::kPack<T>; i += kWidth) {
    float some[kWidth];
    cuda::unpack(cuda::load_pack(x + i), some);
#pragma unroll
    for (int k = 0; k < kWidth; ++k) v[i + k] = some[k];
  }
}

template <class T, class X>
__global__ void __launch_bounds__(kThreads)
    scale_packs(std::int64_t packs, const X* x, const float* factor, T* y) {
  cuda::wait_turn();
  const float by = *factor;
  const std::int64_t first = std::int64_t{blockIdx.x} * kThreads * kEach + threadIdx.x;
#pragma unroll
  for (int k = 0; k < kEach; ++k) {
    const std::int64_t i = first + k * kThreads;
    if (i >= packs) break;
    float v[cuda::kPack<T>];
    read<T>(x + i * cuda::kPack<T>, v);
#pragma unroll
    for (float& each : v) each *= by;
    cuda::store_pack(cuda::pack_of<T>(v), y + i * cuda::kPack<T>);
  }
}

template <class T, class X>
__global__ void __launch_bounds__(kThreads)
    scale_elements(std::int64_t size, const X* x, const float* factor, T* y) {
  cuda::wait_turn();
  const float by = *factor;
  const std::int64_t first = std::int64_t{blockIdx.x} * kThreads * kEach + threadIdx.x;
#pragma unroll
  for (int k = 0; k < kEach; ++k) {
    const std::int64_t i = first + k * kThreads;
    if (i < size) y[i] = cuda::narrow<T>(cuda::widen(x[i]) * by);
  }
}

template <class T, class X>
void scale(const KernelCall& call) {
  const std::int64_t size = call.as<LinearLossArgs>().size;
  const X* x = call.input<X>(0);
  const auto* factor = call.input<float>(1);
  T* y = call.output<T>(0);
  const auto stream = static_cast<cudaStream_t>(call.queue);
  if (size % cuda::kPack<T> == 0 && cuda::is_aligned(x) && cuda::is_aligned(y)) {
    const std::int64_t packs = size / cuda::kPack<T>;
    return cuda::launch(scale_packs<T, X>, cuda::blocks_for(packs, kThreads * kEach), kThreads, 0,
                        1, stream, packs, x, factor, y);
  }
  cuda::launch(scale_elements<T, X>, cuda::blocks_for(size, kThreads * kEach), kThreads, 0, 1,
               stream, size, x, factor, y);
}

template <class T>
void linear_loss_bwd(const KernelCall& call) {
  call.as<LinearLossArgs>().from_f32 != 0 ? scale<T, float>(call) : scale<T, T>(call);
}

}  // namespace

void register_linear_loss_cuda(KernelRegistry& registry) {
  registry.add(Backend::kCuda, "linear_loss_bwd_f32", linear_loss_bwd<float>);
  registry.add(Backend::kCuda, "linear_loss_bwd_f16", linear_loss_bwd<F16>);
  registry.add(Backend::kCuda, "linear_loss_bwd_bf16", linear_loss_bwd<BF16>);
}

}  // namespace mlxtape::ops
