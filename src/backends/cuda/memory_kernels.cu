// Kernels that move memory (arguments: core/memory_kernels.h).
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

// One thread an element, in the order of the target.
template <class T, class Index>
__global__ void copy_kernel(CopyArgs args, Index size, const T* from, T* to) {
  wait_turn();
  const Index step = static_cast<Index>(gridDim.x) * blockDim.x;
  for (Index i = static_cast<Index>(blockIdx.x) * blockDim.x + threadIdx.x; i < size; i += step) {
    Index rest = i;
    std::int64_t at = 0, target = 0;
    for (int axis = static_cast<int>(args.rank) - 1; axis >= 0; --axis) {
      const auto n = static_cast<Index>(args.shape[axis]);
      const auto k = static_cast<std::int64_t>(rest % n);
      at += k * args.from[axis];
      target += k * args.to[axis];
      rest /= n;
    }
    to[target] = from[at];
  }
}

// The source is contiguous along axis a, the target along the last: squares of 64 x 64 through shared memory,
// so that both are read and written in whole lines, 16 elements of a thread under way at once. A block has one
// strip of a and walks the last axis.
constexpr int kTile = 64;
constexpr int kLanes = 32;
constexpr int kTileRows = kThreads / kLanes;

// Where an outer position lies in both tensors; axes [0, count) but skip.
template <class T>
__device__ __forceinline__ void move_to(const CopyArgs& args, int count, int skip,
                                        std::int64_t position, const T*& from, T*& to) {
  for (int axis = count - 1; axis >= 0; --axis) {
    if (axis == skip) continue;
    const std::int64_t k = position % args.shape[axis];
    from += k * args.from[axis];
    to += k * args.to[axis];
    position /= args.shape[axis];
  }
}

template <class T>
__global__ void __launch_bounds__(kThreads)
    copy_tiles(CopyArgs args, int a, std::int64_t strips, const T* from, T* to) {
  wait_turn();
  __shared__ T tile[kTile][kTile + 1];
  const int b = static_cast<int>(args.rank) - 1;
  const int x = threadIdx.x % kLanes;
  const int y = threadIdx.x / kLanes;
  const std::int64_t first = blockIdx.x % strips * kTile;
  move_to(args, b, a, blockIdx.x / strips, from, to);
  for (std::int64_t c = std::int64_t{blockIdx.y} * kTile; c < args.shape[b];
       c += std::int64_t{gridDim.y} * kTile) {
#pragma unroll
    for (int j = y; j < kTile; j += kTileRows) {
#pragma unroll
      for (int i = x; i < kTile; i += kLanes) {
        if (first + i < args.shape[a] && c + j < args.shape[b]) {
          tile[j][i] = from[first + i + (c + j) * args.from[b]];
        }
      }
    }
    __syncthreads();
#pragma unroll
    for (int i = y; i < kTile; i += kTileRows) {
#pragma unroll
      for (int j = x; j < kTile; j += kLanes) {
        if (first + i < args.shape[a] && c + j < args.shape[b]) {
          to[(first + i) * args.to[a] + (c + j) * args.to[b]] = tile[j][i];
        }
      }
    }
    __syncthreads();
  }
}

// Both are contiguous along the last axis: a block copies one piece of one row, kEach units of 16 bytes or of
// one element a thread.
constexpr int kEach = 8;

template <class T, class Unit>
__global__ void __launch_bounds__(kThreads) copy_rows(CopyArgs args, const T* from, T* to) {
  wait_turn();
  const int last = static_cast<int>(args.rank) - 1;
  move_to(args, last, -1, blockIdx.x, from, to);
  const std::int64_t units = args.shape[last] * static_cast<std::int64_t>(sizeof(T)) /
                             static_cast<std::int64_t>(sizeof(Unit));
  const std::int64_t first = std::int64_t{blockIdx.y} * kThreads * kEach + threadIdx.x;
  const auto* source = reinterpret_cast<const Unit*>(from);
  auto* target = reinterpret_cast<Unit*>(to);
  Unit moved[kEach];
#pragma unroll
  for (int k = 0; k < kEach; ++k) {
    if (first + k * kThreads < units) moved[k] = source[first + k * kThreads];
  }
#pragma unroll
  for (int k = 0; k < kEach; ++k) {
    if (first + k * kThreads < units) target[first + k * kThreads] = moved[k];
  }
}

// false: rows are too short, or too many for a grid.
template <class T>
bool copy_as_rows(const CopyArgs& args, std::int64_t size, const KernelCall& call) {
  const std::int64_t last = args.rank - 1;
  if (last < 0 || args.from[last] != 1 || args.to[last] != 1 || args.shape[last] < kThreads) {
    return false;
  }
  constexpr std::int64_t kPack = 16 / sizeof(T);
  bool packs = args.shape[last] % kPack == 0 && is_aligned(call.in[0]) && is_aligned(call.out[0]);
  for (std::int64_t i = 0; i < last; ++i) {
    packs = packs && args.from[i] % kPack == 0 && args.to[i] % kPack == 0;
  }
  const std::int64_t units = packs ? args.shape[last] / kPack : args.shape[last];
  const std::int64_t pieces = blocks_for(units, kThreads * kEach);
  if (pieces > 65535) return false;
  const auto run = [&](auto kernel) {
    launch(kernel, Blocks(size / args.shape[last], pieces), kThreads, 0, 1,
           static_cast<cudaStream_t>(call.queue), args, call.input<T>(0), call.output<T>(0));
  };
  packs ? run(copy_rows<T, uint4>) : run(copy_rows<T, T>);
  return true;
}

template <class T>
void copy(const KernelCall& call) {
  const auto& args = call.as<CopyArgs>();
  const auto stream = static_cast<cudaStream_t>(call.queue);
  std::int64_t size = 1;
  for (std::int64_t i = 0; i < args.rank; ++i) size *= args.shape[i];
  if (copy_as_rows<T>(args, size, call)) return;
  const std::int64_t last = args.rank - 1;
  for (std::int64_t a = 0; a < last && args.from[last] != 1; ++a) {
    if (args.from[a] != 1 || args.shape[a] < 8 || args.shape[last] < 8) continue;
    const std::int64_t strips = blocks_for(args.shape[a], kTile);
    const std::int64_t across = std::min<std::int64_t>(blocks_for(args.shape[last], kTile), 64);
    launch(copy_tiles<T>, Blocks(size / args.shape[a] / args.shape[last] * strips, across),
           kThreads, 0, 1, stream, args, static_cast<int>(a), strips, call.input<T>(0),
           call.output<T>(0));
    return;
  }
  if (size < std::int64_t{1} << 31) {
    launch(copy_kernel<T, std::uint32_t>, blocks_for_elements(size, 1), kThreads, 0, 1, stream,
           args, static_cast<std::uint32_t>(size), call.input<T>(0), call.output<T>(0));
  } else {
    launch(copy_kernel<T, std::uint64_t>, blocks_for_elements(size, 1), kThreads, 0, 1, stream,
           args, static_cast<std::uint64_t>(size), call.input<T>(0), call.output<T>(0));
  }
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
