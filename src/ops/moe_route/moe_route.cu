// CUDA kernels of moe_route (formula and layout: mlxtape/ops/moe_route.h).
//
// Forward: a warp a row, the row in registers; the next is on its way as soon as they are free. A list
// of few logits, the chosen among them, is made in shared memory (moe_route_choose.cuh), and each
// place of it finds its rank by counting the larger ones. Bound by instructions.
//
// Counts: a block counts in shared memory and leaves the running sums of its counts in scratch
// memory; the sum of these over the blocks is offsets. Integers, so that the order does not matter.
//
// Backward: a warp a row, or as many as have 32 places together, made in shared memory and written
// once. Bound by memory.
#include <cuda_runtime.h>

#include <algorithm>
#include <type_traits>

#include "backends/cuda/device/exp.cuh"
#include "backends/cuda/device/launch.cuh"
#include "backends/cuda/device/rows.cuh"
#include "backends/cuda/device/scatter.cuh"
#include "mlxtape/core/registry.h"
#include "moe_route_args.h"
#include "moe_route_choose.cuh"

namespace mlxtape::ops {

namespace {

using cuda::exp_for;
using cuda::kAll;
using cuda::kPack;
using cuda::kWarp;
using cuda::narrow;
using cuda::Pack;
using cuda::widen;

// ---- from the list to the results ----

// What a warp keeps in shared memory.
struct Places {
  Place list[kPlaces];
  alignas(16) float value[kPlaces];
};

template <class T>
struct Results {
  std::uint32_t* indices;  // [k]
  T* scores;               // [k]
  unsigned* histogram;     // [E]
};

// 1 / x of a sum, which is at least 1, or NaN; within 1 ulp.
__device__ __forceinline__ float inverse_of(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// A number that compares like the logit and, where 16 bits leave room for it, of equal logits like
// the contract says. Infinity becomes NaN.
template <class T>
__device__ __forceinline__ float order_of(float v, unsigned index) {
  v += 0.0F;  // −0 becomes 0
  if constexpr (sizeof(T) == 4) return v;
  return __uint_as_float(__float_as_uint(v) | (v < 0 ? index : kMostExperts - 1 - index));
}

// From n ≤ 32·kOwn places of the list, of which this lane has kOwn. x: the row; m: its largest;
// full_sum: Σ exp(l − m) over the row, for the full softmax.
template <class RowOf, int kOwn, bool kFull, class T>
__device__ __forceinline__ void write_results(Places& places, int n, int k, const T* x, float m,
                                              float full_sum, const Results<T>& out) {
  const int lane = threadIdx.x % kWarp;
  unsigned index[kOwn];
  float value[kOwn];
  float own[kOwn];
  int rank[kOwn] = {};
  __syncwarp();
#pragma unroll
  for (int c = 0; c < kOwn; ++c) {
    const int place = lane + c * kWarp;
    index[c] = index_of<RowOf>(places.list[place]);
    value[c] = NAN;
    if (place < n) value[c] = widen(x[index[c]]);
    own[c] = order_of<T>(value[c], index[c]);
    places.value[place] = own[c];
  }
  __syncwarp();
  // A difference with NaN, which is behind the list, has no sign.
#pragma unroll 1
  for (int i = 0; i < n; i += 16) {
#pragma unroll
    for (int j = i; j < i + 16; j += 4) {
      const float4 others = *reinterpret_cast<const float4*>(places.value + j);
#pragma unroll
      for (int c = 0; c < kOwn; ++c) {
        rank[c] += __float_as_uint(own[c] - others.x) >> 31U;
        rank[c] += __float_as_uint(own[c] - others.y) >> 31U;
        rank[c] += __float_as_uint(own[c] - others.z) >> 31U;
        rank[c] += __float_as_uint(own[c] - others.w) >> 31U;
      }
    }
  }
  unsigned ranks = 0;
#pragma unroll
  for (int c = 0; c < kOwn; ++c) ranks += rank[c];
  // Each pair of places that differ made one rank larger by one.
  if (__reduce_add_sync(kAll, ranks) != static_cast<unsigned>(n) * (n - 1) / 2) {
    auto* keys = reinterpret_cast<unsigned*>(places.value);
    unsigned key[kOwn];
    __syncwarp();  // the values have been read
#pragma unroll
    for (int c = 0; c < kOwn; ++c) {
      key[c] = key_of(value[c]);
      keys[lane + c * kWarp] = key[c];
      places.list[lane + c * kWarp] = static_cast<Place>(index[c]);
      rank[c] = 0;
    }
    __syncwarp();
#pragma unroll 1
    for (int i = 0; i < n; ++i) {
#pragma unroll
      for (int c = 0; c < kOwn; ++c) {
        rank[c] += keys[i] > key[c] || (keys[i] == key[c] && places.list[i] < index[c]) ? 1 : 0;
      }
    }
  }
  float e[kOwn];
  float sum = 0;
#pragma unroll
  for (int c = 0; c < kOwn; ++c) {
    if (lane + c * kWarp >= n) rank[c] = kMostChosen;
    e[c] = 0;
    if (rank[c] < k) {
      e[c] = kFull ? exp_for<T>(value[c] - m) : cuda::exp_times_constant<T>(value[c] - m);
    }
    sum += e[c];
  }
  const float share = inverse_of(kFull ? full_sum : cuda::lanes_sum(sum));
#pragma unroll
  for (int c = 0; c < kOwn; ++c) {
    if (rank[c] >= k) continue;
    out.indices[rank[c]] = index[c];
    out.scores[rank[c]] = narrow<T>(e[c] * share);
    atomicAdd(out.histogram + index[c], 1U);
  }
}

// sums[e] = Σ_{i<e} histogram[i] for e in [0, experts). The whole block; totals: a word a warp.
template <int kWarps>
__device__ __forceinline__ void write_running_sums(const unsigned* histogram, int experts,
                                                   unsigned* totals, std::uint32_t* sums) {
  constexpr int kThreads = kWarps * kWarp;
  const int lane = threadIdx.x % kWarp;
  const int warp = threadIdx.x / kWarp;
  unsigned before = 0;
  for (int base = 0; base < experts; base += kThreads) {
    const int e = base + static_cast<int>(threadIdx.x);
    const unsigned own = e < experts ? histogram[e] : 0;
    unsigned sum = own;
#pragma unroll
    for (int step = 1; step < kWarp; step *= 2) {
      const unsigned lower = __shfl_up_sync(kAll, sum, step);
      if (lane >= step) sum += lower;
    }
    if (lane == kWarp - 1) totals[warp] = sum;
    __syncthreads();
    const unsigned total = lane < kWarps ? totals[lane] : 0;
    const unsigned lower = __reduce_add_sync(kAll, lane < warp ? total : 0);
    if (e < experts) sums[e] = before + lower + sum - own;
    before += __reduce_add_sync(kAll, total);
    __syncthreads();
  }
}

// ---- forward ----

// Warps of a block: one block a multiprocessor, in 64 registers a thread, or 128 for long rows and for
// those that must be looked at one by one.
template <int kEach, bool kWhole>
constexpr int kRouters = kEach <= 8 || (kEach == 16 && kWhole) ? 32 : 16;

template <class T, int kEach, bool kWhole, bool kFull>
__global__ void __launch_bounds__(kRouters<kEach, kWhole>* kWarp, 1)
    forward(MoeRouteArgs args, const T* logits, std::uint32_t* indices, T* scores, float* lse,
            std::uint32_t* sums) {
  cuda::wait_turn();
  using RowOf = Row<T, kEach, kWhole>;
  constexpr int kWarps = kRouters<kEach, kWhole>;
  __shared__ Places all_places[kWarps];
  __shared__ unsigned histogram[kMostExperts];
  __shared__ unsigned totals[kWarps];
  const int experts = static_cast<int>(args.experts);
  const int k = static_cast<int>(args.k);
  const int warp = threadIdx.x / kWarp;
  Places& places = all_places[warp];
  // Neighbouring rows go to different blocks, so that few rows still reach every multiprocessor.
  const std::int64_t step = std::int64_t{gridDim.x} * kWarps;
  std::int64_t row = std::int64_t{warp} * gridDim.x + blockIdx.x;
  const T* x = logits + row * args.experts;
  RowOf next;
  if (row < args.rows) next.load(x, experts);
  for (int e = threadIdx.x; e < experts; e += kWarps * kWarp) histogram[e] = 0;
  __syncthreads();
  for (; row < args.rows; row += step, x += step * args.experts) {
    const float largest = sort_lanes(next.largest(experts));
    const float m = __shfl_sync(kAll, largest, 0);
    const int n = choose<RowOf, kEach>(next, largest, experts, k, places.list);
    float sum = 0;
    if constexpr (kFull) {
      float v[kEach];
      next.widen_to(v, experts);
#pragma unroll
      for (int j = 0; j < kEach; ++j) sum += exp_for<T>(v[j] - m);
      sum = cuda::lanes_sum(sum);
      if (threadIdx.x % kWarp == 0) lse[row] = m + logf(sum);
    }
    if (row + step < args.rows) next.load(x + step * args.experts, experts);
    const Results<T> out{indices + row * k, scores + row * k, histogram};
    if (n <= kWarp) {
      write_results<RowOf, 1, kFull>(places, n, k, x, m, sum, out);
    } else {
      write_results<RowOf, 2, kFull>(places, n, k, x, m, sum, out);
    }
  }
  __syncthreads();
  write_running_sums<kWarps>(histogram, experts, totals, sums + std::int64_t{blockIdx.x} * experts);
}

// offsets = the sum over the blocks of their running sums, counts the differences. 32 columns a
// block; its warps share the rows.
constexpr int kShares = 16;

__global__ void __launch_bounds__(kShares* kWarp)
    add_counts(const std::uint32_t* sums, int blocks, int experts, unsigned total,
               std::uint32_t* counts, std::uint32_t* offsets) {
  cuda::wait_turn();
  __shared__ uint2 room[kShares][kWarp];
  const int lane = threadIdx.x % kWarp;
  const int share = threadIdx.x / kWarp;
  const int e = blockIdx.x * kWarp + lane;
  uint2 sum = make_uint2(0, 0);  // of this column and the next
  if (e < experts) {
    const std::uint32_t* column = sums + e;
    const int next = e + 1 < experts ? 1 : 0;
#pragma unroll 8
    for (int b = share; b < blocks; b += kShares) {
      sum.x += column[b * experts];
      sum.y += column[b * experts + next];
    }
  }
  room[share][lane] = sum;
  __syncthreads();
  if (share != 0 || e >= experts) return;
#pragma unroll
  for (int s = 1; s < kShares; ++s) {
    sum.x += room[s][lane].x;
    sum.y += room[s][lane].y;
  }
  const bool last = e + 1 == experts;
  offsets[e] = sum.x;
  counts[e] = (last ? total : sum.y) - sum.x;
  if (last) offsets[experts] = total;
}

// Blocks of the forward: one a multiprocessor, fewer where that leaves no warp a row less to do.
std::int64_t forward_blocks(const MoeRouteArgs& args) {
  const std::int64_t warps = args.experts <= 512 ? 32 : 16;
  if (args.rows <= warps * cuda::kMultiprocessors) {
    return std::min<std::int64_t>(args.rows, cuda::kMultiprocessors);
  }
  const std::int64_t each = cuda::blocks_for(args.rows, warps * cuda::kMultiprocessors);
  return cuda::blocks_for(args.rows, warps * each);
}

std::size_t forward_workspace(const void* args) {
  const auto& a = *static_cast<const MoeRouteArgs*>(args);
  return static_cast<std::size_t>(forward_blocks(a) * a.experts) * sizeof(std::uint32_t);
}

// Calls body(logits a lane, as a constant) for rows of that many experts.
template <class Body>
void with_row(std::int64_t experts, const Body& body) {
  if (experts <= 128) return body(std::integral_constant<int, 4>());
  if (experts <= 256) return body(std::integral_constant<int, 8>());
  if (experts <= 512) return body(std::integral_constant<int, 16>());
  body(std::integral_constant<int, 32>());
}

template <class T>
void moe_route_fwd(const KernelCall& call) {
  const auto& args = call.as<MoeRouteArgs>();
  const T* logits = call.input<T>(0);                        // [T, E]
  auto* indices = call.output<std::uint32_t>(0);             // [T, k]
  T* scores = call.output<T>(1);                             // [T, k]
  auto* counts = call.output<std::uint32_t>(2);              // [E]
  auto* offsets = call.output<std::uint32_t>(3);             // [E+1]
  auto* lse = call.output<float>(4);                         // [T] or null
  auto* sums = static_cast<std::uint32_t*>(call.workspace);  // [blocks, E]
  const auto stream = static_cast<cudaStream_t>(call.queue);
  const std::int64_t blocks = forward_blocks(args);
  if (blocks != 0) {
    with_row(args.experts, [&](auto each) {
      constexpr int kEach = each();
      const auto run = [&]<bool kWhole>() {
        cuda::launch(
            args.full != 0 ? forward<T, kEach, kWhole, true> : forward<T, kEach, kWhole, false>,
            blocks, kRouters<kEach, kWhole> * kWarp, 0, 1, stream, args, logits, indices, scores,
            lse, sums);
      };
      if constexpr (kEach >= kPack<T>) {
        if (args.experts == kEach * kWarp && cuda::is_aligned(logits)) {
          return run.template operator()<true>();
        }
      }
      run.template operator()<false>();
    });
  }
  cuda::launch(add_counts, cuda::blocks_for(args.experts, kWarp), kShares * kWarp, 0, 1, stream,
               sums, static_cast<int>(blocks), static_cast<int>(args.experts),
               static_cast<unsigned>(args.rows * args.k), counts, offsets);
}

// ---- backward ----

constexpr int kAdders = 4;                    // warps of a block
constexpr std::int64_t kEnough = 2048;        // warps below which none takes more than a row
constexpr std::int64_t kMostTogether = 1536;  // logits of several rows: 3 of 512
static_assert(kMostTogether >= kMostExperts);

template <class T>
struct Chosen {
  const std::uint32_t* indices;  // [T, k]
  const T* scores;               // [T, k]
  const T* dscores;              // [T, k]
};

// What a lane has of the chosen of a row: places lane and lane + 32.
struct Own {
  bool valid[2];
  unsigned index[2];
  float s[2], ds[2];

  template <class T>
  __device__ __forceinline__ void load(const Chosen<T>& in, std::int64_t row, int k,
                                       unsigned experts) {
    const int lane = threadIdx.x % kWarp;
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const int j = lane + c * kWarp;
      valid[c] = false;
      index[c] = 0;
      s[c] = 0;
      ds[c] = 0;
      if (j >= k) continue;
      index[c] = in.indices[row * k + j];
      valid[c] = index[c] < experts;
      s[c] = widen(in.scores[row * k + j]);
      ds[c] = widen(in.dscores[row * k + j]);
    }
  }

  // Σ s·ds
  __device__ __forceinline__ float inner() const {
    return cuda::lanes_sum((valid[0] ? s[0] * ds[0] : 0) + (valid[1] ? s[1] * ds[1] : 0));
  }
};

// Several rows a warp, a place a lane: k ≤ 32.
template <class T>
__global__ void __launch_bounds__(kAdders* kWarp)
    backward_rows(MoeRouteArgs args, Chosen<T> in, int most_rows, cuda::LaneDivisor by_k,
                  T* dlogits) {
  cuda::wait_turn();
  extern __shared__ float4 memory[];
  const int experts = static_cast<int>(args.experts);
  const int k = static_cast<int>(args.k);
  const int lane = threadIdx.x % kWarp;
  T* room = reinterpret_cast<T*>(memory) +
            threadIdx.x / kWarp * cuda::room_for<T, T>(most_rows * experts);
  const std::int64_t first = (std::int64_t{blockIdx.x} * kAdders + threadIdx.x / kWarp) * most_rows;
  if (first >= args.rows) return;
  const int rows = static_cast<int>(min(std::int64_t{most_rows}, args.rows - first));
  const int row = by_k.divide(lane);
  // On their way while the zeros are written.
  unsigned index = 0;
  T score{};
  T dscore{};
  if (row < rows) {
    index = in.indices[first * k + lane];
    score = in.scores[first * k + lane];
    dscore = in.dscores[first * k + lane];
  }
  T* out = dlogits + first * args.experts;
  const int skew = cuda::skew_of(out);
  cuda::zero(room, skew + rows * experts);
  const float s = widen(score);
  const float ds = widen(dscore);
  const bool valid = row < rows && index < args.experts;
  float c = valid ? s * ds : 0;
  for (int step = 1; step < k; step *= 2) {
    const float next = __shfl_down_sync(kAll, c, step);
    if (lane - row * k + step < k) c += next;
  }
  c = __shfl_sync(kAll, c, row * k);
  cuda::place(room + skew, valid, static_cast<unsigned>(row * experts) + index, s * (ds - c));
  cuda::store_row(room, out, rows * experts);
}

// A row a warp, any k.
template <class T>
__global__ void __launch_bounds__(kAdders* kWarp)
    backward_chosen(MoeRouteArgs args, Chosen<T> in, T* dlogits) {
  cuda::wait_turn();
  extern __shared__ float4 memory[];
  const int experts = static_cast<int>(args.experts);
  const int k = static_cast<int>(args.k);
  float* room =
      reinterpret_cast<float*>(memory) + threadIdx.x / kWarp * cuda::room_for<float, T>(experts);
  const std::int64_t row = std::int64_t{blockIdx.x} * kAdders + threadIdx.x / kWarp;
  if (row >= args.rows) return;
  T* out = dlogits + row * args.experts;
  Own own;
  own.load(in, row, k, args.experts);
  const int skew = cuda::skew_of(out);
  cuda::zero(room, skew + experts);
  const float c = own.inner();
  cuda::place(room + skew, own.valid[0], own.index[0], own.s[0] * (own.ds[0] - c));
  if (k > kWarp) {
    cuda::add_in_order(room + skew, own.valid[1], own.index[1], own.s[1] * (own.ds[1] - c));
  }
  cuda::store_row(room, out, experts);
}

// kPacked: logits and dlogits have rows of whole packs.
template <class T, bool kPacked>
__global__ void __launch_bounds__(kAdders* kWarp)
    backward_full(MoeRouteArgs args, Chosen<T> in, const T* logits, const float* lse, T* dlogits) {
  cuda::wait_turn();
  constexpr int kPacks = kMostExperts / kWarp / kPack<T>;
  extern __shared__ float4 memory[];
  const int experts = static_cast<int>(args.experts);
  const int k = static_cast<int>(args.k);
  const int lane = threadIdx.x % kWarp;
  float* sums =
      reinterpret_cast<float*>(memory) + threadIdx.x / kWarp * cuda::room_for<float, T>(experts);
  const std::int64_t row = std::int64_t{blockIdx.x} * kAdders + threadIdx.x / kWarp;
  if (row >= args.rows) return;
  const T* x = logits + row * args.experts;
  T* out = dlogits + row * args.experts;
  Own own;
  own.load(in, row, k, args.experts);
  const float reference = lse[row];
  Pack<T> kept[kPacks];
  if constexpr (kPacked) {
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      const int e = (p * kWarp + lane) * kPack<T>;
      if (e < experts) kept[p] = cuda::load_pack(x + e);
    }
  }
  cuda::zero(sums, experts);
  const float c = own.inner();
  cuda::place(sums, own.valid[0], own.index[0], own.ds[0]);
  if (k > kWarp) cuda::add_in_order(sums, own.valid[1], own.index[1], own.ds[1]);
  if constexpr (kPacked) {
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      const int e = (p * kWarp + lane) * kPack<T>;
      if (e >= experts) continue;
      float v[kPack<T>];
      cuda::unpack(kept[p], v);
#pragma unroll
      for (int i = 0; i < kPack<T>; ++i) v[i] = exp_for<T>(v[i] - reference) * (sums[e + i] - c);
      cuda::store_pack(cuda::pack_of<T>(v), out + e);
    }
  } else {
    for (int e = lane; e < experts; e += kWarp) {
      out[e] = narrow<T>(exp_for<T>(widen(x[e]) - reference) * (sums[e] - c));
    }
  }
}

