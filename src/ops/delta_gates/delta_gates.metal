// Metal kernels of delta_gates (formula: mlxtape/ops/delta_gates.h). A thread has a token's head. At 32 heads a token has
// 384 bytes: bound by the launch up to some thousand tokens, then by memory. 256 threads a group, no threadgroup memory,
// some 20 registers a thread.
#include "delta_gates_args.h"

#ifdef __METAL_VERSION__

#include "backends/metal/device/functions.h"
#include "backends/metal/device/index.h"

constant bool has_decay [[function_constant(0)]];  // gradients that are not there count as zeros
constant bool has_beta [[function_constant(1)]];

#define DELTA_GATES_PLACE                                                                 \
  constant uint &first_group [[buffer(30)]], uint group [[threadgroup_position_in_grid]], \
      uint index [[thread_position_in_threadgroup]]

// NaN comes through the exponential.
inline float softplus(float z) { return max(z, 0.0f) + log_of_one_plus(precise::exp(-fabs(z))); }

template <typename T>
[[kernel, max_total_threads_per_threadgroup(256)]] void delta_gates_fwd(
    device const T* a [[buffer(0)]], device const T* b [[buffer(1)]],
    device const float* a_log [[buffer(2)]], device const float* dt_bias [[buffer(3)]],
    device float* decay [[buffer(4)]], device float* beta [[buffer(5)]],
    constant DeltaGatesArgs& args [[buffer(6)]], DELTA_GATES_PLACE) {
  const long i = (long(group) + first_group) * 256 + index;
  if (i >= args.tokens * args.heads) return;
  long h = 0;
  divide(i, args.heads, h);
  decay[i] = -precise::exp(a_log[h]) * softplus(widen(a[i]) + dt_bias[h]);
  beta[i] = sigmoid<float>(widen(b[i])).value;
}

template <typename T>
[[kernel, max_total_threads_per_threadgroup(256)]] void delta_gates_bwd(
    device const T* a [[buffer(0)]], device const T* b [[buffer(1)]],
    device const float* a_log [[buffer(2)]], device const float* dt_bias [[buffer(3)]],
    device const float* d_decay [[buffer(4)]], device const float* d_beta [[buffer(5)]],
    device T* da [[buffer(6)]], device T* db [[buffer(7)]], device float* rates [[buffer(8)]],
    device float* shifts [[buffer(9)]], constant DeltaGatesArgs& args [[buffer(10)]],
    DELTA_GATES_PLACE) {
  const long i = (long(group) + first_group) * 256 + index;
  if (i >= args.tokens * args.heads) return;
  long h = 0;
  divide(i, args.heads, h);
  const float z = widen(a[i]) + dt_bias[h];
  const float speed = -(has_decay ? d_decay[i] : 0.0f) * precise::exp(a_log[h]);
  const float dz = speed * sigmoid<float>(z).value;
  da[i] = narrow<T>(dz);
  rates[i] = speed * softplus(z);
  shifts[i] = dz;
  const Sigmoid s = sigmoid<float>(widen(b[i]));
  db[i] = narrow<T>((has_beta ? d_beta[i] : 0.0f) * (s.value * s.rest));
}

#define MAKE(name, function) template [[host_name(name)]] [[kernel]] decltype(function) function;
#define MAKE_BOTH(type, T)                          \
  MAKE("delta_gates_fwd_" type, delta_gates_fwd<T>) \
  MAKE("delta_gates_bwd_" type, delta_gates_bwd<T>)
MAKE_BOTH("f32", float)
MAKE_BOTH("f16", half)
MAKE_BOTH("bf16", bf16)

#else

#include <string>

#include "backends/metal/launch.h"

namespace mlxtape::ops {

namespace {

constexpr std::int64_t kThreads = 256;

template <class T>
void run(const KernelCall& call, const char* name, bool is_backward) {
  const auto& args = call.as<DeltaGatesArgs>();
  metal::Launch launch(call, metal::kernel<T>(name));
  if (is_backward) launch.constant(0, call.in[4] != nullptr).constant(1, call.in[5] != nullptr);
  launch.buffers()
      .in_parts()
      .groups(ceil_div(args.tokens * args.heads, kThreads))
      .threads(kThreads)
      .run();
}

template <class T>
void add_kernels(KernelRegistry& registry) {
  const std::string type = name_of(kDType<T>);
  registry.add(Backend::kMetal, "delta_gates_fwd_" + type,
               [](const KernelCall& call) { run<T>(call, "delta_gates_fwd", false); });
  registry.add(Backend::kMetal, "delta_gates_bwd_" + type,
               [](const KernelCall& call) { run<T>(call, "delta_gates_bwd", true); });
}

}  // namespace

void register_delta_gates_metal(KernelRegistry& registry) {
  add_kernels<float>(registry);
  add_kernels<F16>(registry);
  add_kernels<BF16>(registry);
}

}  // namespace mlxtape::ops

#endif
