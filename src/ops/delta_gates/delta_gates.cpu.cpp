// CPU kernels of delta_gates (formula: mlxtape/ops/delta_gates.h). A task has some tokens; heads lie side by side. Bound
// by the exponentials: four for each token and head, where memory would allow one.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/delta_gates/delta_gates.cpu.cpp"
#include <hwy/foreach_target.h>

#include "backends/cpu/device/math-inl.h"
#include "backends/cpu/device/simd-inl.h"
#include "backends/cpu/device/tasks.h"
#include "delta_gates_args.h"
#include "mlxtape/core/registry.h"
#include "mlxtape/core/threads.h"

HWY_BEFORE_NAMESPACE();
namespace mlxtape::ops::HWY_NAMESPACE {
namespace {

// fn(element, head, count) for the vectors of all tokens' heads.
template <class Fn>
void for_heads(const DeltaGatesArgs& args, const Fn& fn) {
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(DF()));
  const std::int64_t each = cpu::rows_per_task(args.heads * 16);
  parallel_for(ceil_div(args.tokens, each), [&](std::int64_t task) {
    const std::int64_t last = std::min(args.tokens, (task + 1) * each);
    for (std::int64_t t = task * each; t < last; ++t) {
      for (std::int64_t h = 0; h < args.heads; h += lanes) {
        fn(t * args.heads + h, h, static_cast<std::size_t>(std::min(lanes, args.heads - h)));
      }
    }
  });
}

// −exp(A_log) and z.
struct Rate {
  VF speed, z;
};
template <class T>
HWY_INLINE Rate rate_of(DF d, const KernelCall& call, std::int64_t at, std::int64_t h,
                        std::size_t n) {
  const VF a_log = load_n(d, call.input<float>(2) + h, n);
  const VF z = hn::Add(load_n(d, call.input<T>(0) + at, n), load_n(d, call.input<float>(3) + h, n));
  return {hn::Neg(exp_for(d, float(), a_log)), z};
}
HWY_INLINE VF softplus(DF d, VF z) {
  const VF small = exp_for(d, float(), hn::Or(z, hn::Set(d, -0.0F)));  // exp(−|z|)
  return hn::Add(not_below(hn::Zero(d), z), log1p_f32(d, small));
}

template <class T>
void delta_gates_fwd(const KernelCall& call) {
  for_heads(call.as<DeltaGatesArgs>(), [&](std::int64_t at, std::int64_t h, std::size_t n) {
    const DF d;
    const Rate rate = rate_of<T>(d, call, at, h, n);
    store_n(d, hn::Mul(rate.speed, softplus(d, rate.z)), call.output<float>(0) + at, n);
    const VF b = load_n(d, call.input<T>(1) + at, n);
    store_n(d, sigmoid(d, float(), b).value, call.output<float>(1) + at, n);
  });
}

template <class T>
void delta_gates_bwd(const KernelCall& call) {
  const auto* d_decay = call.input<float>(4);
  const auto* d_beta = call.input<float>(5);
  for_heads(call.as<DeltaGatesArgs>(), [&](std::int64_t at, std::int64_t h, std::size_t n) {
    const DF d;
    const Rate rate = rate_of<T>(d, call, at, h, n);
    const VF grad = d_decay != nullptr ? load_n(d, d_decay + at, n) : hn::Zero(d);
    const VF speed = hn::Mul(grad, rate.speed);
    const VF dz = hn::Mul(speed, sigmoid(d, float(), rate.z).value);
    store_n(d, dz, call.output<T>(0) + at, n);
    store_n(d, hn::Mul(speed, softplus(d, rate.z)), call.output<float>(2) + at, n);
    store_n(d, dz, call.output<float>(3) + at, n);
    const Sigmoid beta = sigmoid(d, float(), load_n(d, call.input<T>(1) + at, n));
    const VF more = d_beta != nullptr ? load_n(d, d_beta + at, n) : hn::Zero(d);
    store_n(d, hn::Mul(more, hn::Mul(beta.value, beta.rest)), call.output<T>(1) + at, n);
  });
}

}  // namespace

void register_delta_gates(KernelRegistry& registry) {
  registry.add(Backend::kCpu, "delta_gates_fwd_f32", delta_gates_fwd<float>);
  registry.add(Backend::kCpu, "delta_gates_fwd_f16", delta_gates_fwd<F16>);
  registry.add(Backend::kCpu, "delta_gates_fwd_bf16", delta_gates_fwd<BF16>);
  registry.add(Backend::kCpu, "delta_gates_bwd_f32", delta_gates_bwd<float>);
  registry.add(Backend::kCpu, "delta_gates_bwd_f16", delta_gates_bwd<F16>);
  registry.add(Backend::kCpu, "delta_gates_bwd_bf16", delta_gates_bwd<BF16>);
}

}  // namespace mlxtape::ops::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

MT_REGISTER_CPU_KERNELS(delta_gates)
