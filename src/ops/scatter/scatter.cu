// CUDA kernels of scatter (formula and layout: mlxtape/ops/scatter.h). A thread an element of values. Which of those that
// meet in one place is the last is found first, by the largest number, in scratch memory of y's size: an order of the
// writes themselves would leave most threads waiting. Bound by the sectors of y and scratch that are touched.
#include <cuda_runtime.h>

#include <string>

#include "backends/cuda/device/index.cuh"
#include "backends/cuda/device/launch.cuh"
#include "backends/cuda/device/places.cuh"
#include "backends/cuda/device/rows.cuh"
#include "mlxtape/core/registry.h"
#include "scatter_args.h"

namespace mlxtape::ops {

namespace {

constexpr int kThreads = 256;

__global__ void __launch_bounds__(kThreads) clear(std::int64_t n, unsigned* last) {
  cuda::wait_turn();
  const std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i < n) last[i] = 0;
}

// Where element e of values goes, -1: nowhere; j: its number along the axis.
__device__ __forceinline__ std::int64_t target_of(const ScatterArgs& a, const void* indices,
                                                  std::int64_t e, std::int64_t& j) {
  std::int64_t i;
  const std::int64_t row = cuda::divide(e, a.width, i);
  const std::int64_t o = cuda::divide(row, a.count, j);
  const std::uint64_t p = cuda::place_of(indices, static_cast<DType>(a.index_type), e, a.length);
  if (p >= static_cast<std::uint64_t>(a.length)) return -1;
  return (o * a.length + static_cast<std::int64_t>(p)) * a.width + i;
}

__global__ void __launch_bounds__(kThreads)
    find_last(ScatterArgs a, std::int64_t size, const void* indices, unsigned* last) {
  cuda::wait_turn();
  const std::int64_t e = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (e >= size) return;
  std::int64_t j;
  const std::int64_t to = target_of(a, indices, e, j);
  if (to >= 0) atomicMax(last + to, static_cast<unsigned>(j) + 1);
}

template <class T>
__global__ void __launch_bounds__(kThreads)
    put(ScatterArgs a, std::int64_t size, const void* indices, const T* values,
        const unsigned* last, T* y) {
  cuda::wait_turn();
  const std::int64_t e = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (e >= size) return;
  std::int64_t j;
  const std::int64_t to = target_of(a, indices, e, j);
  if (to >= 0 && last[to] == static_cast<unsigned>(j) + 1) y[to] = values[e];
}

std::size_t scatter_workspace(const void* args) {
  const auto& a = *static_cast<const ScatterArgs*>(args);
  return static_cast<std::size_t>(a.outer * a.length * a.width) * sizeof(unsigned);
}

template <class T>
void scatter_put(const KernelCall& call) {
  const auto& a = call.as<ScatterArgs>();
  const auto stream = static_cast<cudaStream_t>(call.queue);
  const auto* indices = call.input<void>(0);
  auto* last = static_cast<unsigned*>(call.workspace);
  const std::int64_t all = a.outer * a.length * a.width, size = a.outer * a.count * a.width;
  const std::int64_t blocks = cuda::blocks_for(size, kThreads);
  cuda::launch(clear, cuda::blocks_for(all, kThreads), kThreads, 0, 1, stream, all, last);
  cuda::launch(find_last, blocks, kThreads, 0, 1, stream, a, size, indices, last);
  cuda::launch(put<T>, blocks, kThreads, 0, 1, stream, a, size, indices, call.input<T>(1),
               static_cast<const unsigned*>(last), call.output<T>(0));
}

template <class T>
void add_kernel(KernelRegistry& registry) {
  registry.add(Backend::kCuda, std::string("scatter_put_") + name_of(kDType<T>), scatter_put<T>,
               scatter_workspace);
}

}  // namespace

void register_scatter_cuda(KernelRegistry& registry) {
  add_kernel<std::uint8_t>(registry);
  add_kernel<std::uint16_t>(registry);
  add_kernel<std::uint32_t>(registry);
  add_kernel<std::uint64_t>(registry);
}

}  // namespace mlxtape::ops
