// Adds one array to another (arguments: core/memory_kernels.h). Bound by memory.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "backends/cpu/add_into.cpp"
#include <hwy/foreach_target.h>

#include "backends/cpu/device/simd-inl.h"
#include "core/memory_kernels.h"
#include "mlxtape/base/checked.h"
#include "mlxtape/core/registry.h"
#include "mlxtape/core/threads.h"

HWY_BEFORE_NAMESPACE();
namespace mlxtape::ops::HWY_NAMESPACE {
namespace {

constexpr std::int64_t kTaskElements = 16384;

template <class Sum, class T>
void add_all(const KernelCall& call) {
  const std::int64_t size = call.as<AddIntoArgs>().size;
  const T* x = call.input<T>(0);
  Sum* sum = call.output<Sum>(0);
  parallel_for(ceil_div(size, kTaskElements), [&](std::int64_t task) {
    const DF d;
    const T* from = x + task * kTaskElements;
    Sum* to = sum + task * kTaskElements;
    const auto n = static_cast<std::size_t>(std::min(kTaskElements, size - task * kTaskElements));
    for_row(
        d, n,
        [&](std::size_t i)
            HWY_ATTR { store(d, hn::Add(load(d, to + i), load(d, from + i)), to + i); },
        [&](std::size_t i, std::size_t count) HWY_ATTR {
          store_n(d, hn::Add(load_n(d, to + i, count), load_n(d, from + i, count)), to + i, count);
        });
  });
}

template <class Sum>
void add_into(const KernelCall& call) {
  switch (static_cast<DType>(call.as<AddIntoArgs>().from)) {
    case DType::kF16: return add_all<Sum, F16>(call);
    case DType::kBF16: return add_all<Sum, BF16>(call);
    default: return add_all<Sum, float>(call);
  }
}

}  // namespace

void register_add_into(KernelRegistry& registry) {
  registry.add(Backend::kCpu, "add_into_f32", add_into<float>);
  registry.add(Backend::kCpu, "add_into_f16", add_into<F16>);
  registry.add(Backend::kCpu, "add_into_bf16", add_into<BF16>);
}

}  // namespace mlxtape::ops::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

MT_REGISTER_CPU_KERNELS(add_into)
