// Kernels that move memory (arguments: core/memory_kernels.h). A strided copy has one thread per
// element of the target, so writes are contiguous.
#include "core/memory_kernels.h"

#include <cuda_runtime.h>

#include "backends/cuda/device/launch.cuh"
#include "mlxtape/core/registry.h"

namespace mlxtape::cuda {

namespace {

template <class T>
__global__ void copy_kernel(CopyArgs args, std::int64_t size, const T* from, T* to) {
  wait_turn();
  const std::int64_t step = std::int64_t{gridDim.x} * blockDim.x;
  for (std::int64_t i = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < size; i += step) {
    std::int64_t rest = i;
    std::int64_t at = 0;
    for (std::int64_t axis = args.rank - 1; axis >= 0; --axis) {
      at += rest % args.shape[axis] * args.strides[axis];
      rest /= args.shape[axis];
    }
    to[i] = from[at];
  }
}

template <class T>
void copy(const KernelCall& call) {
  constexpr int kThreads = 256;
  constexpr std::int64_t kMostBlocks = 32 * kMultiprocessors;
  const auto& args = call.as<CopyArgs>();
  std::int64_t size = 1;
  for (std::int64_t i = 0; i < args.rank; ++i) size *= args.shape[i];
  if (size == 0) return;
  const std::int64_t blocks = std::min((size + kThreads - 1) / kThreads, kMostBlocks);
  launch(copy_kernel<T>, blocks, kThreads, 0, 1, static_cast<cudaStream_t>(call.queue), args, size,
         call.input<T>(0), call.output<T>(0));
}

void zero(const KernelCall& call) {
  check(cudaMemsetAsync(call.out[0], 0, call.as<BytesArgs>().bytes,
                        static_cast<cudaStream_t>(call.queue)),
        "filling with zeros");
}

void move(const KernelCall& call) {
  check(cudaMemcpyAsync(call.out[0], call.in[0], call.as<BytesArgs>().bytes,
                        cudaMemcpyDeviceToDevice, static_cast<cudaStream_t>(call.queue)),
        "copying");
}

}  // namespace

void register_memory_kernels(KernelRegistry& registry) {
  registry.add(Backend::kCuda, "zero_u8", zero);
  registry.add(Backend::kCuda, "move_u8", move);
  registry.add(Backend::kCuda, "copy_u8", copy<std::uint8_t>);
  registry.add(Backend::kCuda, "copy_u16", copy<std::uint16_t>);
  registry.add(Backend::kCuda, "copy_u32", copy<std::uint32_t>);
  registry.add(Backend::kCuda, "copy_u64", copy<std::uint64_t>);
}

}  // namespace mlxtape::cuda
