// Metal kernels of moe_route (formula and layout: mlxtape/ops/moe_route.h).
//
// Forward: a simdgroup a row, up to 32 logits a lane as unsigned keys that compare like the contract says. k rounds: each
// lane knows its largest key, the simdgroup finds the largest of these and the smallest index that has it, and the lane
// that had it looks for its next. Lane j keeps what round j chose. Groups of eight simdgroups walk over the rows, at most
// 256 of them, count in 4 KB of threadgroup memory (integers, so that the order does not matter) and leave their counts in
// scratch memory; a second kernel adds them up and makes offsets. Some 50 registers a thread at 512 experts. Bound by
// latency: k rounds of two simdgroup functions.
//
// Backward: a simdgroup a row, which is made in registers from the k chosen, handed round from lane to lane, and written
// once, in packs of 16 bytes where addresses allow it. Bound by memory up to k of some 16.
#include "moe_route_args.h"

#ifdef __METAL_VERSION__

#include "backends/metal/device/exp.h"

constant uint each [[function_constant(0)]];   // logits of a lane, at most 32
constant bool packs [[function_constant(1)]];  // which lie in packs of 16 bytes; else 32 apart
constant bool full [[function_constant(2)]];

#define MOE_ROUTE_PLACE                                                                       \
  constant uint &first_group [[buffer(30)]], uint group [[threadgroup_position_in_grid]],     \
      uint index [[thread_position_in_threadgroup]], uint lane [[thread_index_in_simdgroup]], \
      uint simd [[simdgroup_index_in_threadgroup]]

// The expert of a lane's j-th logit; past the last there may be some.
template <typename T>
inline uint expert_of(uint lane, uint j) {
  const uint count = Pack<T>::kCount;
  return packs ? (j / count * 32 + lane) * count + j % count : j * 32 + lane;
}

// ---- keys: 0 is no logit, 1 is NaN ----

inline uint key_of(float v) {
  const uint bits = as_type<uint>(v) == 0x80000000u ? 0 : as_type<uint>(v);  // −0 is 0
  if ((bits & 0x7fffffffu) > 0x7f800000u) return 1;
  return bits ^ ((bits >> 31) != 0 ? 0xffffffffu : 0x80000000u);
}
inline float value_of(uint key) {
  if (key <= 1) return NAN;
  return as_type<float>(key ^ ((key >> 31) != 0 ? 0x80000000u : 0xffffffffu));
}

template <typename T>
inline void load_keys(device const T* x, uint experts, uint lane, thread uint* key) {
  if (packs) {
    for (uint j = 0; j < each; j += Pack<T>::kCount) {
      float v[Pack<T>::kCount];
      const bool has = expert_of<T>(lane, j) < experts;
      if (has) Pack<T>::unpack(load_pack(x + expert_of<T>(lane, j)), v);
      for (uint i = 0; i < Pack<T>::kCount; ++i) key[j + i] = has ? key_of(v[i]) : 0;
    }
  } else {
    for (uint j = 0; j < each; ++j) {
      const uint e = expert_of<T>(lane, j);
      key[j] = e < experts ? key_of(widen(x[e])) : 0;
    }
  }
}

// ---- forward ----

// The largest key of a lane and the first of its logits that has it.
struct Best {
  uint key, j;
};
inline Best best_of(thread const uint* key) {
  Best best;
  best.key = key[0];
  best.j = 0;
  for (uint j = 1; j < each; ++j) {
    if (key[j] > best.key) {
      best.key = key[j];
      best.j = j;
    }
  }
  return best;
}

// Lane j has what rounds j and j + 32 chose.
struct Chosen {
  uint expert[2];
  float value[2];
};