template <class T>
void moe_route_bwd(const KernelCall& call) {
  const auto& args = call.as<MoeRouteArgs>();
  const Chosen<T> in{call.input<std::uint32_t>(0), call.input<T>(1), call.input<T>(2)};
  const T* logits = call.input<T>(3);      // [T, E], or null: renormalised
  const auto* lse = call.input<float>(4);  // [T], or null
  T* dlogits = call.output<T>(0);          // [T, E]
  const auto stream = static_cast<cudaStream_t>(call.queue);
  const auto run = [&](const auto kernel, int rows, int room_bytes, const auto&... more) {
    cuda::launch(kernel, cuda::blocks_for(args.rows, kAdders * rows), kAdders * kWarp,
                 kAdders * room_bytes, 1, stream, args, in, more...);
  };
  const auto experts = static_cast<int>(args.experts);
  if (args.full == 0 && args.k <= kWarp) {
    const std::int64_t fitting = std::min(kWarp / args.k, kMostTogether / args.experts);
    const auto rows = static_cast<int>(std::clamp<std::int64_t>(args.rows / kEnough, 1, fitting));
    const int bytes = static_cast<int>(sizeof(T)) * cuda::room_for<T, T>(rows * experts);
    return run(backward_rows<T>, rows, bytes, rows, cuda::LaneDivisor(args.k), dlogits);
  }
  const int bytes = static_cast<int>(sizeof(float)) * cuda::room_for<float, T>(experts);
  if (args.full == 0) return run(backward_chosen<T>, 1, bytes, dlogits);
  const bool packed =
      args.experts % kPack<T> == 0 && cuda::is_aligned(logits) && cuda::is_aligned(dlogits);
  run(packed ? backward_full<T, true> : backward_full<T, false>, 1, bytes, logits, lse, dlogits);
}

template <class T>
void add_kernels(KernelRegistry& registry) {
  const std::string type = name_of(kDType<T>);
  registry.add(Backend::kCuda, "moe_route_fwd_" + type, moe_route_fwd<T>, forward_workspace);
  registry.add(Backend::kCuda, "moe_route_bwd_" + type, moe_route_bwd<T>);
}

}  // namespace

void register_moe_route_cuda(KernelRegistry& registry) {
  add_kernels<float>(registry);
  add_kernels<F16>(registry);
  add_kernels<BF16>(registry);
}

}  // namespace mlxtape::ops
