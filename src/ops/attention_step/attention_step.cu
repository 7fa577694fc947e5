// CUDA kernels of attention_step (formula: mlxtape/ops/attention_step.h). Keys are split among blocks, which leave their
// part of every row; a second kernel joins them in order. In 16 bits, where rows are whole packs, the parts come from
// tensor cores (attention_step_half.cuh), which the memory keeps waiting. Here, for f32 and rows that are not aligned,
// a warp takes two keys at a time, a lane every 32nd channel of them: bound by memory in f32, by arithmetic else.
#include <string>

#include "attention_step_cut.cuh"
#include "attention_step_half.cuh"
#include "mlxtape/core/registry.h"

namespace mlxtape::ops {

namespace {

constexpr int kChannels = 256;
constexpr int kLaneChannels = kChannels / cuda::kWarp;
constexpr int kAhead = 2;  // keys of a warp at a time

template <class T>
__device__ __forceinline__ void load_lane(const T* row, int channels, bool there,
                                          float (&out)[kLaneChannels]) {
#pragma unroll
  for (int i = 0; i < kLaneChannels; ++i) {
    const int c = threadIdx.x % cuda::kWarp + i * cuda::kWarp;
    out[i] = there && c < channels ? cuda::widen(row[c]) : 0;
  }
}

template <class T>
__global__ void __launch_bounds__(kStepThreads, 2)
    step_plain(AttentionStepArgs args, StepCut cut, const T* q, const T* k, const T* v,
               const std::int32_t* lengths, T* keys, T* values, StepParts parts) {
  __shared__ StepRoom<kChannels> room;
  __shared__ StepRange ranges[kStepRows];
  cuda::hold_next_wait_turn();
  const StepPlace p(args, cut, lengths);
  if (p.count <= 0) return;
  const auto dim = static_cast<int>(args.dim), value_dim = static_cast<int>(args.value_dim);
  const StepRowsOf<T> key_rows(args, p, keys, k, args.k, dim);
  const StepRowsOf<T> value_rows(args, p, values, v, args.v, value_dim);
  if (p.tile == 0) {
    key_rows.store_new(p.count, dim);
    value_rows.store_new(p.count, value_dim);
  }
  const int warp = threadIdx.x / cuda::kWarp, lane = threadIdx.x % cuda::kWarp;
  if (threadIdx.x < kStepRows) {
    ranges[threadIdx.x] =
        range_of(args, cut, p, p.tile * kStepRows + static_cast<int>(threadIdx.x));
  }
  __syncthreads();
  float query[kStepRows][kLaneChannels], sums[kStepRows][kLaneChannels] = {};
  float most[kStepRows], sum[kStepRows];
#pragma unroll
  for (int i = 0; i < kStepRows; ++i) {
    const int r = p.tile * kStepRows + i;
    const std::int64_t head = p.kh * cut.group + r % cut.group;
    const T* row = q + p.b * args.q[0] + r / cut.group * args.q[1] + head * args.q[2];
    load_lane(row, dim, r < cut.rows, query[i]);
    most[i] = -INFINITY;
    sum[i] = 0;
  }
  const float factor = args.scale * kStepLog2E;
  for (int j = kAhead * warp; j < p.count; j += kAhead * kStepWarps) {
    float key[kAhead][kLaneChannels], value[kAhead][kLaneChannels];
#pragma unroll
    for (int e = 0; e < kAhead; ++e) {
      load_lane(key_rows.row(j + e), dim, j + e < p.count, key[e]);
      load_lane(value_rows.row(j + e), value_dim, j + e < p.count, value[e]);
    }
#pragma unroll
    for (int i = 0; i < kStepRows; ++i) {
      const StepRange range = ranges[i];
      float scores[kAhead], next = most[i];
#pragma unroll
      for (int e = 0; e < kAhead; ++e) {
        float dot = 0;
#pragma unroll
        for (int c = 0; c < kLaneChannels; ++c) dot = fmaf(query[i][c], key[e][c], dot);
        dot = cuda::lanes_sum(dot);
        scores[e] = j + e >= range.start && j + e < range.stop ? dot * factor : -INFINITY;
        next = fmaxf(next, scores[e]);
      }
      const float shift = next == -INFINITY ? 0 : next, keep = exp2f(most[i] - shift);
      most[i] = next;
      sum[i] *= keep;
#pragma unroll
      for (int c = 0; c < kLaneChannels; ++c) sums[i][c] *= keep;
#pragma unroll
      for (int e = 0; e < kAhead; ++e) {
        const float weight = exp2f(scores[e] - shift);
        sum[i] += weight;
#pragma unroll
        for (int c = 0; c < kLaneChannels; ++c) sums[i][c] = fmaf(weight, value[e][c], sums[i][c]);
      }
    }
  }
#pragma unroll
  for (int i = 0; i < kStepRows; ++i) {
    if (lane == 0) {
      room.most[warp][i] = most[i];
      room.sum[warp][i] = sum[i];
    }
#pragma unroll
    for (int c = 0; c < kLaneChannels; ++c) room.sums[warp][i][lane + c * cuda::kWarp] = sums[i][c];
  }
  room.leave(cut, p, value_dim, parts);
  cuda::next_may_start();
}

// A block has kJoined channels of one row of y; its threads share the splits, of which they have kBatch under way at
// once: the parts lie in the second-level cache, and their latency is all that this costs.
constexpr int kJoinThreads = 512, kJoined = 64, kBatch = 8;

template <class T>
__global__ void __launch_bounds__(kJoinThreads)
    step_join(AttentionStepArgs args, StepCut cut, StepParts parts, const std::int32_t* lengths,
              const float* sinks, T* y) {
  using Threads = cuda::RowThreads<kJoinThreads>;
  constexpr int kShares = kJoinThreads / kJoined;
  __shared__ float weights[kMostSplits], most[Threads::kWarps], total[Threads::kWarps];
  __shared__ float sums[kShares][kJoined];
  cuda::wait_turn();
  const std::int64_t row = blockIdx.x, h = row % args.heads, b = row / args.heads / args.tokens;
  const std::int64_t t = row / args.heads % args.tokens;
  const std::int64_t first =
      (b * args.key_heads + h / cut.group) * cut.splits * cut.rows + t * cut.group + h % cut.group;
  const int used = StepSpan(args, cut, lengths, b).used;
  const int i = threadIdx.x, warp = i / cuda::kWarp;
  float2 own = {-INFINITY, 0};
  if (i < used) own = parts.stats[first + std::int64_t{i} * cut.rows];
  const float of_warp = cuda::lanes_max(own.x);
  if (i % cuda::kWarp == 0) most[warp] = of_warp;
  __syncthreads();
  const float sink = sinks == nullptr ? -INFINITY : sinks[h] * kStepLog2E;
  float shift = sink;
#pragma unroll
  for (const float other : most) shift = fmaxf(shift, other);
  if (shift == -INFINITY) shift = 0;
  const float weight = exp2f(own.x - shift);
  if (i < used) weights[i] = weight;
  // Every thread waits in the sum, and sees all weights behind it.
  const float all = Threads::sum(weight * own.y, total) + exp2f(sink - shift);

  const int share = i / kJoined;
  const std::int64_t c = std::int64_t{blockIdx.y} * kJoined + i % kJoined;
  float sum = 0;
  for (int split = share; c < args.value_dim && split < used; split += kBatch * kShares) {
    float v[kBatch];
#pragma unroll
    for (int n = 0; n < kBatch; ++n) {
      const int at = split + n * kShares;
      v[n] = at < used ? weights[at] *
                             parts.sums[(first + std::int64_t{at} * cut.rows) * args.value_dim + c]
                       : 0;
    }
#pragma unroll
    for (const float each : v) sum += each;
  }
  sums[share][i % kJoined] = sum;
  __syncthreads();
  if (share != 0 || c >= args.value_dim) return;
#pragma unroll
  for (int s = 1; s < kShares; ++s) sum += sums[s][i];
  y[row * args.value_dim + c] = cuda::narrow<T>(all == 0 ? 0 : sum / all);
}

std::size_t step_room(const void* opaque) {
  const auto& args = *static_cast<const AttentionStepArgs*>(opaque);
  const std::int64_t rows = part_rows(args, cut_of(args));
  return static_cast<std::size_t>(rows * (args.value_dim + 2)) * sizeof(float);
}

// Whether every row begins at a whole pack and ends with one.
template <class T>
bool in_packs(const AttentionStepArgs& args, const KernelCall& call) {
  bool whole = args.dim % cuda::kPack<T> == 0 && args.value_dim % cuda::kPack<T> == 0;
  for (const auto& strides : {args.q, args.k, args.v}) {
    for (int i = 0; i < 3; ++i) whole = whole && strides[i] % cuda::kPack<T> == 0;
  }
  for (const void* p : {call.in[0], call.in[1], call.in[2], call.out[1], call.out[2]}) {
    whole = whole && cuda::is_aligned(p);
  }
  return whole;
}

template <class T>
void attention_step(const KernelCall& call) {
  const auto& args = call.as<AttentionStepArgs>();
  const StepCut cut = cut_of(args);
  auto* stats = static_cast<float2*>(call.workspace);
  const StepParts parts{stats, reinterpret_cast<float*>(stats + part_rows(args, cut))};
  const auto stream = static_cast<cudaStream_t>(call.queue);
  const auto* lengths = call.input<std::int32_t>(3);
  const auto run = [&](auto kernel) {
    cuda::launch(kernel, args.batch * args.key_heads * cut.splits * cut.tiles, kStepThreads, 0, 1,
                 stream, args, cut, call.input<T>(0), call.input<T>(1), call.input<T>(2), lengths,
                 call.output<T>(1), call.output<T>(2), parts);
  };
  bool done = false;
  if constexpr (sizeof(T) == 2) {
    if (in_packs<T>(args, call)) {
      const std::int64_t size = std::max(args.dim, args.value_dim);
      size <= 64    ? run(step_half<T, 64>)
      : size <= 128 ? run(step_half<T, 128>)
                    : run(step_half<T, 256>);
      done = true;
    }
  }
  if (!done) run(step_plain<T>);
  cuda::launch(step_join<T>,
               cuda::Blocks(args.batch * args.tokens * args.heads,
                            cuda::blocks_for(args.value_dim, kJoined)),
               kJoinThreads, 0, 1, stream, args, cut, parts, lengths, call.input<float>(4),
               call.output<T>(0));
}

}  // namespace

void register_attention_step_cuda(KernelRegistry& registry) {
  registry.add(Backend::kCuda, "attention_step_f32", attention_step<float>, step_room);
  registry.add(Backend::kCuda, "attention_step_f16", attention_step<F16>, step_room);
  registry.add(Backend::kCuda, "attention_step_bf16", attention_step<BF16>, step_room);
}

}  // namespace mlxtape::ops