template <typename T>
inline Chosen choose(thread uint* key, uint k, uint lane) {
  Chosen chosen;
  for (int c = 0; c < 2; ++c) {
    chosen.expert[c] = 0;
    chosen.value[c] = -INFINITY;
  }
  Best best = best_of(key);
  for (uint round = 0; round < k; ++round) {
    const uint top = simd_max(best.key);
    const uint own = best.key == top ? expert_of<T>(lane, best.j) : 0xffffffffu;
    const uint expert = simd_min(own);
    if (round % 32 == lane) {
      chosen.expert[round / 32] = expert;
      chosen.value[round / 32] = value_of(top);
    }
    if (own == expert) {
      for (uint j = 0; j < each; ++j) key[j] = j == best.j ? 0 : key[j];
      best = best_of(key);
    }
  }
  return chosen;
}

template <typename T>
[[kernel, max_total_threads_per_threadgroup(256)]] void moe_route_fwd(
    device const T* logits [[buffer(0)]], device uint* indices [[buffer(1)]],
    device T* scores [[buffer(2)]], device float* lse [[buffer(3)]],
    device uint* counts [[buffer(4)]], constant MoeRouteArgs& args [[buffer(5)]],
    constant uint& rows_each [[buffer(6)]], MOE_ROUTE_PLACE) {
  threadgroup atomic_uint histogram[1024];
  const uint experts = uint(args.experts), k = uint(args.k);
  for (uint e = index; e < experts; e += 256) {
    atomic_store_explicit(&histogram[e], 0u, memory_order_relaxed);
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  const long whole = long(group) + first_group;
  const long first = whole * rows_each;
  const long end = min(long(args.rows), first + rows_each);
  for (long row = first + simd; row < end; row += 8) {
    uint key[32];
    load_keys(logits + row * args.experts, experts, lane, key);
    float own[32];  // of the full softmax
    if (full) {
      for (uint j = 0; j < each; ++j) own[j] = key[j] == 0 ? -INFINITY : value_of(key[j]);
    }
    const Chosen chosen = choose<T>(key, k, lane);
    const float top = simd_broadcast_first(chosen.value[0]);
    float e[2];
    for (uint c = 0; c < 2; ++c) {
      e[c] = lane + 32 * c < k ? exp_for<T>(chosen.value[c] - top) : 0.0f;
    }
    float sum = e[0] + e[1];
    if (full) {
      sum = 0;
      for (uint j = 0; j < each; ++j) {
        sum += own[j] == -INFINITY && top != -INFINITY ? 0.0f : exp_for<T>(own[j] - top);
      }
    }
    sum = simd_sum(sum);
    if (full && lane == 0) lse[row] = top + precise::log(sum);
    for (uint c = 0; c < 2; ++c) {
      const uint j = lane + 32 * c;
      if (j >= k) continue;
      indices[row * k + j] = chosen.expert[c];
      scores[row * k + j] = narrow<T>(e[c] / sum);
      atomic_fetch_add_explicit(&histogram[chosen.expert[c]], 1u, memory_order_relaxed);
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (uint e = index; e < experts; e += 256) {
    counts[whole * experts + e] = atomic_load_explicit(&histogram[e], memory_order_relaxed);
  }
}

// One group, a thread an expert.
[[kernel, max_total_threads_per_threadgroup(1024)]] void moe_route_count(
    device const uint* parts [[buffer(0)]], device uint* counts [[buffer(1)]],
    device uint* offsets [[buffer(2)]], constant MoeRouteArgs& args [[buffer(3)]],
    constant uint& groups [[buffer(4)]], uint index [[thread_position_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]], uint simd [[simdgroup_index_in_threadgroup]]) {
  threadgroup uint room[32];
  const uint experts = uint(args.experts);
  uint count = 0;
  if (index < experts) {
    for (uint g = 0; g < groups; ++g) count += parts[g * experts + index];
  }
  const uint before = simd_prefix_exclusive_sum(count);
  if (lane == 31) room[simd] = before + count;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  const uint above = simd_prefix_exclusive_sum(lane <= simd ? room[lane] : 0u);
  const uint offset = simd_shuffle(above, ushort(simd)) + before;
  if (index < experts) {
    counts[index] = count;
    offsets[index] = offset;
    if (index + 1 == experts) offsets[experts] = offset + count;
  }
}

// ---- backward ----

template <typename T>
[[kernel, max_total_threads_per_threadgroup(256)]] void moe_route_bwd(
    device const uint* indices [[buffer(0)]], device const T* scores [[buffer(1)]],
    device const T* dscores [[buffer(2)]], device const T* logits [[buffer(3)]],
    device const float* lse [[buffer(4)]], device T* dlogits [[buffer(5)]],
    constant MoeRouteArgs& args [[buffer(6)]], MOE_ROUTE_PLACE) {
  const long row = (long(group) + first_group) * 8 + simd;
  const bool in = row < args.rows;
  const uint experts = uint(args.experts), k = uint(args.k);
  uint expert[2];
  float s[2], ds[2];
  for (uint c = 0; c < 2; ++c) {
    const uint j = lane + 32 * c;
    expert[c] = 0xffffffffu;
    s[c] = 0;
    ds[c] = 0;
    if (!in || j >= k) continue;
    expert[c] = indices[row * k + j];
    if (expert[c] >= experts) continue;  // neither its score nor its gradient counts
    s[c] = widen(scores[row * k + j]);
    ds[c] = widen(dscores[row * k + j]);
  }
  const float inner = simd_sum(fma(s[0], ds[0], s[1] * ds[1]));
  float given[2];
  for (int c = 0; c < 2; ++c) given[c] = full ? ds[c] : s[c] * (ds[c] - inner);
  float dl[32];
  for (uint j = 0; j < each; ++j) dl[j] = 0;
  for (uint round = 0; round < k; ++round) {
    const bool late = round >= 32;
    const uint e = simd_shuffle(late ? expert[1] : expert[0], ushort(round % 32));
    const float v = simd_shuffle(late ? given[1] : given[0], ushort(round % 32));
    for (uint j = 0; j < each; ++j) {
      if (expert_of<T>(lane, j) == e) dl[j] += v;
    }
  }
  if (!in) return;
  const long start = row * args.experts;
  const float reference = full ? lse[row] : 0.0f;
  if (packs) {
    for (uint j = 0; j < each; j += Pack<T>::kCount) {
      const uint e = expert_of<T>(lane, j);
      if (e >= experts) continue;
      float v[Pack<T>::kCount];
      if (full) Pack<T>::unpack(load_pack(logits + start + e), v);
      for (uint i = 0; i < Pack<T>::kCount; ++i) {
        v[i] = full ? exp_for<T>(v[i] - reference) * (dl[j + i] - inner) : dl[j + i];
      }
      store_pack(Pack<T>::pack(v), dlogits + start + e);
    }
  } else {
    for (uint j = 0; j < each; ++j) {
      const uint e = expert_of<T>(lane, j);
      if (e >= experts) continue;
      const float v =
          full ? exp_for<T>(widen(logits[start + e]) - reference) * (dl[j] - inner) : dl[j];
      dlogits[start + e] = narrow<T>(v);
    }
  }
}

#define MAKE(name, function) template [[host_name(name)]] [[kernel]] decltype(function) function;
#define MAKE_BOTH(type, T)                      \
  MAKE("moe_route_fwd_" type, moe_route_fwd<T>) \
  MAKE("moe_route_bwd_" type, moe_route_bwd<T>)
MAKE_BOTH("f32", float)
MAKE_BOTH("f16", half)
MAKE_BOTH("bf16", bf16)

#else

#include <algorithm>
#include <string>

#include "backends/metal/launch.h"

namespace mlxtape::ops {

namespace {

using metal::Launch;

constexpr std::int64_t kThreads = 256;
constexpr std::int64_t kRouters = 8;       // simdgroups of a group
constexpr std::int64_t kMostGroups = 256;  // of the forward: counts to add up

// Logits of a lane: as packs, or 32 apart.
template <class T>
std::uint32_t each_of(std::int64_t experts, bool packs) {
  const std::int64_t pack = packs ? 16 / sizeof(T) : 1;
  return static_cast<std::uint32_t>(ceil_div(experts, metal::kSimd * pack) * pack);
}
template <class T>
bool has_packs(std::int64_t experts, const void* a, const void* b) {
  return experts % static_cast<std::int64_t>(16 / sizeof(T)) == 0 && metal::is_aligned(a) &&
         metal::is_aligned(b);
}

std::int64_t rows_each(const MoeRouteArgs& args) {
  return std::max(kRouters, ceil_div(ceil_div(args.rows, kMostGroups), kRouters) * kRouters);
}
std::size_t forward_workspace(const void* p) {
  const auto& args = *static_cast<const MoeRouteArgs*>(p);
  const std::int64_t groups = ceil_div(args.rows, rows_each(args));
  return static_cast<std::size_t>(groups * args.experts) * sizeof(std::uint32_t);
}

// out: indices, scores, counts, offsets, lse or nothing.
template <class T>
void forward(const KernelCall& call) {
  const auto& args = call.as<MoeRouteArgs>();
  const bool packs = has_packs<T>(args.experts, call.in[0], nullptr);
  const std::int64_t groups = ceil_div(args.rows, rows_each(args));
  Launch(call, metal::kernel<T>("moe_route_fwd"))
      .constant(0, each_of<T>(args.experts, packs))
      .constant(1, packs)
      .constant(2, args.full != 0)
      .input(0, call.in[0])
      .output(1, call.out[0])
      .output(2, call.out[1])
      .output(3, call.out[4])
      .output(4, groups == 0 ? nullptr : call.workspace)
      .bytes(5, args)
      .bytes(6, static_cast<std::uint32_t>(rows_each(args)))
      .in_parts()
      .groups(groups)
      .threads(kThreads)
      .run();
  Launch(call, metal::kernel("moe_route_count"))
      .input(0, groups == 0 ? nullptr : call.workspace)
      .output(1, call.out[2])
      .output(2, call.out[3])
      .bytes(3, args)
      .bytes(4, static_cast<std::uint32_t>(groups))
      .groups(1)
      .threads(metal::row_threads(args.experts, 1))
      .run();
}

// in: indices, scores, gradients of scores, and for the full softmax logits and lse.
template <class T>
void backward(const KernelCall& call) {
  const auto& args = call.as<MoeRouteArgs>();
  const void* logits = args.full != 0 ? call.in[3] : nullptr;
  const bool packs = has_packs<T>(args.experts, logits, call.out[0]);
  Launch(call, metal::kernel<T>("moe_route_bwd"))
      .constant(0, each_of<T>(args.experts, packs))
      .constant(1, packs)
      .constant(2, args.full != 0)
      .input(0, call.in[0])
      .input(1, call.in[1])
      .input(2, call.in[2])
      .input(3, logits)
      .input(4, args.full != 0 ? call.in[4] : nullptr)
      .output(5, call.out[0])
      .bytes(6, args)
      .in_parts()
      .groups(ceil_div(args.rows, kRouters))
      .threads(kThreads)
      .run();
}

template <class T>
void add_kernels(KernelRegistry& registry) {
  const std::string type = name_of(kDType<T>);
  registry.add(Backend::kMetal, "moe_route_fwd_" + type, forward<T>, forward_workspace);
  registry.add(Backend::kMetal, "moe_route_bwd_" + type, backward<T>);
}

}  // namespace

void register_moe_route_metal(KernelRegistry& registry) {
  add_kernels<float>(registry);
  add_kernels<F16>(registry);
  add_kernels<BF16>(registry);
}

}  // namespace mlxtape::ops

#endif
