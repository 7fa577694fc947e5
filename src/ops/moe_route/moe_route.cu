// CUDA kernels of moe_route (formula and layout: mlxtape/ops/moe_route.h).
//
// Forward: a warp a row, the row in registers; the next is on its way as soon as they are free. The
// k-th largest of the lanes' maxima is a floor under the k-th largest logit, for k lanes have one at
// or above it. What reaches the floor (12 of 512 logits on average for k = 10) is put on a list in
// shared memory, and each place of the list finds its rank by counting the larger ones. Where there
// are too many, where the floor is not a number above −inf, and for k > 32, the list is made by
// bisection on the bits of the keys, and of the indices where keys are equal. Bound by instructions.
//
// Counts: a block counts in shared memory and leaves the running sums of its counts in scratch
// memory; the sum of these over the blocks is offsets. Integers, so that the order does not matter.
//
// Backward: a warp a row, whose sums it keeps in shared memory; each row is written once. Bound by
// memory.
#include <cuda_runtime.h>

#include <algorithm>
#include <type_traits>

#include "backends/cuda/device/exp.cuh"
#include "backends/cuda/device/launch.cuh"
#include "backends/cuda/device/rows.cuh"
#include "backends/cuda/device/scatter.cuh"
#include "mlxtape/core/registry.h"
#include "moe_route_args.h"

namespace mlxtape::ops {

namespace {

using cuda::exp_for;
using cuda::kAll;
using cuda::kPack;
using cuda::kWarp;
using cuda::narrow;
using cuda::Pack;
using cuda::widen;

constexpr int kMostExperts = 1024;
constexpr int kMostChosen = 64;
constexpr int kPlaces = 64;  // of a list

// ---- keys: unsigned numbers that compare like the contract says ----

constexpr unsigned kAbsent = 0;  // past the end of the row
constexpr unsigned kNaN = 1;     // the next number, −inf, is at 0x007fffff

__device__ __forceinline__ unsigned key_of(float v) {
  const unsigned bits = __float_as_uint(v + 0.0F);  // −0 becomes 0
  const unsigned key = bits ^ (static_cast<unsigned>(static_cast<int>(bits) >> 31) | 0x80000000U);
  return isnan(v) ? kNaN : key;
}
// NaN for kNaN and kAbsent.
__device__ __forceinline__ float value_of(unsigned key) {
  return __uint_as_float((key & 0x80000000U) != 0 ? key ^ 0x80000000U : ~key);
}

// ---- a row in registers ----

// kEach logits a lane. kPacked: in packs of 16 bytes, neighbouring lanes reading neighbouring packs;
// else neighbouring logits.
template <class T, int kEach, bool kPacked>
struct Row {
  static constexpr int kWords = kPacked ? kEach / kPack<T> : kEach;
  std::conditional_t<kPacked, Pack<T>, T> word[kWords];

  // The index of this lane's j-th logit is base() + offset(j). Compare offsets, which are constants.
  static __device__ __forceinline__ int base() {
    return static_cast<int>(threadIdx.x % kWarp) * (kPacked ? kPack<T> : 1);
  }
  static __device__ __forceinline__ constexpr int offset(int j) {
    return kPacked ? j / kPack<T> * kWarp * kPack<T> + j % kPack<T> : j * kWarp;
  }

  // in: x is a row. What is not there is zero, so that nothing loaded before must be kept for it.
  __device__ __forceinline__ void load(const T* x, int experts, bool in) {
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      const int at = offset(kPacked ? w * kPack<T> : w);
      word[w] = {};
      if (!in || at >= experts - base()) continue;
      if constexpr (kPacked) {
        word[w] = cuda::load_pack(x + base() + at);
      } else {
        word[w] = x[base() + at];
      }
    }
  }

  // −inf past the end.
  __device__ __forceinline__ void widen_to(float (&v)[kEach], int experts) const {
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      if constexpr (kPacked) {
        float pack[kPack<T>];
        cuda::unpack(word[w], pack);
        const bool in = offset(w * kPack<T>) < experts - base();
#pragma unroll
        for (int i = 0; i < kPack<T>; ++i) v[w * kPack<T> + i] = in ? pack[i] : -INFINITY;
      } else {
        v[w] = offset(w) < experts - base() ? widen(word[w]) : -INFINITY;
      }
    }
  }
};

