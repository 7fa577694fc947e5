// Metal kernels of loss_rows (formula and layout: mlxtape/ops/loss_rows.h). A few numbers a row: one group of 1024 threads, so
// that sums have one order. Bound by the latency of one group's reads. Threadgroup memory: 128 bytes; about 12 registers.
#include "loss_rows_args.h"

#ifdef __METAL_VERSION__

#include "backends/metal/device/rows.h"

constant int mask_kind [[function_constant(0)]];  // LossRowsMask
constant bool has_target [[function_constant(1)]];

#define LOSS_ROWS_PLACE                                                                      \
  uint index [[thread_position_in_threadgroup]], uint threads [[threads_per_threadgroup]],   \
      uint lane [[thread_index_in_simdgroup]], uint simd [[simdgroup_index_in_threadgroup]], \
      uint simds [[simdgroups_per_threadgroup]]

inline float mask_at(device const uchar* mask, long r) {
  switch (mask_kind) {
    case kLossRowsBool: return mask[r] != 0 ? 1.0f : 0.0f;
    case kLossRowsF32: return ((device const float*)mask)[r];
    case kLossRowsF16: return widen(((device const half*)mask)[r]);
    case kLossRowsBF16: return widen(((device const bf16*)mask)[r]);
    default: return 1;
  }
}

template <typename Target>
[[kernel, max_total_threads_per_threadgroup(1024)]] void loss_rows_fwd(
    device const uchar* mask [[buffer(0)]], device const Target* targets [[buffer(1)]],
    device float* weight [[buffer(2)]], device long* target_of [[buffer(3)]],
    device float* scale [[buffer(4)]], constant LossRowsArgs& args [[buffer(5)]], LOSS_ROWS_PLACE) {
  threadgroup float room[32];
  const Place place = {index, lane, simd, simds};
  float sum = 0;
  for (long r = index; r < args.rows; r += threads) {
    float w = mask_at(mask, r);
    bool outside = false;
    if (has_target) {
      const long target = long(targets[r]);
      if (args.ignores != 0 && target == args.ignore) w = 0;
      outside = target < 0 || target >= args.classes;
      target_of[r] = outside ? -1 : target;
    }
    sum += w;
    weight[r] = outside && w != 0 ? NAN : w;
  }
  sum = group_sum(sum, room, place);
  if (index == 0) scale[0] = args.mean == 0 ? 1.0f : sum == 0 ? 0.0f : 1 / sum;
}

[[kernel, max_total_threads_per_threadgroup(1024)]] void loss_rows_reduce(
    device const float* losses [[buffer(0)]], device const float* scale [[buffer(1)]],
    device float* loss [[buffer(2)]], constant long& rows [[buffer(3)]], LOSS_ROWS_PLACE) {
  threadgroup float room[32];
  const Place place = {index, lane, simd, simds};
  float sum = 0;
  for (long r = index; r < rows; r += threads) sum += losses[r];
  sum = group_sum(sum, room, place);
  if (index == 0) loss[0] = sum * scale[0];
}

#define MAKE(name, ...) template [[host_name(name)]] [[kernel]] decltype(__VA_ARGS__) __VA_ARGS__;
MAKE("loss_rows_fwd_i32", loss_rows_fwd<int>)
MAKE("loss_rows_fwd_u32", loss_rows_fwd<uint>)
MAKE("loss_rows_fwd_i64", loss_rows_fwd<long>)

#else

#include "backends/metal/launch.h"

namespace mlxtape::ops {

namespace {

constexpr std::int64_t kThreads = 1024;

template <class Target>
void loss_rows_fwd(const KernelCall& call) {
  const auto& args = call.as<LossRowsArgs>();
  metal::Launch(call, metal::kernel<Target>("loss_rows_fwd"))
      .constant(0, static_cast<std::int32_t>(args.mask))
      .constant(1, args.has_target != 0)
      .buffers()
      .groups(1)
      .threads(kThreads)
      .run();
}

void loss_rows_reduce_fwd(const KernelCall& call) {
  metal::Launch(call, metal::kernel("loss_rows_reduce"))
      .buffers()
      .groups(1)
      .threads(kThreads)
      .run();
}

}  // namespace

void register_loss_rows_metal(KernelRegistry& registry) {
  registry.add(Backend::kMetal, "loss_rows_fwd_i32", loss_rows_fwd<std::int32_t>);
  registry.add(Backend::kMetal, "loss_rows_fwd_u32", loss_rows_fwd<std::uint32_t>);
  registry.add(Backend::kMetal, "loss_rows_fwd_i64", loss_rows_fwd<std::int64_t>);
  registry.add(Backend::kMetal, "loss_rows_reduce_fwd_f32", loss_rows_reduce_fwd);
}

}  // namespace mlxtape::ops

#endif
