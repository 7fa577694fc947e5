// Metal kernels of linear_loss (formula and layout: mlxtape/ops/linear_loss.h): gradients made for dloss = 1 times dloss. The
// rest is matmul's and the losses'. A thread has four packs of the output, or four elements where those are not aligned.
// Bound by memory. Threads of a group: 256. No threadgroup memory; about 20 registers.
#include "linear_loss_args.h"

#ifdef __METAL_VERSION__

#include "backends/metal/device/vectors.h"

constant constexpr uint kThreads = 256;
constant constexpr uint kEach = 4;

// A pack of the output's elements from as many of the input's.
template <typename T, typename X>
inline void read_pack(device const X* x, thread float* v) {
  for (int i = 0; i < Pack<T>::kCount; i += Pack<X>::kCount) {
    Pack<X>::unpack(load_pack(x + i), v + i);
  }
}

template <typename T, typename X>
[[kernel, max_total_threads_per_threadgroup(256)]] void linear_loss_bwd_packs(
    device const X* x [[buffer(0)]], device const float* dloss [[buffer(1)]],
    device T* y [[buffer(2)]], constant LinearLossArgs& args [[buffer(3)]],
    constant uint& first_group [[buffer(30)]], uint group [[threadgroup_position_in_grid]],
    uint index [[thread_position_in_threadgroup]]) {
  const float by = dloss[0];
  const long first = (long(group) + first_group) * (kThreads * kEach) + index;
  const long count = args.size / Pack<T>::kCount;
  float v[Pack<T>::kCount];
  for (uint k = 0; k < kEach; ++k) {
    const long i = first + k * kThreads;
    if (i >= count) break;
    read_pack<T, X>(x + i * Pack<T>::kCount, v);
    for (int j = 0; j < Pack<T>::kCount; ++j) v[j] *= by;
    store_pack(Pack<T>::pack(v), y + i * Pack<T>::kCount);
  }
}

template <typename T, typename X>
[[kernel, max_total_threads_per_threadgroup(256)]] void linear_loss_bwd_elements(
    device const X* x [[buffer(0)]], device const float* dloss [[buffer(1)]],
    device T* y [[buffer(2)]], constant LinearLossArgs& args [[buffer(3)]],
    constant uint& first_group [[buffer(30)]], uint group [[threadgroup_position_in_grid]],
    uint index [[thread_position_in_threadgroup]]) {
  const float by = dloss[0];
  const long first = (long(group) + first_group) * (kThreads * kEach) + index;
  for (uint k = 0; k < kEach; ++k) {
    const long i = first + k * kThreads;
    if (i < args.size) y[i] = narrow<T>(widen(x[i]) * by);
  }
}

#define MAKE(name, ...) template [[host_name(name)]] [[kernel]] decltype(__VA_ARGS__) __VA_ARGS__;
#define MAKE_BOTH(from, type, T, X)                                        \
  MAKE("linear_loss_bwd_packs" from "_" type, linear_loss_bwd_packs<T, X>) \
  MAKE("linear_loss_bwd_elements" from "_" type, linear_loss_bwd_elements<T, X>)
MAKE_BOTH("", "f32", float, float)
MAKE_BOTH("", "f16", half, half)
MAKE_BOTH("", "bf16", bf16, bf16)
MAKE_BOTH("_of_f32", "f16", half, float)
MAKE_BOTH("_of_f32", "bf16", bf16, float)

#else

#include "backends/metal/launch.h"

namespace mlxtape::ops {

namespace {

constexpr std::int64_t kThreads = 256;
constexpr std::int64_t kEach = 4;

template <class T>
void linear_loss_bwd(const KernelCall& call) {
  const auto& args = call.as<LinearLossArgs>();
  constexpr std::int64_t kPack = 16 / sizeof(T);
  const bool of_f32 = args.from_f32 != 0 && sizeof(T) != 4;
  const bool packs =
      args.size % kPack == 0 && metal::is_aligned(call.in[0]) && metal::is_aligned(call.out[0]);
  const std::int64_t count = packs ? args.size / kPack : args.size;
  const char* name =
      packs ? (of_f32 ? "linear_loss_bwd_packs_of_f32" : "linear_loss_bwd_packs")
            : (of_f32 ? "linear_loss_bwd_elements_of_f32" : "linear_loss_bwd_elements");
  metal::Launch(call, metal::kernel<T>(name))
      .buffers()
      .in_parts()
      .groups(ceil_div(count, kThreads * kEach))
      .threads(kThreads)
      .run();
}

}  // namespace

void register_linear_loss_metal(KernelRegistry& registry) {
  registry.add(Backend::kMetal, "linear_loss_bwd_f32", linear_loss_bwd<float>);
  registry.add(Backend::kMetal, "linear_loss_bwd_f16", linear_loss_bwd<F16>);
  registry.add(Backend::kMetal, "linear_loss_bwd_bf16", linear_loss_bwd<BF16>);
}

}  // namespace mlxtape::ops

#endif