// ---- which logits are on the list ----

struct Entry {
  unsigned bits;  // of the logit
  unsigned index;
};

// The number of lanes' hits before this lane's, and of all; hits ≤ 32 in each.
struct Before {
  int own, all;
};
__device__ __forceinline__ Before count_before(int hits) {
  const unsigned lower = (1U << (threadIdx.x % kWarp)) - 1;
  Before before{0, 0};
#pragma unroll
  for (int bit = 0; bit < 6; ++bit) {
    const unsigned lanes = __ballot_sync(kAll, (hits >> bit) & 1);
    before.own += __popc(lanes & lower) << bit;
    before.all += __popc(lanes) << bit;
  }
  return before;
}

// Puts the value(j) that hit(j) says on the list, in any order; returns how many there are. If more
// than kPlaces the list is not written.
template <class RowOf, int kEach, class Hit, class Value>
__device__ __forceinline__ int make_list(const Hit& hit, const Value& value, Entry* list) {
  unsigned hits = 0;  // a bit each, which takes fewer registers than asking again
#pragma unroll
  for (int j = 0; j < kEach; ++j) hits |= hit(j) ? 1U << j : 0U;
  const Before before = count_before(__popc(hits));
  if (before.all > kPlaces) return before.all;
  Entry* to = list + before.own;
#pragma unroll
  for (int j = 0; j < kEach; ++j) {
    if ((hits >> j & 1U) == 0) continue;
    *to++ = {__float_as_uint(value(j)), static_cast<unsigned>(RowOf::base() + RowOf::offset(j))};
  }
  return before.all;
}

// A number that at least k ≤ 32 logits reach; NaN where fewer than k lanes have one above −inf.
template <int kEach>
__device__ __forceinline__ float find_floor(const float (&v)[kEach], int k) {
  float largest = -INFINITY;
#pragma unroll
  for (int j = 0; j < kEach; ++j) largest = fmaxf(largest, v[j]);  // passes NaN over
  // The last bits make the lanes differ, so that each round takes one; a little less is a floor too.
  unsigned key = (key_of(largest) & ~31U) | (threadIdx.x % kWarp);
  unsigned kth = 0;
  for (int round = 0; round < k; ++round) {
    kth = __reduce_max_sync(kAll, key);
    if (key == kth) key = 0;
  }
  return value_of(kth & ~31U);
}

// The list of exactly the k chosen, whatever the row holds. v is made again from the keys: NaNs lose
// their payload, −0 its sign, and NaN is past the end.
template <class RowOf, int kEach>
__device__ __forceinline__ void list_exactly(float (&v)[kEach], int experts, int k, Entry* list) {
  unsigned key[kEach];
#pragma unroll
  for (int j = 0; j < kEach; ++j) {
    key[j] = RowOf::offset(j) < experts - RowOf::base() ? key_of(v[j]) : kAbsent;
  }
  const auto count = [&](const auto& holds) {
    unsigned n = 0;
#pragma unroll
    for (int j = 0; j < kEach; ++j) n += holds(j) ? 1 : 0;
    return __reduce_add_sync(kAll, n);
  };
  const auto wanted = static_cast<unsigned>(k);
  unsigned bound = 0;              // the k-th largest key, or one below it that k keys reach
  unsigned reach = kWarp * kEach;  // how many do
#pragma unroll 1
  for (unsigned bit = 1U << 31; bit != 0 && reach != wanted; bit >>= 1) {
    const unsigned n = count([&](int j) { return key[j] >= (bound | bit); });
    if (n >= wanted) {
      bound |= bit;
      reach = n;
    }
  }
  int last = kMostExperts;  // less the base: the last index chosen of the keys that equal the bound
  if (reach != wanted) {
    const unsigned equal = wanted - count([&](int j) { return key[j] > bound; });
    last = 0;
#pragma unroll 1
    for (int bit = kMostExperts / 2; bit != 0; bit /= 2) {
      const int end = last + bit - RowOf::base();
      const unsigned n = count([&](int j) { return key[j] == bound && RowOf::offset(j) < end; });
      if (n < equal) last += bit;
    }
    last -= RowOf::base();
  }
  make_list<RowOf, kEach>(
      [&](int j) { return key[j] > bound || (key[j] == bound && RowOf::offset(j) <= last); },
      [&](int j) { return value_of(key[j]); }, list);
#pragma unroll
  for (int j = 0; j < kEach; ++j) v[j] = value_of(key[j]);
}

