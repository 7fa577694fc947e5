// The forward pass of gated_delta_rule for 16-bit heads of width 128 with one decay a head (formula:
// mlxtape/ops/gated_delta_rule.h). Chunks have 64 tokens, since the time of the walk is the number of chunks one after
// another: what does not need the state is made for all chunks at once.
#include "gated_delta_rule_chunks.cuh"

#include "gated_delta_rule_chunks_meet.cuh"
#include "gated_delta_rule_chunks_walk.cuh"

namespace mlxtape::ops {

namespace {

bool takes(const GatedDeltaRuleArgs& args) {
  return args.start_bytes == 0 && args.per_channel == 0 && args.key_dim == chunks::kWidth &&
         args.value_dim == chunks::kWidth && args.sequence_tokens > 0 && args.v[0] % 8 == 0 &&
         args.v[1] % 8 == 0 && args.v[2] % 8 == 0;
}

}  // namespace

bool chunks_take(const KernelCall& call) {
  // 8: dy, going back.
  return takes(call.as<GatedDeltaRuleArgs>()) && cuda::is_aligned(call.in[2]) &&
         (call.in.size() <= 8 || cuda::is_aligned(call.in[8]));
}

std::size_t chunks_room(const void* opaque) {
  const auto& args = *static_cast<const GatedDeltaRuleArgs*>(opaque);
  return takes(args) ? chunks::Made<BF16>::bytes(args, false) : 0;
}
std::size_t chunks_room_back(const void* opaque) {
  const auto& args = *static_cast<const GatedDeltaRuleArgs*>(opaque);
  return takes(args) ? chunks::Made<BF16>::bytes(args, true) : 0;
}

template <class T>
void chunks_forward(const KernelCall& call) {
  const auto& args = call.as<GatedDeltaRuleArgs>();
  const chunks::Made<T> made(args, call.workspace, false);
  chunks::launch_meet<T, false>(call, args, made);
  const auto walk =
      made.groups == 2 ? chunks::launch_walk<T, 2, false> : chunks::launch_walk<T, 4, false>;
  walk(call, args, made, call.output<T>(0), call.output<float>(1));
}

template void chunks_forward<F16>(const KernelCall& call);
template void chunks_forward<BF16>(const KernelCall& call);

}  // namespace mlxtape::ops
