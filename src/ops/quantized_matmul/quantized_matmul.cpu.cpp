// CPU kernels of quantized_matmul (formula: mlxtape/ops/quantized_matmul.h).
//
// A task has some rows of the weights, as they lie in memory, and all of x, which is put in order once
// (backends/cpu/device/quantized-inl.h). Bound by reading the codes; with 8 rows of x by arithmetic.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/quantized_matmul/quantized_matmul.cpu.cpp"
#include <hwy/foreach_target.h>

#include "backends/cpu/device/quantized-inl.h"
#include "backends/cpu/device/tasks.h"
#include "mlxtape/core/registry.h"
#include "mlxtape/core/threads.h"
#include "quantized_matmul_args.h"

HWY_BEFORE_NAMESPACE();
namespace mlxtape::ops::HWY_NAMESPACE {
namespace {

// Calls body(weights) with scales and biases of type T, or f32.
template <class T, class Body>
void with_quantized(const KernelCall& call, const Body& body) {
  const auto& args = call.as<QuantizedMatmulArgs>();
  const auto as = [&](auto zero) {
    using S = decltype(zero);
    body(Quantized<S>{call.input<std::uint32_t>(1), call.input<S>(2), call.input<S>(3), args.k,
                      args.bits, args.group});
  };
  args.wide != 0 ? as(float()) : as(T());
}

std::size_t ordered_room(const void* opaque) {
  const auto& args = *static_cast<const QuantizedMatmulArgs*>(opaque);
  return static_cast<std::size_t>(args.m * args.k) * sizeof(float);
}

template <class T>
void quantized_matmul_fwd(const KernelCall& call) {
  const auto& args = call.as<QuantizedMatmulArgs>();
  const T* x = call.input<T>(0);                        // [m, k]
  T* y = call.output<T>(0);                             // [m, n]
  auto* ordered = static_cast<float*>(call.workspace);  // [m, k]
  const Order order = order_for<T>(args.bits, args.group);
  for (std::int64_t m = 0; m < args.m; ++m) {
    order_row(order, x + m * args.k, args.k, args.group, ordered + m * args.k);
  }
  with_quantized<T>(call, [&](const auto& w) {
    // Whole blocks of rows, so that few are done one by one.
    const std::int64_t each = ceil_div(cpu::rows_per_task(w.words() * 4), 4) * 4;
    parallel_for(ceil_div(args.n, each), [&](std::int64_t task) {
      const std::int64_t first = task * each, rows = std::min(each, args.n - first);
      const std::int64_t pitch = in_units(rows);
      Pieces pieces{cpu::thread_scratch(quantized_room(args.k) + args.m * pitch)};
      float* room = pieces.take(quantized_room(args.k));
      float* sums = pieces.take(args.m * pitch);
      for (std::int64_t m = 0; m < args.m; m += kMostFew) {
        quantized_products(w, first, rows, order, ordered + m * args.k,
                           std::min<std::int64_t>(kMostFew, args.m - m), room, sums + m * pitch,
                           pitch);
      }
      for (std::int64_t m = 0; m < args.m; ++m) {
        store_row(sums + m * pitch, rows, y + m * args.n + first);
      }
    });
  });
}

}  // namespace

void register_quantized_matmul(KernelRegistry& registry) {
  const auto add = [&]<class T>(T, const std::string& type) {
    registry.add(Backend::kCpu, "quantized_matmul_fwd_" + type, quantized_matmul_fwd<T>,
                 ordered_room);
  };
  add(float(), "f32");
  add(F16(), "f16");
  add(BF16(), "bf16");
}

}  // namespace mlxtape::ops::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

MT_REGISTER_CPU_KERNELS(quantized_matmul)
