// CUDA kernels of take (formula and layout: mlxtape/ops/take.h). A thread moves four times 16 bytes of rows, or one
// element where rows are not whole 16 bytes; its reads are all under way before the first is stored. Bound by memory.
#include <cuda_runtime.h>

#include <string>

#include "backends/cuda/device/index.cuh"
#include "backends/cuda/device/launch.cuh"
#include "backends/cuda/device/places.cuh"
#include "backends/cuda/device/rows.cuh"
#include "mlxtape/core/registry.h"
#include "take_args.h"

namespace mlxtape::ops {

namespace {

constexpr int kThreads = 256;
constexpr int kEach = 4;

// T: what is moved at once; width and strides count it.
template <class T>
__global__ void __launch_bounds__(kThreads)
    take(TakeArgs a, std::int64_t size, const T* x, const void* indices, T* y) {
  cuda::wait_turn();
  const std::int64_t first = std::int64_t{blockIdx.x} * (kThreads * kEach) + threadIdx.x;
  const auto type = static_cast<DType>(a.index_type);
  T v[kEach];
#pragma unroll
  for (int k = 0; k < kEach; ++k) {
    v[k] = T{};
    const std::int64_t e = first + k * kThreads;
    if (e >= size) continue;
    std::int64_t i, j;
    const std::int64_t row = cuda::divide(e, a.width, i);
    const std::int64_t o = cuda::divide(row, a.count, j);
    const std::uint64_t p = cuda::place_of(indices, type, j, a.length);
    if (p < static_cast<std::uint64_t>(a.length)) {
      v[k] = x[o * a.outer_stride + static_cast<std::int64_t>(p) * a.axis_stride + i];
    }
  }
#pragma unroll
  for (int k = 0; k < kEach; ++k) {
    const std::int64_t e = first + k * kThreads;
    if (e < size) y[e] = v[k];
  }
}

template <class T>
void launch_take(const KernelCall& call, const TakeArgs& a) {
  const std::int64_t size = a.outer * a.count * a.width;
  cuda::launch(take<T>, cuda::blocks_for(size, kThreads * kEach), kThreads, 0, 1,
               static_cast<cudaStream_t>(call.queue), a, size, call.input<T>(0),
               call.input<void>(1), call.output<T>(0));
}

template <class T>
void take_fwd(const KernelCall& call) {
  TakeArgs a = call.as<TakeArgs>();
  constexpr std::int64_t kPack = 16 / static_cast<std::int64_t>(sizeof(T));
  if (a.outer == 1) a.outer_stride = 0;  // nobody steps along it
  const bool packs = a.width % kPack == 0 && a.outer_stride % kPack == 0 &&
                     a.axis_stride % kPack == 0 && cuda::is_aligned(call.in[0]) &&
                     cuda::is_aligned(call.out[0]);
  if (!packs) return launch_take<T>(call, a);
  a.width /= kPack;
  a.outer_stride /= kPack;
  a.axis_stride /= kPack;
  launch_take<uint4>(call, a);
}

struct IndexTensors {
  const void* at[kTakeMostAxes];
};

__global__ void __launch_bounds__(kThreads)
    find_places(__grid_constant__ const TakePlacesArgs a, __grid_constant__ const IndexTensors in,
                std::int64_t* places) {
  cuda::wait_turn();
  const std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= a.count) return;
  std::int64_t place = 0;
  for (int k = 0; k < a.axes; ++k) {
    const std::int64_t length = a.lengths[k];
    const std::uint64_t p =
        cuda::place_of(in.at[k], static_cast<DType>(a.index_types[k]), i, length);
    const bool outside = p >= static_cast<std::uint64_t>(length) || place == kTakeNowhere;
    place = outside ? kTakeNowhere : place * length + static_cast<std::int64_t>(p);
  }
  places[i] = place;
}

void take_places(const KernelCall& call) {
  const auto& a = call.as<TakePlacesArgs>();
  IndexTensors in{};
  for (std::size_t k = 0; k < static_cast<std::size_t>(a.axes); ++k) in.at[k] = call.in[k];
  cuda::launch(find_places, cuda::blocks_for(a.count, kThreads), kThreads, 0, 1,
               static_cast<cudaStream_t>(call.queue), a, in, call.output<std::int64_t>(0));
}

}  // namespace

void register_take_cuda(KernelRegistry& registry) {
  registry.add(Backend::kCuda, "take_fwd_u8", take_fwd<std::uint8_t>);
  registry.add(Backend::kCuda, "take_fwd_u16", take_fwd<std::uint16_t>);
  registry.add(Backend::kCuda, "take_fwd_u32", take_fwd<std::uint32_t>);
  registry.add(Backend::kCuda, "take_fwd_u64", take_fwd<std::uint64_t>);
  registry.add(Backend::kCuda, "take_places_i64", take_places);
}

}  // namespace mlxtape::ops
