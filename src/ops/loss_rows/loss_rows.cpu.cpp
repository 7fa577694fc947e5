// CPU kernels of loss_rows (formula and layout: mlxtape/ops/loss_rows.h). A few numbers a row beside rows of
// thousands: one thread, in order.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/loss_rows/loss_rows.cpu.cpp"
#include <hwy/foreach_target.h>

#include <limits>

#include "backends/cpu/device/simd-inl.h"
#include "loss_rows_args.h"
#include "mlxtape/core/registry.h"

HWY_BEFORE_NAMESPACE();
namespace mlxtape::ops::HWY_NAMESPACE {
namespace {

float mask_at(const void* mask, LossRowsMask kind, std::int64_t r) {
  switch (kind) {
    case kLossRowsNoMask: break;
    case kLossRowsBool: return static_cast<const std::uint8_t*>(mask)[r] != 0 ? 1.0F : 0.0F;
    case kLossRowsF32: return static_cast<const float*>(mask)[r];
    case kLossRowsF16: return static_cast<float>(static_cast<const F16*>(mask)[r]);
    case kLossRowsBF16: return static_cast<float>(static_cast<const BF16*>(mask)[r]);
  }
  return 1;
}

template <class Target>
void loss_rows_fwd(const KernelCall& call) {
  const auto& args = call.as<LossRowsArgs>();
  const void* mask = call.input<void>(0);       // [R]
  const auto* targets = call.input<Target>(1);  // [R]
  auto* weight = call.output<float>(0);         // [R]
  auto* index = call.output<std::int64_t>(1);   // [R]
  auto* scale = call.output<float>(2);          // [1]
  double sum = 0;
  for (std::int64_t r = 0; r < args.rows; ++r) {
    float w = mask_at(mask, args.mask, r);
    bool outside = false;
    if (args.has_target != 0) {
      const auto target = static_cast<std::int64_t>(targets[r]);
      if (args.ignores != 0 && target == args.ignore) w = 0;
      outside = target < 0 || target >= args.classes;
      index[r] = outside ? -1 : target;
    }
    sum += w;
    weight[r] = outside && w != 0 ? std::numeric_limits<float>::quiet_NaN() : w;
  }
  *scale = args.mean == 0 ? 1.0F : sum == 0 ? 0.0F : static_cast<float>(1 / sum);
}

void loss_rows_reduce_fwd(const KernelCall& call) {
  const auto rows = call.as<std::int64_t>();
  const auto* losses = call.input<float>(0);  // [R]
  const auto* scale = call.input<float>(1);   // [1]
  double sum = 0;
  for (std::int64_t r = 0; r < rows; ++r) sum += losses[r];
  *call.output<float>(0) = static_cast<float>(sum * *scale);
}

}  // namespace

void register_loss_rows(KernelRegistry& registry) {
  registry.add(Backend::kCpu, "loss_rows_fwd_i32", loss_rows_fwd<std::int32_t>);
  registry.add(Backend::kCpu, "loss_rows_fwd_u32", loss_rows_fwd<std::uint32_t>);
  registry.add(Backend::kCpu, "loss_rows_fwd_i64", loss_rows_fwd<std::int64_t>);
  registry.add(Backend::kCpu, "loss_rows_reduce_fwd_f32", loss_rows_reduce_fwd);
}

}  // namespace mlxtape::ops::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

MT_REGISTER_CPU_KERNELS(loss_rows)
