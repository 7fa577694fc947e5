// CPU kernels of the elementwise family: functions of one tensor of floats, and clip.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/elementwise/elementwise_unary.cpu.cpp"
#include <hwy/foreach_target.h>

#include "elementwise_map-inl.h"
#include "mlxtape/core/registry.h"

HWY_BEFORE_NAMESPACE();
namespace mlxtape::ops::HWY_NAMESPACE {
namespace {

template <class T, class Formula>
void unary_fwd(const KernelCall& call) {  // x
  map<T, 1>(call, [](Number<T> x) HWY_ATTR { return Formula::value(x); });
}
template <class T, class Formula>
void unary_bwd(const KernelCall& call) {  // dy, what is kept
  map<T, 2>(call, [](Number<T> g, Number<T> kept) HWY_ATTR { return Formula::pull(g, kept); });
}
template <class T>
void clip_fwd(const KernelCall& call) {  // x, low, high
  map<T, 3>(call, [](Number<T> x, Number<T> low, Number<T> high)
                      HWY_ATTR { return clip_value(x, low, high); });
}
template <class T>
void clip_bwd(const KernelCall& call) {  // dy, x, low, high
  map<T, 4>(call, [](Number<T> g, Number<T> x, Number<T> low, Number<T> high)
                      HWY_ATTR { return clip_pull(g, x, low, high); });
}

template <class T, class Formula>
void add_unary(KernelRegistry& registry, const std::string& name) {
  const std::string type = name_of(kDType<T>);
  registry.add(Backend::kCpu, name + "_fwd_" + type, unary_fwd<T, Formula>);
  if constexpr (Formula::kKeeps != 'n') {
    registry.add(Backend::kCpu, name + "_bwd_" + type, unary_bwd<T, Formula>);
  }
}

template <class T>
void add_kernels(KernelRegistry& registry) {
#define MT_ADD(name, keeps, value, pull) add_unary<T, name##_formula>(registry, #name);
  MT_UNARY_FORMULAS(MT_ADD)
#undef MT_ADD
  const std::string type = name_of(kDType<T>);
  registry.add(Backend::kCpu, "clip_fwd_" + type, clip_fwd<T>);
  registry.add(Backend::kCpu, "clip_bwd_" + type, clip_bwd<T>);
}

}  // namespace

void register_elementwise_unary(KernelRegistry& registry) {
  add_kernels<float>(registry);
  add_kernels<F16>(registry);
  add_kernels<BF16>(registry);
}

}  // namespace mlxtape::ops::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

MT_REGISTER_CPU_KERNELS(elementwise_unary)