// ---- from the list to the results ----

template <class T>
struct Results {
  std::uint32_t* indices;  // [k]
  T* scores;               // [k]
  float* lse;              // [1]; the full softmax alone
};

// From n ≤ 32·kOwn places of the list, of which this lane has kOwn. sum_all(m): this lane's share of
// Σ exp(l − m), for the full softmax.
template <int kOwn, bool kFull, class T, class SumAll>
__device__ __forceinline__ void write_results(Entry* list, int n, int k, const Results<T>& out,
                                              const SumAll& sum_all, unsigned* histogram) {
  // A key and, so that of equal ones the first wins, what is left of its index.
  auto* order = reinterpret_cast<unsigned long long*>(list);
  const int lane = threadIdx.x % kWarp;
  unsigned long long own[kOwn];
  __syncwarp();
#pragma unroll
  for (int c = 0; c < kOwn; ++c) {
    const Entry entry = list[lane + c * kWarp];
    const unsigned key = key_of(__uint_as_float(entry.bits));
    own[c] = lane + c * kWarp < n ? static_cast<unsigned long long>(key) << 32U | ~entry.index : 0;
  }
  __syncwarp();
#pragma unroll
  for (int c = 0; c < kOwn; ++c) order[lane + c * kWarp] = own[c];  // zeros behind the list
  __syncwarp();
  int rank[kOwn] = {};
#pragma unroll(kOwn == 1 ? 2 : 1)
  for (int i = 0; i < n; i += 2) {
    const ulonglong2 two = *reinterpret_cast<const ulonglong2*>(order + i);
#pragma unroll
    for (int c = 0; c < kOwn; ++c) rank[c] += (two.x > own[c] ? 1 : 0) + (two.y > own[c] ? 1 : 0);
  }
  unsigned largest = 0;
#pragma unroll
  for (int c = 0; c < kOwn; ++c) largest = max(largest, static_cast<unsigned>(own[c] >> 32U));
  const float m = value_of(__reduce_max_sync(kAll, largest));
  float e[kOwn];
  float sum = 0;
#pragma unroll
  for (int c = 0; c < kOwn; ++c) {
    if (own[c] == 0) rank[c] = kMostChosen;
    e[c] = rank[c] < k ? exp_for<T>(value_of(static_cast<unsigned>(own[c] >> 32U)) - m) : 0;
    sum += e[c];
  }
  if constexpr (kFull) sum = sum_all(m);
  sum = cuda::lanes_sum(sum);
  if (kFull && lane == 0) *out.lse = m + logf(sum);
  const float share = 1 / sum;
#pragma unroll
  for (int c = 0; c < kOwn; ++c) {
    if (rank[c] >= k) continue;
    const unsigned index = ~static_cast<unsigned>(own[c]);
    out.indices[rank[c]] = index;
    out.scores[rank[c]] = narrow<T>(e[c] * share);
    atomicAdd(histogram + index, 1U);
  }
  __syncwarp();  // the list may be written again
}

// sums[e] = Σ_{i<e} histogram[i] for e in [0, experts]. The whole block; totals: a word a warp.
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
  if (threadIdx.x == 0) sums[experts] = before;
}

// ---- forward ----

// Warps of a block: one block a multiprocessor, in 64 registers a thread, or 128 for long rows.
template <int kEach>
constexpr int kRouters = kEach <= 16 ? 32 : 16;

