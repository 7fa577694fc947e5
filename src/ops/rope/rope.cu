// CUDA kernels of rope (formula: mlxtape/ops/rope.h). A block has a few tokens. A thread has one token's pairs whose channels
// are two packs of 16 bytes, or a pack of channels that stay, and up to four heads at a time: these are on their way while the
// block makes the angles, one for each of its tokens' pairs, in shared memory. Where rows are no whole packs, or pairs are
// neighbours, a thread has one pair of a token and goes through the heads. Bound by memory; an angle is made in f64.
#include <algorithm>
#include <string>

#include "backends/cuda/device/launch.cuh"
#include "backends/cuda/device/rows.cuh"
#include "backends/cuda/device/vectors.cuh"
#include "mlxtape/core/registry.h"
#include "rope_args.h"

namespace mlxtape::ops {

namespace {

constexpr int kThreads = 256;

// The cosine and the sine of a pair's angle.
__device__ __forceinline__ float2 turn_of(const RopeArgs& args, const std::int32_t* offsets,
                                          const float* periods, std::int64_t b, std::int64_t t,
                                          std::int64_t j) {
  std::int64_t position = t + args.offset;
  if (args.offsets != 0) position += offsets[args.offsets == 1 ? 0 : b];
  const double f =
      periods != nullptr
          ? 1 / static_cast<double>(periods[j])
          : exp2(-static_cast<double>(j) / static_cast<double>(args.half) * args.log2_base);
  constexpr double kTurn = 6.283185307179586476925;
  const double turns =
      static_cast<double>(position) * args.scale * (args.back != 0 ? -1 : 1) * f / kTurn;
  float2 both;
  sincospif(static_cast<float>(2 * (turns - rint(turns))), &both.y,
            &both.x);  // sincosf would need a stack frame
  return both;
}

__device__ __forceinline__ std::int64_t token_start(const RopeArgs& args, std::int64_t b,
                                                    std::int64_t t) {
  return b * args.heads * args.tokens * args.cols + t * args.token_step;
}

// How a block's threads are dealt out: tokens, then groups of heads, then packs of a row.
struct Deal {
  int tokens, groups, packs;
};
constexpr int kMostPairs = 2048;  // of a block

template <class T>
__global__ void __launch_bounds__(kThreads)
    turn_packs(RopeArgs args, Deal deal, const T* x, const std::int32_t* offsets,
               const float* periods, T* y) {
  cuda::wait_turn();
  __shared__ float2 turns[kMostPairs];
  constexpr int kPack = cuda::kPack<T>;
  constexpr int kAtOnce = 4;  // heads
  const auto half = static_cast<int>(args.half), heads = static_cast<int>(args.heads);
  const std::int64_t first = std::int64_t{blockIdx.x} * deal.tokens;
  const std::int64_t left = args.batch * args.tokens - first;
  const int count = left < deal.tokens ? static_cast<int>(left) : deal.tokens;
  const int pack = static_cast<int>(threadIdx.x) % deal.packs;
  const int row = static_cast<int>(threadIdx.x) / deal.packs;
  const int group = row % deal.groups, own = row / deal.groups;
  const bool works = own < count;
  const bool turning = pack < half / kPack;
  const std::int64_t token = first + (works ? own : 0);
  const std::int64_t start = token_start(args, token / args.tokens, token % args.tokens) +
                             pack * kPack + (turning ? 0 : half);
  cuda::Pack<T> low[kAtOnce], high[kAtOnce];
  const auto load = [&](int from) {
#pragma unroll
    for (int n = 0; n < kAtOnce; ++n) {
      const int head = from + n * deal.groups;
      if (!works || head >= heads) continue;
      const T* at = x + start + head * args.head_step;
      low[n] = cuda::load_pack(at);
      if (turning) high[n] = cuda::load_pack(at + half);
    }
  };
  load(group);
  for (int i = static_cast<int>(threadIdx.x); i < count * half; i += kThreads) {
    const std::int64_t t = first + i / half;
    turns[i] = turn_of(args, offsets, periods, t / args.tokens, t % args.tokens, i % half);
  }
  __syncthreads();
  if (!works) return;
  float c[kPack], s[kPack];
#pragma unroll
  for (int k = 0; k < kPack; ++k) {
    const float2 turn = turns[turning ? own * half + pack * kPack + k : 0];
    c[k] = turn.x;
    s[k] = turn.y;
  }
  for (int from = group; from < heads; from += kAtOnce * deal.groups) {
    if (from != group) load(from);
#pragma unroll
    for (int n = 0; n < kAtOnce; ++n) {
      const int head = from + n * deal.groups;
      if (head >= heads) continue;
      T* at = y + start + head * args.head_step;
      if (!turning) {
        cuda::store_pack(low[n], at);
        continue;
      }
      float a[kPack], d[kPack];
      cuda::unpack(low[n], a);
      cuda::unpack(high[n], d);
#pragma unroll
      for (int k = 0; k < kPack; ++k) {
        const float turned = a[k] * c[k] - d[k] * s[k];
        d[k] = fmaf(a[k], s[k], d[k] * c[k]);
        a[k] = turned;
      }
      cuda::store_pack(cuda::pack_of<T>(a), at);
      cuda::store_pack(cuda::pack_of<T>(d), at + half);
    }
  }
}

template <class T>
__global__ void __launch_bounds__(kThreads)
    turn(RopeArgs args, const T* x, const std::int32_t* offsets, const float* periods, T* y) {
  cuda::wait_turn();
  const std::int64_t lanes = args.cols - args.half;  // pairs and channels that stay
  const std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= args.batch * args.tokens * lanes) return;
  const std::int64_t j = i % lanes;
  const std::int64_t t = i / lanes % args.tokens;
  const std::int64_t b = i / lanes / args.tokens;
  const std::int64_t step = args.head_step;
  const std::int64_t at = token_start(args, b, t);
  x += at;
  y += at;
  if (j >= args.half) {
    for (std::int64_t head = 0; head < args.heads; ++head) {
      y[head * step + j + args.half] = x[head * step + j + args.half];
    }
    return;
  }
  const auto [c, s] = turn_of(args, offsets, periods, b, t, j);
  const std::int64_t p = args.traditional != 0 ? 2 * j : j;
  const std::int64_t q = args.traditional != 0 ? 2 * j + 1 : j + args.half;
  for (std::int64_t head = 0; head < args.heads; ++head) {
    const float a = cuda::widen(x[head * step + p]);
    const float d = cuda::widen(x[head * step + q]);
    y[head * step + p] = cuda::narrow<T>(a * c - d * s);
    y[head * step + q] = cuda::narrow<T>(fmaf(a, s, d * c));
  }
}

// Are all rows of x and y, and their halves, whole packs, of which a block can take a token's?
template <class T>
bool in_packs(const RopeArgs& args, const T* x, const T* y) {
  const auto whole = [](std::int64_t n) {
    return n % cuda::kPack<T> == 0;
  };
  return args.traditional == 0 && whole(args.half) && whole(args.cols) && whole(args.head_step) &&
         whole(args.token_step) && (args.cols - args.half) / cuda::kPack<T> <= kThreads &&
         args.half <= kMostPairs && cuda::is_aligned(x) && cuda::is_aligned(y);
}

template <class T>
void rope_fwd(const KernelCall& call) {
  const auto& args = call.as<RopeArgs>();
  const T* x = call.input<T>(0);
  T* y = call.output<T>(0);
  const auto* offsets = call.input<std::int32_t>(1);
  const auto* periods = call.input<float>(2);
  auto* stream = static_cast<cudaStream_t>(call.queue);
  if (in_packs(args, x, y)) {
    Deal deal{};
    deal.packs = static_cast<int>((args.cols - args.half) / cuda::kPack<T>);
    deal.groups = static_cast<int>(
        std::clamp<std::int64_t>(std::min<std::int64_t>(kThreads / deal.packs, args.heads), 1, 4));
    deal.tokens = std::max(kThreads / (deal.packs * deal.groups), 1);
    if (args.half > 0) {
      deal.tokens = std::min(deal.tokens, std::max(kMostPairs / static_cast<int>(args.half), 1));
    }
    cuda::launch(turn_packs<T>, cuda::blocks_for(args.batch * args.tokens, deal.tokens), kThreads,
                 0, 1, stream, args, deal, x, offsets, periods, y);
    return;
  }
  const std::int64_t threads = args.batch * args.tokens * (args.cols - args.half);
  cuda::launch(turn<T>, cuda::blocks_for(threads, kThreads), kThreads, 0, 1, stream, args, x,
               offsets, periods, y);
}

}  // namespace

void register_rope_cuda(KernelRegistry& registry) {
  registry.add(Backend::kCuda, "rope_fwd_f32", rope_fwd<float>);
  registry.add(Backend::kCuda, "rope_fwd_f16", rope_fwd<F16>);
  registry.add(Backend::kCuda, "rope_fwd_bf16", rope_fwd<BF16>);
}

}  // namespace mlxtape::ops
