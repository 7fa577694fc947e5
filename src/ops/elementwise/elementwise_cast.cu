// CUDA kernels of the elementwise family: casts between all types but f64. A thread converts 8 neighbours, read
// and written as vectors where the addresses allow it.
#include <cuda_runtime.h>

#include <limits>
#include <string>

#include "backends/cuda/device/launch.cuh"
#include "backends/cuda/device/rows.cuh"
#include "elementwise_args.h"
#include "mlxtape/base/dtype.h"
#include "mlxtape/core/registry.h"

namespace mlxtape::ops {

namespace {

constexpr int kThreads = 256;
constexpr int kEach = 8;

template <class T>
constexpr bool kIsHalf = std::is_same_v<T, F16> || std::is_same_v<T, BF16>;

// As convert() on the host: rounded once, floats to integers cut off and clamped, NaN to 0.
template <class To, class From>
__device__ __forceinline__ To converted(From v) {
  if constexpr (kIsHalf<From>) {
    if constexpr (std::is_same_v<To, From>) return v;
    return converted<To>(cuda::widen(v));
  } else if constexpr (std::is_same_v<To, bool>) {
    return v != From(0);
  } else if constexpr (std::is_same_v<From, bool>) {
    return converted<To>(static_cast<std::int32_t>(v));
  } else if constexpr (std::is_same_v<From, float> && std::is_integral_v<To>) {
    constexpr int kDigits = std::numeric_limits<To>::digits;
    const float end =
        kDigits == 64 ? 0x1p64F : static_cast<float>(std::uint64_t{1} << (kDigits % 64));
    if (v != v) return 0;
    if (v >= end) return std::numeric_limits<To>::max();
    if (v <= (std::is_signed_v<To> ? -end : 0.0F)) return std::numeric_limits<To>::min();
    return static_cast<To>(v);
  } else if constexpr (kIsHalf<To> && std::is_integral_v<From>) {
    // Through f32, rounded to odd where it is not exact, so that there is one rounding in effect.
    float nearest = static_cast<float>(v);
    if constexpr (sizeof(From) >= 4) {
      const bool below = std::is_signed_v<From> && v < From(0);
      const std::uint64_t size =
          below ? ~static_cast<std::uint64_t>(v) + 1 : static_cast<std::uint64_t>(v);
      const int excess = 40 - __clzll(static_cast<long long>(size));  // bits beyond 24
      if (size != 0 && excess > 0) {
        const std::uint64_t lost = size & ((std::uint64_t{1} << excess) - 1);
        const float odd =
            ldexpf(static_cast<float>((size >> excess) | (lost != 0 ? 1U : 0U)), excess);
        nearest = below ? -odd : odd;
      }
    }
    return cuda::narrow<To>(nearest);
  } else if constexpr (kIsHalf<To>) {
    return cuda::narrow<To>(v);
  } else {
    return static_cast<To>(v);
  }
}

template <class T>
struct alignas(sizeof(T) * kEach >= 16 ? 16 : sizeof(T) * kEach) Eight {
  T v[kEach];
};

template <class From, class To>
__global__ void __launch_bounds__(kThreads)
    cast_kernel(std::int64_t size, bool in_vectors, const From* x, To* y) {
  cuda::wait_turn();
  const std::int64_t at = (std::int64_t{blockIdx.x} * kThreads + threadIdx.x) * kEach;
  if (in_vectors && at + kEach <= size) {
    const Eight<From> from = *reinterpret_cast<const Eight<From>*>(x + at);
    Eight<To> to;
#pragma unroll
    for (int i = 0; i < kEach; ++i) to.v[i] = converted<To>(from.v[i]);
    *reinterpret_cast<Eight<To>*>(y + at) = to;
    return;
  }
  for (std::int64_t i = at; i < min(at + kEach, size); ++i) y[i] = converted<To>(x[i]);
}

template <class From, class To>
void cast(const KernelCall& call) {
  const std::int64_t size = call.as<CastArgs>().size;
  const From* x = call.input<From>(0);
  To* y = call.output<To>(0);
  cuda::launch(cast_kernel<From, To>, cuda::blocks_for(size, kThreads * kEach), kThreads, 0, 1,
               static_cast<cudaStream_t>(call.queue), size,
               cuda::is_aligned(x) && cuda::is_aligned(y), x, y);
}

template <class From, class To>
void add_cast(KernelRegistry& registry) {
  if constexpr (!std::is_same_v<From, To>) {
    registry.add(Backend::kCuda,
                 std::string("cast_") + name_of(kDType<From>) + "_" + name_of(kDType<To>),
                 cast<From, To>);
  }
}

template <class... Types>
struct List {};
template <class From, class... To>
void add_from(KernelRegistry& registry, List<To...>) {
  (add_cast<From, To>(registry), ...);
}
template <class... From>
void add_all(KernelRegistry& registry, List<From...> types) {
  (add_from<From>(registry, types), ...);
}

}  // namespace

void register_elementwise_cast_cuda(KernelRegistry& registry) {
  add_all(registry,
          List<bool, std::uint8_t, std::uint16_t, std::uint32_t, std::uint64_t, std::int8_t,
               std::int16_t, std::int32_t, std::int64_t, F16, BF16, float>());
}

}  // namespace mlxtape::ops