// The full softmax needs the row to the end.
template <class T, int kEach, bool kPacked, bool kFull>
__global__ void __launch_bounds__(kRouters<kEach>* kWarp, 1)
    forward(MoeRouteArgs args, const T* logits, std::uint32_t* indices, T* scores, float* lse,
            std::uint32_t* sums) {
  using RowOf = Row<T, kEach, kPacked>;
  constexpr int kWarps = kRouters<kEach>;
  alignas(16) __shared__ Entry lists[kWarps][kPlaces];
  __shared__ unsigned histogram[kMostExperts];
  __shared__ unsigned totals[kWarps];
  const int experts = static_cast<int>(args.experts);
  const int k = static_cast<int>(args.k);
  const int warp = threadIdx.x / kWarp;
  for (int e = threadIdx.x; e < experts; e += kWarps * kWarp) histogram[e] = 0;
  __syncthreads();

  // Neighbouring rows go to different blocks, so that few rows still reach every multiprocessor.
  Entry* list = lists[warp];
  const std::int64_t step = std::int64_t{gridDim.x} * kWarps;
  std::int64_t row = std::int64_t{warp} * gridDim.x + blockIdx.x;
  RowOf next;
  const auto load = [&](std::int64_t r) {
    next.load(logits + r * args.experts, experts, r < args.rows);
  };
  if (!kFull) load(row);
  for (; row < args.rows; row += step) {
    if (kFull) load(row);
    float v[kEach];
    next.widen_to(v, experts);
    int n = kPlaces + 1;
    if (k <= kWarp) {
      const float floor = find_floor(v, k);
      if (floor > -INFINITY) {
        n = make_list<RowOf, kEach>([&](int j) { return v[j] >= floor; },
                                    [&](int j) { return v[j]; }, list);
      }
    }
    if (n > kPlaces) {
      list_exactly<RowOf>(v, experts, k, list);
      n = k;
    }
    if (!kFull) load(row + step);
    const Results<T> out{indices + row * k, scores + row * k, lse + row};
    const auto sum_all = [&](float m) {
      float sum = 0;
#pragma unroll
      for (int j = 0; j < kEach; ++j) {
        sum += RowOf::offset(j) < experts - RowOf::base() ? exp_for<T>(v[j] - m) : 0;
      }
      return sum;
    };
    if (n <= kWarp) {
      write_results<1, kFull>(list, n, k, out, sum_all, histogram);
    } else {
      write_results<2, kFull>(list, n, k, out, sum_all, histogram);
    }
  }
  cudaTriggerProgrammaticLaunchCompletion();
  __syncthreads();
  write_running_sums<kWarps>(histogram, experts, totals,
                             sums + std::int64_t{blockIdx.x} * (experts + 1));
}

// offsets = the sum over the blocks of their running sums, counts the differences. 32 columns a
// block, the last only for the difference; its warps share the rows.
constexpr int kShares = 16;

__global__ void __launch_bounds__(kShares* kWarp)
    add_counts(const std::uint32_t* sums, int blocks, int experts, std::uint32_t* counts,
               std::uint32_t* offsets) {
  __shared__ unsigned room[kShares][kWarp];
  const int lane = threadIdx.x % kWarp;
  const int share = threadIdx.x / kWarp;
  const int e = blockIdx.x * (kWarp - 1) + lane;
  cudaGridDependencySynchronize();  // launched while the kernel before ends
  unsigned sum = 0;
  if (e <= experts) {
#pragma unroll 4
    for (int b = share; b < blocks; b += kShares) sum += sums[b * (experts + 1) + e];
  }
  room[share][lane] = sum;
  __syncthreads();
  if (share != 0) return;
#pragma unroll
  for (int s = 1; s < kShares; ++s) sum += room[s][lane];
  const unsigned next = __shfl_down_sync(kAll, sum, 1);
  if (lane == kWarp - 1) return;
  if (e <= experts) offsets[e] = sum;
  if (e < experts) counts[e] = next - sum;
}

// Blocks of the forward: one a multiprocessor, fewer where that leaves no warp a row less to do.
std::int64_t forward_blocks(const MoeRouteArgs& args) {
  const std::int64_t warps = args.experts <= 512 ? kRouters<16> : kRouters<32>;
  if (args.rows <= warps * cuda::kMultiprocessors) {
    return std::min<std::int64_t>(args.rows, cuda::kMultiprocessors);
  }
  const std::int64_t each = cuda::blocks_for(args.rows, warps * cuda::kMultiprocessors);
  return cuda::blocks_for(args.rows, warps * each);
}

