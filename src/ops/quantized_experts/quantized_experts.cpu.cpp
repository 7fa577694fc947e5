// CPU kernels of quantized_experts (formula: mlxtape/ops/experts.h and quantize.h): the passes of
// backends/cpu/device/expert_passes-inl.h with weights that are dequantised a strip at a time, in the cache. Up to 8 pairs of
// an expert meet its codes at once (quantized-inl.h). Bound by reading the codes up to about 4 pairs an expert, by arithmetic
// with more.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/quantized_experts/quantized_experts.cpu.cpp"
#include <hwy/foreach_target.h>

#include "backends/cpu/device/expert_passes-inl.h"
#include "backends/cpu/device/quantized_weights-inl.h"
#include "mlxtape/core/registry.h"
#include "quantized_experts_args.h"

HWY_BEFORE_NAMESPACE();
namespace mlxtape::ops::HWY_NAMESPACE {
namespace {

using Args = QuantizedExpertsArgs;

ExpertShape shape_of(const Args& args) {
  return {args.tokens, args.chosen, args.experts, args.width, args.inner};
}
// Of a kernel whose inputs from `first` on are order and offsets.
Pairs pairs_of(const KernelCall& call, std::size_t first) {
  return {shape_of(call.as<Args>()), call.input<std::uint32_t>(first),
          call.input<std::uint32_t>(first + 1)};
}
// Of a kernel whose inputs from `first` on are codes, scales and biases with rows of k.
template <class T>
QuantizedWeights<T> weights_of(const KernelCall& call, std::size_t first, const Args::Form& form,
                               std::int64_t k) {
  return {call.input<std::uint32_t>(first),
          call.in[first + 1],
          call.in[first + 2],
          k,
          form.bits,
          form.group,
          form.wide != 0};
}

void order(const KernelCall& call) {
  order_pairs(shape_of(call.as<Args>()), call.input<std::uint32_t>(0),
              call.output<std::uint32_t>(0));
}

// Calls body(zero of hidden's type).
template <class T, class Body>
void with_hidden(const Args& args, const Body& body) {
  args.wide_hidden != 0 ? body(float()) : body(T());
}

template <class T>
void hidden_fwd(const KernelCall& call) {
  const auto& args = call.as<Args>();
  const auto gate = weights_of<T>(call, 3, args.gate, args.width);
  const auto up = weights_of<T>(call, 6, args.up, args.width);
  with_hidden<T>(args, [&](auto zero) {
    expert_hidden(pairs_of(call, 1), call.input<T>(0), gate, up, call.output<decltype(zero)>(0));
  });
}

template <class T>
void out_fwd(const KernelCall& call) {
  const auto& args = call.as<Args>();
  const auto down = weights_of<T>(call, 4, args.down, args.inner);
  with_hidden<T>(args, [&](auto zero) {
    expert_out(pairs_of(call, 1), call.input<decltype(zero)>(0), call.input<T>(3), down,
               static_cast<float*>(call.workspace), call.output<T>(0));
  });
}

template <class T>
void hidden_bwd(const KernelCall& call) {
  const auto& args = call.as<Args>();
  expert_hidden_back(pairs_of(call, 2), call.input<T>(0), call.input<T>(1), call.input<T>(4),
                     weights_of<T>(call, 5, args.down, args.inner), call.output<T>(0),
                     call.output<T>(1));
}

template <class T>
void x_bwd(const KernelCall& call) {
  const auto& args = call.as<Args>();
  expert_x_back(pairs_of(call, 1), call.input<T>(0), weights_of<T>(call, 3, args.gate, args.width),
                weights_of<T>(call, 6, args.up, args.width), static_cast<float*>(call.workspace),
                call.output<T>(0));
}

template <class T>
void params_bwd(const KernelCall& call) {
  const auto& args = call.as<Args>();
  const auto gradient = [&](std::size_t i, const Args::Form& form, std::int64_t k) {
    const QuantizedWeights<T> codes{call.input<std::uint32_t>(7 + i),
                                    nullptr,
                                    nullptr,
                                    k,
                                    form.bits,
                                    form.group,
                                    form.wide != 0};
    return QuantizedGradient<T>{codes, call.out[2 * i], call.out[2 * i + 1]};
  };
  // Of down a strip is columns: whole groups of them.
  const std::int64_t strip = std::max<std::int64_t>(kStrip, args.down.group);
  expert_weights_back(pairs_of(call, 4), call.input<T>(0), call.input<T>(1), call.input<T>(2),
                      call.input<T>(3), call.input<T>(6), strip, gradient(0, args.gate, args.width),
                      gradient(1, args.up, args.width), gradient(2, args.down, args.inner));
}

// Bytes of workspace.
std::size_t out_room(const void* args) {
  return static_cast<std::size_t>(expert_out_room(shape_of(*static_cast<const Args*>(args)))) *
         sizeof(float);
}
std::size_t x_room(const void* args) {
  return static_cast<std::size_t>(expert_x_room(shape_of(*static_cast<const Args*>(args)))) *
         sizeof(float);
}

}  // namespace

void register_quantized_experts(KernelRegistry& registry) {
  registry.add(Backend::kCpu, "quantized_experts_order_u32", order);
  const auto add = [&]<class T>(T, const std::string& type) {
    const std::string name = "quantized_experts_";
    registry.add(Backend::kCpu, name + "hidden_fwd_" + type, hidden_fwd<T>);
    registry.add(Backend::kCpu, name + "out_fwd_" + type, out_fwd<T>, out_room);
    registry.add(Backend::kCpu, name + "hidden_bwd_" + type, hidden_bwd<T>);
    registry.add(Backend::kCpu, name + "x_bwd_" + type, x_bwd<T>, x_room);
    registry.add(Backend::kCpu, name + "params_bwd_" + type, params_bwd<T>);
  };
  add(float(), "f32");
  add(F16(), "f16");
  add(BF16(), "bf16");
}

}  // namespace mlxtape::ops::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

MT_REGISTER_CPU_KERNELS(quantized_experts)
