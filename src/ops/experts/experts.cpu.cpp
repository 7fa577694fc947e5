// CPU kernels of experts (formula: mlxtape/ops/experts.h): the passes of backends/cpu/device/expert_passes-inl.h with
// weights as they lie in memory.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/experts/experts.cpu.cpp"
#include <hwy/foreach_target.h>

#include "backends/cpu/device/expert_passes-inl.h"
#include "experts_args.h"
#include "mlxtape/core/registry.h"

HWY_BEFORE_NAMESPACE();
namespace mlxtape::ops::HWY_NAMESPACE {
namespace {

ExpertShape shape_of(const ExpertsArgs& args) {
  return {args.tokens, args.chosen, args.experts, args.width, args.inner};
}
// Of a kernel whose inputs from `first` on are order and offsets.
Pairs pairs_of(const KernelCall& call, std::size_t first) {
  return {shape_of(call.as<ExpertsArgs>()), call.input<std::uint32_t>(first),
          call.input<std::uint32_t>(first + 1)};
}

void experts_order(const KernelCall& call) {
  order_pairs(shape_of(call.as<ExpertsArgs>()), call.input<std::uint32_t>(0),
              call.output<std::uint32_t>(0));
}

template <class T>
void experts_hidden_fwd(const KernelCall& call) {
  const std::int64_t width = call.as<ExpertsArgs>().width;
  const PlainWeights<T> gate{call.input<T>(3), width}, up{call.input<T>(4), width};
  expert_hidden(pairs_of(call, 1), call.input<T>(0), gate, up, call.output<T>(0));
}

template <class T>
void experts_out_fwd(const KernelCall& call) {
  const PlainWeights<T> down{call.input<T>(4), call.as<ExpertsArgs>().inner};
  expert_out(pairs_of(call, 1), call.input<T>(0), call.input<T>(3), down,
             static_cast<float*>(call.workspace), call.output<T>(0));
}

template <class T>
void experts_hidden_bwd(const KernelCall& call) {
  const PlainWeights<T> down{call.input<T>(5), call.as<ExpertsArgs>().inner};
  expert_hidden_back(pairs_of(call, 2), call.input<T>(0), call.input<T>(1), call.input<T>(4), down,
                     call.output<T>(0), call.output<T>(1));
}

template <class T>
void experts_x_bwd(const KernelCall& call) {
  const std::int64_t width = call.as<ExpertsArgs>().width;
  const PlainWeights<T> gate{call.input<T>(3), width}, up{call.input<T>(4), width};
  expert_x_back(pairs_of(call, 1), call.input<T>(0), gate, up, static_cast<float*>(call.workspace),
                call.output<T>(0));
}

template <class T>
void experts_weights_bwd(const KernelCall& call) {
  const auto& args = call.as<ExpertsArgs>();
  const PlainGradient<T> dgate{call.output<T>(0), args.width}, dup{call.output<T>(1), args.width},
      ddown{call.output<T>(2), args.inner};
  expert_weights_back(pairs_of(call, 4), call.input<T>(0), call.input<T>(1), call.input<T>(2),
                      call.input<T>(3), call.input<T>(6), kStrip, dgate, dup, ddown);
}

// Bytes of workspace.
std::size_t out_room(const void* args) {
  return static_cast<std::size_t>(
             expert_out_room(shape_of(*static_cast<const ExpertsArgs*>(args)))) *
         sizeof(float);
}
std::size_t x_room(const void* args) {
  return static_cast<std::size_t>(expert_x_room(shape_of(*static_cast<const ExpertsArgs*>(args)))) *
         sizeof(float);
}

}  // namespace

void register_experts(KernelRegistry& registry) {
  registry.add(Backend::kCpu, "experts_order_u32", experts_order);
  const auto add = [&]<class T>(T, const std::string& type) {
    registry.add(Backend::kCpu, "experts_hidden_fwd_" + type, experts_hidden_fwd<T>);
    registry.add(Backend::kCpu, "experts_out_fwd_" + type, experts_out_fwd<T>, out_room);
    registry.add(Backend::kCpu, "experts_hidden_bwd_" + type, experts_hidden_bwd<T>);
    registry.add(Backend::kCpu, "experts_x_bwd_" + type, experts_x_bwd<T>, x_room);
    registry.add(Backend::kCpu, "experts_weights_bwd_" + type, experts_weights_bwd<T>);
  };
  add(float(), "f32");
  add(F16(), "f16");
  add(BF16(), "bf16");
}

}  // namespace mlxtape::ops::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

MT_REGISTER_CPU_KERNELS(experts)