std::size_t forward_workspace(const void* args) {
  const auto& a = *static_cast<const MoeRouteArgs*>(args);
  return static_cast<std::size_t>(forward_blocks(a) * (a.experts + 1)) * sizeof(std::uint32_t);
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
  auto* sums = static_cast<std::uint32_t*>(call.workspace);  // [blocks, E+1]
  const auto stream = static_cast<cudaStream_t>(call.queue);
  const auto blocks = static_cast<unsigned>(forward_blocks(args));
  if (blocks != 0) {
    // Packs only where every lane gets some: the floor needs k lanes.
    const bool packed = args.experts % kPack<T> == 0 && args.experts >= kWarp * kPack<T> &&
                        cuda::is_aligned(logits);
    with_row(args.experts, [&](auto each) {
      constexpr int kEach = each();
      constexpr bool kCanPack = kEach >= kPack<T>;
      const auto kernel =
          args.full != 0
              ? (packed ? forward<T, kEach, kCanPack, true> : forward<T, kEach, false, true>)
              : (packed ? forward<T, kEach, kCanPack, false> : forward<T, kEach, false, false>);
      kernel<<<blocks, kRouters<kEach> * kWarp, 0, stream>>>(args, logits, indices, scores, lse,
                                                             sums);
    });
  }
  cudaLaunchAttribute early{};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(cuda::blocks_for(args.experts + 1, kWarp - 1)));
  config.blockDim = dim3(kShares * kWarp);
  config.stream = stream;
  config.attrs = &early;
  config.numAttrs = 1;
  cudaLaunchKernelEx(&config, add_counts, static_cast<const std::uint32_t*>(sums),
                     static_cast<int>(blocks), static_cast<int>(args.experts), counts, offsets);
}

// ---- backward ----

constexpr int kAdders = 4;  // warps, and rows, of a block

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

template <class T>
__global__ void __launch_bounds__(kAdders* kWarp)
    backward_chosen(MoeRouteArgs args, Chosen<T> in, T* dlogits) {
  extern __shared__ float4 memory[];
  const int experts = static_cast<int>(args.experts);
  const int k = static_cast<int>(args.k);
  float* room = reinterpret_cast<float*>(memory) + threadIdx.x / kWarp * cuda::sums_room(experts);
  const std::int64_t row = std::int64_t{blockIdx.x} * kAdders + threadIdx.x / kWarp;
  if (row >= args.rows) return;
  T* out = dlogits + row * args.experts;
  Own own;
  own.load(in, row, k, args.experts);
  const int skew = cuda::skew_of(out);
  cuda::zero_sums(room, skew + experts);
  __syncwarp();
  const float c = own.inner();
  cuda::add_in_order(room + skew, own.valid[0], own.index[0], own.s[0] * (own.ds[0] - c));
  if (k > kWarp) {
    cuda::add_in_order(room + skew, own.valid[1], own.index[1], own.s[1] * (own.ds[1] - c));
  }
  cuda::store_sums(room, out, experts);
}

// kPacked: logits and dlogits have rows of whole packs.
template <class T, bool kPacked>
__global__ void __launch_bounds__(kAdders* kWarp)
    backward_full(MoeRouteArgs args, Chosen<T> in, const T* logits, const float* lse, T* dlogits) {
  constexpr int kPacks = kMostExperts / kWarp / kPack<T>;
  extern __shared__ float4 memory[];
  const int experts = static_cast<int>(args.experts);
  const int k = static_cast<int>(args.k);
  const int lane = threadIdx.x % kWarp;
  float* sums = reinterpret_cast<float*>(memory) + threadIdx.x / kWarp * cuda::sums_room(experts);
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
  cuda::zero_sums(sums, experts);
  __syncwarp();
  const float c = own.inner();
  cuda::add_in_order(sums, own.valid[0], own.index[0], own.ds[0]);
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
  const auto blocks = static_cast<unsigned>(cuda::blocks_for(args.rows, kAdders));
  const std::size_t shared =
      sizeof(float) * kAdders *
      static_cast<std::size_t>(cuda::sums_room(static_cast<int>(args.experts)));
  if (args.full == 0) {
    backward_chosen<T><<<blocks, kAdders * kWarp, shared, stream>>>(args, in, dlogits);
    return;
  }
  const bool packed =
      args.experts % kPack<T> == 0 && cuda::is_aligned(logits) && cuda::is_aligned(dlogits);
  const auto kernel = packed ? backward_full<T, true> : backward_full<T, false>;
  kernel<<<blocks, kAdders * kWarp, shared, stream>>>(args, in, logits, lse, dlogits);
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
