// Kernels that move memory (arguments: core/memory_kernels.h). A strided copy has one thread per
// element of the target, so writes are contiguous.
#include "core/memory_kernels.h"

#include <cuda_runtime.h>

#include "backends/cuda/device/launch.cuh"
#include "backends/cuda/device/rows.cuh"
#include "mlxtape/core/registry.h"

namespace mlxtape::cuda {

namespace {

constexpr int kThreads = 256;

std::int64_t blocks_for_elements(std::int64_t size, std::int64_t each) {
  constexpr std::int64_t kMostBlocks = 32 * kMultiprocessors;
  return std::min((size + kThreads * each - 1) / (kThreads * each), kMostBlocks);
}

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
  const auto& args = call.as<CopyArgs>();
  std::int64_t size = 1;
  for (std::int64_t i = 0; i < args.rank; ++i) size *= args.shape[i];
  if (size == 0) return;
  launch(copy_kernel<T>, blocks_for_elements(size, 1), kThreads, 0, 1,
         static_cast<cudaStream_t>(call.queue), args, size, call.input<T>(0), call.output<T>(0));
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

template <class T>
__global__ void fill_kernel(std::int64_t size, T bits, T* to) {
  wait_turn();
  const std::int64_t step = std::int64_t{gridDim.x} * blockDim.x;
  for (std::int64_t i = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < size; i += step) {
    to[i] = bits;
  }
}

template <class T>
void fill(const KernelCall& call) {
  const auto& args = call.as<FillArgs>();
  launch(fill_kernel<T>, blocks_for_elements(args.size, 4), kThreads, 0, 1,
         static_cast<cudaStream_t>(call.queue), args.size, static_cast<T>(args.bits),
         call.output<T>(0));
}

// kEach neighbouring elements a turn: 16 bytes of the wider type, where both arrays are aligned to it.
template <class Sum, class T, int kEach>
__global__ void add_into_kernel(std::int64_t size, const T* x, Sum* sum) {
  wait_turn();
  struct alignas(sizeof(T) * kEach) Terms {
    T at[kEach];
  };
  struct alignas(sizeof(Sum) * kEach) Sums {
    Sum at[kEach];
  };
  const std::int64_t step = std::int64_t{gridDim.x} * blockDim.x * kEach;
  std::int64_t i = (std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x) * kEach;
  for (; i + kEach <= size; i += step) {
    const Terms terms = *reinterpret_cast<const Terms*>(x + i);
    Sums sums = *reinterpret_cast<const Sums*>(sum + i);
#pragma unroll
    for (int k = 0; k < kEach; ++k) {
      sums.at[k] = narrow<Sum>(widen(sums.at[k]) + widen(terms.at[k]));
    }
    *reinterpret_cast<Sums*>(sum + i) = sums;
  }
  for (; i < size; ++i) sum[i] = narrow<Sum>(widen(sum[i]) + widen(x[i]));
}

template <class Sum, class T>
void add_into_from(const KernelCall& call) {
  constexpr int kEach = 16 / static_cast<int>(std::max(sizeof(Sum), sizeof(T)));
  const std::int64_t size = call.as<AddIntoArgs>().size;
  const T* x = call.input<T>(0);
  Sum* sum = call.output<Sum>(0);
  const auto stream = static_cast<cudaStream_t>(call.queue);
  if (is_aligned(x) && is_aligned(sum)) {
    launch(add_into_kernel<Sum, T, kEach>, blocks_for_elements(size, kEach), kThreads, 0, 1, stream,
           size, x, sum);
  } else {
    launch(add_into_kernel<Sum, T, 1>, blocks_for_elements(size, 1), kThreads, 0, 1, stream, size,
           x, sum);
  }
}

template <class Sum>
void add_into(const KernelCall& call) {
  switch (static_cast<DType>(call.as<AddIntoArgs>().from)) {
    case DType::kF16: return add_into_from<Sum, F16>(call);
    case DType::kBF16: return add_into_from<Sum, BF16>(call);
    default: return add_into_from<Sum, float>(call);
  }
}

}  // namespace

void register_memory_kernels(KernelRegistry& registry) {
  registry.add(Backend::kCuda, "zero_u8", zero);
  registry.add(Backend::kCuda, "move_u8", move);
  registry.add(Backend::kCuda, "copy_u8", copy<std::uint8_t>);
  registry.add(Backend::kCuda, "copy_u16", copy<std::uint16_t>);
  registry.add(Backend::kCuda, "copy_u32", copy<std::uint32_t>);
  registry.add(Backend::kCuda, "copy_u64", copy<std::uint64_t>);
  registry.add(Backend::kCuda, "fill_u8", fill<std::uint8_t>);
  registry.add(Backend::kCuda, "fill_u16", fill<std::uint16_t>);
  registry.add(Backend::kCuda, "fill_u32", fill<std::uint32_t>);
  registry.add(Backend::kCuda, "fill_u64", fill<std::uint64_t>);
  registry.add(Backend::kCuda, "add_into_f32", add_into<float>);
  registry.add(Backend::kCuda, "add_into_f16", add_into<F16>);
  registry.add(Backend::kCuda, "add_into_bf16", add_into<BF16>);
}

}  // namespace mlxtape::cuda
