// CUDA kernels of sample (formula and layout: mlxtape/ops/sample.h).
//
// A row belongs to a cluster of 8 blocks, each with an eighth of the tokens in its shared memory as f32, or to one block:
// short rows, and those of a GPU without clusters or with too few room, whose logits are then kept in global memory.
// Every step is a pass over these: the largest; top_p and top_k by sample_search.cuh; the running sum that the drawn
// number falls into. After each the blocks meet, which costs about as much as a pass. A greedy row meets once.
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <string>

#include "backends/cuda/device/launch.cuh"
#include "backends/cuda/device/rows.cuh"
#include "backends/cuda/device/vectors.cuh"
#include "mlxtape/base/dtype.h"
#include "mlxtape/core/registry.h"
#include "sample_args.h"
#include "sample_penalties.cuh"
#include "sample_search.cuh"
#include "sample_team.cuh"

namespace mlxtape::ops {

namespace {

using namespace sampling;
using cuda::kPack;
using cuda::Pack;

constexpr int kBlocks = 8;               // of a cluster
constexpr std::int64_t kShort = 4096;    // tokens that one block keeps
constexpr int kMostShared = 200 * 1024;  // bytes of logits; the rest is for bins
constexpr std::int64_t kSpare = 8;       // logits of room before the first, for its alignment
constexpr unsigned kTop = 20;            // top_ids
constexpr unsigned kFullSign = 0x80000000U;

struct SampleCall {
  const float* numbers;  // [B, 6]
  const int* whole;      // [B, 6]
  int* history;          // [B, H]
  int* lengths;          // [B]
  const int* bias_ids;   // [B, K]
  const float* bias;     // [B, K]
  int* tokens;           // [B]
  float* logprobs;       // [B]
  int* top_ids;          // [B, 20]
  float* top_logprobs;   // [B, 20]
  unsigned* marks;       // [B, V]
  float* kept;           // [B, V + spare], or null: in shared memory
  std::int64_t kept_row;
};

// ---- what a block knows of its row ----

template <int kTeam>
struct Shared {
  Boards<kTeam> boards;
  Bins bins;
  Settings settings;
  int length;
  unsigned listed;  // of the first block
  std::uint64_t list[kTop];
};

// In the order of numbers, the largest first, with the token below.
__device__ __forceinline__ Number rank_of(float z, unsigned token) {
  const unsigned bits = __float_as_uint(z);
  const unsigned key = (bits & kFullSign) != 0 ? ~bits : bits | kFullSign;
  return Number{~key} << 32U | token;
}
__device__ __forceinline__ float logit_of(Number rank) {
  const unsigned key = ~static_cast<unsigned>(rank >> 32U);
  return __uint_as_float((key & kFullSign) != 0 ? key & ~kFullSign : ~key);
}
__device__ __forceinline__ bool is_finite(float v) {
  return (__float_as_uint(v) & ~kFullSign) < kInfinityBits;
}

// ---- passes ----

struct Best {
  float z = kMinusInfinity;
  int i = 0;
  __device__ __forceinline__ void look(float v, int at) {
    if (v > z) {
      z = v;
      i = at;
    }
  }
  __device__ Number rank(unsigned first) const {
    return rank_of(z, first + static_cast<unsigned>(i));
  }
};

// n logits to z, which lies to 16 bytes as x does. Returns the thread's best.
template <class T>
__device__ __forceinline__ Best load_logits(const T* x, int n, float* z) {
  constexpr int kEach = kPack<T>;
  constexpr int kAhead = sizeof(T) == 4 ? 5 : 3;  // 19,000 logits of a block at once
  const int past = static_cast<int>(reinterpret_cast<std::uintptr_t>(x) % 16 / sizeof(T));
  const int head = past == 0 ? 0 : min(n, kEach - past);
  const int packs = (n - head) / kEach;
  Best best;
  const auto take = [&](int i) {
    z[i] = counted(cuda::widen(x[i]));
    best.look(z[i], i);
  };
  if (static_cast<int>(threadIdx.x) < head) take(static_cast<int>(threadIdx.x));
  for (int p = static_cast<int>(threadIdx.x); p < packs; p += kThreads * kAhead) {
    Pack<T> pack[kAhead];
#pragma unroll
    for (int a = 0; a < kAhead; ++a) {
      if (p + a * kThreads < packs) {
        pack[a] = cuda::load_pack(x + head + (p + a * kThreads) * kEach);
      }
    }
#pragma unroll
    for (int a = 0; a < kAhead; ++a) {
      if (p + a * kThreads >= packs) continue;
      const int i = head + (p + a * kThreads) * kEach;
      float v[kEach];
      cuda::unpack(pack[a], v);
#pragma unroll
      for (int k = 0; k < kEach; ++k) {
        v[k] = counted(v[k]);
        best.look(v[k], i + k);
      }
#pragma unroll
      for (int k = 0; k < kEach; k += 4) {
        *reinterpret_cast<float4*>(z + i + k) = make_float4(v[k], v[k + 1], v[k + 2], v[k + 3]);
      }
    }
  }
  const int tail = head + packs * kEach + static_cast<int>(threadIdx.x);
  if (tail < n) take(tail);
  return best;
}

__device__ __forceinline__ Best best_of(const float* z, int n) {
  Best best;
  for (int i = static_cast<int>(threadIdx.x); i < n; i += kThreads) best.look(z[i], i);
  return best;
}

// ---- log-probabilities ----

template <int kTeam>
__device__ __forceinline__ float log_sum_of(Team<kTeam>& team, const Share& share) {
  Number mass = 0;
  for (int i = static_cast<int>(threadIdx.x); i < share.n; i += kThreads) {
    mass += weight(share.d(i), -kLog2E);
  }
  return logf(__ull2float_rn(team.sum(mass)) * 0x1p-40F);
}

// Each of the list to its place, by a warp of the first block.
template <int kTeam>
__device__ __forceinline__ void write_top(const Shared<kTeam>& shared, std::int64_t row,
                                          float log_sum, bool good, const SampleCall& call) {
  const unsigned lane = threadIdx.x;
  if (lane >= kTop) return;
  const unsigned count = good ? shared.listed : 0;
  unsigned at = lane;  // past the listed: where nothing stands
  std::uint64_t place = 0;
  if (lane < count) {
    place = shared.list[lane];
    at = 0;
    for (unsigned j = 0; j < count; ++j) at += shared.list[j] < place ? 1 : 0;
  }
  const float d = __uint_as_float(static_cast<unsigned>(place >> 32U));
  call.top_ids[row * kTop + at] = lane < count ? static_cast<int>(place & ~0U) : -1;
  call.top_logprobs[row * kTop + at] = !good          ? __uint_as_float(0x7fffffffU)
                                       : lane < count ? -d - log_sum
                                                      : kMinusInfinity;
}

template <int kTeam>
__device__ __forceinline__ void list_top(Team<kTeam>& team, Shared<kTeam>& shared,
                                         const Share& share) {
  const std::uint64_t last =
      last_place(team, shared.bins, share, false, [](Number) { return ~Number{0}; }, kTop);
  for (int i = static_cast<int>(threadIdx.x); i < share.n; i += kThreads) {
    const std::uint64_t place = share.place(i);
    if (place > last || share.d_bits(i) == kInfinityBits) continue;
    const unsigned at = atomicAdd(team.in_block(&shared.listed, 0), 1U);
    *team.in_block(&shared.list[at], 0) = place;
  }
  team.meet();
}

// ---- a row ----

template <int kTeam>
__device__ __forceinline__ void finish(const Shared<kTeam>& shared, const SampleArgs& args,
                                       const SampleCall& call, std::int64_t row, int token,
                                       float logprob) {
  call.tokens[row] = token;
  if (args.logprobs != 0) call.logprobs[row] = logprob;
  if (args.append == 0 || token < 0) return;
  const int length = shared.length;
  if (length >= 0 && length < args.room) call.history[row * args.room + length] = token;
  call.lengths[row] = length + 1;
}

template <class T, int kTeam>
__global__ void __launch_bounds__(kThreads)
    sample_rows(SampleArgs args, const T* logits, SampleCall call) {
  extern __shared__ float4 room[];
  __shared__ Shared<kTeam> shared;
  cuda::wait_turn();
  const std::int64_t row = blockIdx.x / kTeam;
  Team<kTeam> team{shared.boards, blockIdx.x % kTeam};
  const int vocabulary = static_cast<int>(args.vocabulary);
  const int each = (vocabulary + kTeam * kWarp - 1) / (kTeam * kWarp) * kWarp;
  Share share{};
  share.first = team.block * static_cast<unsigned>(each);
  share.n = max(0, min(each, vocabulary - static_cast<int>(share.first)));
  const T* x = logits + row * args.vocabulary + share.first;
  auto* z = reinterpret_cast<float*>(room);
  if constexpr (kTeam == 1) {
    if (call.kept != nullptr) z = call.kept + row * call.kept_row;
  }
  z += reinterpret_cast<std::uintptr_t>(x) % 16 / sizeof(T);
  share.z = z;

  shared.bins.clear();
  if (threadIdx.x == 0) shared.listed = 0;
  team.begin();
  // Settings are on their way while logits come.
  const unsigned t = threadIdx.x;
  unsigned word = 0;
  if (t < 6) word = __float_as_uint(call.numbers[row * 6 + t]);
  if (t >= 6 && t < 12) word = static_cast<unsigned>(call.whole[row * 6 + t - 6]);
  if (t == 12) word = static_cast<unsigned>(call.lengths[row]);
  const Best loaded = load_logits(x, share.n, z);
  if (t < 12) reinterpret_cast<unsigned*>(&shared.settings)[t] = word;
  if (t == 12) shared.length = static_cast<int>(word);
  team.begun();
  const Number raw = team.least(loaded.rank(share.first));
  share.most = logit_of(raw);
  const float raw_most = share.most;
  bool good = is_finite(raw_most);
  Number best = raw;
  float log_sum = 0;
  if (good && args.logprobs != 0) {
    log_sum = log_sum_of(team, share);
    if (args.top != 0) list_top(team, shared, share);
  }
  const Windows windows = windows_of(shared.settings, shared.length, args.room);
  if (args.biases != 0 || windows.any()) {
    add_biases({call.bias_ids + row * args.biases, call.bias + row * args.biases,
                static_cast<int>(args.biases)},
               z, share);
    if (windows.any()) {
      add_penalties(shared.settings, windows, call.history + row * args.room,
                    call.marks + row * args.vocabulary + share.first, z, share);
    }
    best = team.least(best_of(z, share.n).rank(share.first));
    share.most = logit_of(best);
    good = good && is_finite(share.most);
  }
  if (args.top != 0 && team.block == 0) write_top(shared, row, log_sum, good, call);
  if (!good || shared.settings.greedy()) {
    if (team.block != 0 || threadIdx.x != 0) return;
    const int token = good ? static_cast<int>(best & 0xffffffffU) : -1;
    float logprob = __uint_as_float(0x7fffffffU);
    if (good && args.logprobs != 0) {
      const float v = counted(cuda::widen(logits[row * args.vocabulary + token]));
      logprob = (v - raw_most) - log_sum;
    }
    return finish(shared, args, call, row, token, logprob);
  }
  std::uint64_t last = shared.settings.last_in_reach();
  if (shared.settings.searches()) {
    last = min(last, last_place(
                         team, shared.bins, share, shared.settings.top_p < 1,
                         [&](Number all) { return shared.settings.least_mass(all); },
                         shared.settings.most_tokens()));
  }
  const float slope = slope_of(shared.settings.temperature);
  const auto kept = [&](int i) -> Number {
    return share.place(i) <= last ? weight(share.d(i), slope) : 0;
  };
  const auto target = [&](Number all) -> Number {
    return product_high(random_of(shared.settings, static_cast<std::uint32_t>(shared.length)), all);
  };
  int at = 0;
  if (team.pass(share.n, kept, target, at)) {
    const float v = counted(cuda::widen(x[at]));
    finish(shared, args, call, row, static_cast<int>(share.first) + at, (v - raw_most) - log_sum);
  }
}

// ---- launch ----

std::int64_t kept_row(const SampleArgs& a) { return (a.vocabulary + kSpare + 3) / 4 * 4; }

std::size_t workspace(const void* args) {
  const auto& a = *static_cast<const SampleArgs*>(args);
  return static_cast<std::size_t>(a.rows) * static_cast<std::size_t>(kept_row(a) + a.vocabulary) *
         sizeof(float);
}

// May a cluster of this kernel run here, with so much shared memory in each block?
template <class Kernel>
bool has_clusters(Kernel kernel, int bytes) {
  thread_local int known_device = -1, known_bytes = 0;
  thread_local bool known = false;
  int device = 0, clusters = 0;
  cuda::check(cudaGetDevice(&device), "asking for the device");
  if (device == known_device && bytes == known_bytes) return known;
  cuda::check(cudaDeviceGetAttribute(&clusters, cudaDevAttrClusterLaunch, device),
              "asking for clusters");
  known = clusters != 0 && cuda::clusters_at_once(kernel, kBlocks, kThreads, bytes) > 0;
  known_device = device;
  known_bytes = bytes;
  return known;
}

template <class T>
void sample_fwd(const KernelCall& call) {
  const auto& args = call.as<SampleArgs>();
  const T* logits = call.input<T>(0);
  const bool append = args.append != 0;
  auto* kept = static_cast<float*>(call.workspace);
  SampleCall c{call.input<float>(1),
               call.input<int>(2),
               static_cast<int*>(append ? call.out[4] : call.in[3]),
               static_cast<int*>(append ? call.out[5] : call.in[4]),
               call.input<int>(5),
               call.input<float>(6),
               call.output<int>(0),
               call.output<float>(1),
               call.output<int>(2),
               call.output<float>(3),
               reinterpret_cast<unsigned*>(kept + args.rows * kept_row(args)),
               nullptr,
               kept_row(args)};
  auto* stream = static_cast<cudaStream_t>(call.queue);
  const bool quickest = args.form == SampleForm::kQuickest;
  const auto bytes = [](std::int64_t tokens) {
    return static_cast<std::int64_t>(sizeof(float)) * (tokens + kSpare);
  };
  if (quickest && args.vocabulary <= kShort) {
    return cuda::launch(sample_rows<T, 1>, args.rows, kThreads,
                        static_cast<int>(bytes(args.vocabulary)), 1, stream, args, logits, c);
  }
  const std::int64_t most = bytes(cuda::blocks_for(args.vocabulary, kBlocks * kWarp) * kWarp);
  if (quickest && most <= kMostShared &&
      has_clusters(sample_rows<T, kBlocks>, static_cast<int>(most))) {
    return cuda::launch(sample_rows<T, kBlocks>, args.rows * kBlocks, kThreads,
                        static_cast<int>(most), kBlocks, stream, args, logits, c);
  }
  c.kept = kept;
  cuda::launch(sample_rows<T, 1>, args.rows, kThreads, 0, 1, stream, args, logits, c);
}

template <class T>
void add_kernels(KernelRegistry& registry) {
  registry.add(Backend::kCuda, std::string("sample_fwd_") + name_of(kDType<T>), sample_fwd<T>,
               workspace);
}

}  // namespace

void register_sample_cuda(KernelRegistry& registry) {
  add_kernels<float>(registry);
  add_kernels<F16>(registry);
  add_kernels<BF16>(registry);
}

}  // namespace mlxtape::ops
