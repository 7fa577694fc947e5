// CPU kernel of linear_loss (formula and layout: mlxtape/ops/linear_loss.h): gradients made for dloss = 1
// times dloss. The rest is matmul's and the losses'. Bound by memory.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/linear_loss/linear_loss.cpu.cpp"
#include <hwy/foreach_target.h>

#include "backends/cpu/device/simd-inl.h"
#include "backends/cpu/device/tasks.h"
#include "linear_loss_args.h"
#include "mlxtape/core/registry.h"
#include "mlxtape/core/threads.h"

HWY_BEFORE_NAMESPACE();
namespace mlxtape::ops::HWY_NAMESPACE {
namespace {

constexpr std::int64_t kTaskElements = 16384;

template <bool kStream, class T, class X>
void scale_all(const KernelCall& call) {
  const std::int64_t size = call.as<LinearLossArgs>().size;
  const X* x_all = call.input<X>(0);           // [size]
  const float factor = *call.input<float>(1);  // [1]
  T* y_all = call.output<T>(0);                // [size]
  parallel_for(ceil_div(size, kTaskElements), [&](std::int64_t task) {
    const DF d;
    const VF by = hn::Set(d, factor);
    const X* x = x_all + task * kTaskElements;
    const std::int64_t n = std::min(kTaskElements, size - task * kTaskElements);
    write_row<kStream>(
        d, y_all + task * kTaskElements, static_cast<std::size_t>(n),
        [&](std::size_t i) HWY_ATTR { return hn::Mul(load(d, x + i), by); },
        [&](std::size_t i, std::size_t count)
            HWY_ATTR { return hn::Mul(load_n(d, x + i, count), by); });
    if (kStream) hwy::FlushStream();
  });
}

template <class T>
void linear_loss_bwd(const KernelCall& call) {
  const auto& args = call.as<LinearLossArgs>();
  const bool stream = args.size * static_cast<std::int64_t>(sizeof(T)) >= cpu::kStreamBytes;
  if (args.from_f32 != 0) {
    return stream ? scale_all<true, T, float>(call) : scale_all<false, T, float>(call);
  }
  stream ? scale_all<true, T, T>(call) : scale_all<false, T, T>(call);
}

}  // namespace

void register_linear_loss(KernelRegistry& registry) {
  registry.add(Backend::kCpu, "linear_loss_bwd_f32", linear_loss_bwd<float>);
  registry.add(Backend::kCpu, "linear_loss_bwd_f16", linear_loss_bwd<F16>);
  registry.add(Backend::kCpu, "linear_loss_bwd_bf16", linear_loss_bwd<BF16>);
}

}  // namespace mlxtape::ops::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

MT_REGISTER_CPU_KERNELS(linear_loss)
