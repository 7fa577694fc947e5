// Metal kernels of gated_delta_rule (formula: mlxtape/ops/gated_delta_rule.h; the chunks: gated_delta_rule.cpu.cpp): forward
// and one token; back is gated_delta_rule_back.metal.
//
// A chunk has 16 tokens, or 8 where heads are wider than 128, so that its keys, queries and decays are 25 KB of threadgroup
// memory. A simdgroup has 8 value channels of the state, as matrices [8 keys, 8 values] in registers, and walks through the
// sequence with them; eight of them share what does not depend on values (delta_open). The triangular system of a chunk is
// solved by its inverse, which is the same for all values:
//   R = (I + N·diag(β))⁻¹·W,  U = β·R
//
// Bound by arithmetic: a chunk is 100 products of matrices for each simdgroup. Registers: 32 numbers of the state for heads of
// 128, 64 for 256, and about 40 more.
#include "gated_delta_rule_metal-inl.h"

#ifdef __METAL_VERSION__

// ---- one token ----

// A group has a value head of a sequence, a simdgroup eight rows of its state at a time, each once in registers: bound by memory.
template <typename T>
[[kernel, max_total_threads_per_threadgroup(256)]] void gated_delta_rule_one(
    device const T* q [[buffer(0)]], device const T* k [[buffer(1)]],
    device const T* v [[buffer(2)]], device const float* decay [[buffer(3)]],
    device const float* beta [[buffer(4)]], device const uchar* mask [[buffer(5)]],
    device T* y [[buffer(6)]], device float* states [[buffer(7)]],
    constant GatedDeltaRuleArgs& args [[buffer(8)]], constant DeltaWalk& walk [[buffer(9)]],
    DELTA_PLACE) {
  enum { kEach = 8, kRows = 8 };  // channels of a lane, rows of a simdgroup
  const uint whole = group + first_group;
  const DeltaHead h = delta_head(args, mask, whole / uint(walk.slices));
  const uint dk = uint(args.key_dim), dv = uint(args.value_dim);
  const uint first = (whole % uint(walk.slices) * simds + simd) * kRows;
  const bool off = delta_off(mask, h, 0);
  DeltaInputs<T> in;
  in.q = q;
  in.k = k;
  in.decay = decay;
  in.beta = beta;
  in.mask = mask;
  device const T* from_q = q + h.sequence * args.q[0] + h.key_head * args.q[2];
  device const T* from_k = k + h.sequence * args.k[0] + h.key_head * args.k[2];
  device const T* from_v = v + h.sequence * args.v[0] + h.head * args.v[2];
  float queries[kEach], keys[kEach], g[kEach];
  const float common = args.per_channel == 0 && !off ? delta_decay(args, in, h.pair, 0) : 1.0f;
  float qq = 0, kk = 0, kq = 0;
  for (uint l = 0; l < kEach; ++l) {
    const uint j = fours ? l / 4 * 128 + lane * 4 + l % 4 : l * 32 + lane;
    const bool real = j < dk && !off;
    queries[l] = real ? widen(from_q[j]) : 0.0f;
    keys[l] = real ? widen(from_k[j]) : 0.0f;
    g[l] = real && args.per_channel != 0 ? delta_decay(args, in, h.pair, j) : common;
    qq = fma(queries[l], queries[l], qq);
    kk = fma(keys[l], keys[l], kk);
    kq = fma(keys[l], queries[l], kq);
  }
  float fq = args.scale, fk = 1;
  if (args.normalise != 0) {
    fq /= sqrt(simd_sum(qq) + args.eps);
    fk /= sqrt(simd_sum(kk) + args.eps);
  }
  kq = simd_sum(kq);
  const float strength = beta[h.pair];
  for (uint n = 0; n < kRows; ++n) {
    const uint i = first + n;
    const bool is_in = i < dv && !off;  // the same for the whole simdgroup
    device float* state = states + (h.pair * dv + (is_in ? i : 0)) * dk;
    float s[kEach];
    float say_q = 0, say_k = 0;
    for (uint l = 0; l < kEach; l += 4) {
      float4 four = float4(0.0f);
      if (fours) {
        if (is_in && l / 4 * 128 + lane * 4 < dk) four = load_four(state + l / 4 * 128 + lane * 4);
      } else {
        for (uint m = 0; m < 4; ++m) {
          const uint j = (l + m) * 32 + lane;
          if (is_in && j < dk) four[m] = state[j];
        }
      }
      for (uint m = 0; m < 4; ++m) {
        s[l + m] = four[m] * g[l + m];
        say_q = fma(s[l + m], queries[l + m], say_q);
        say_k = fma(s[l + m], keys[l + m], say_k);
      }
    }
    say_q = simd_sum(say_q);
    say_k = simd_sum(say_k);
    const float u = is_in ? strength * (widen(from_v[i]) - say_k * fk) : 0.0f;
    for (uint l = 0; l < kEach; l += 4) {
      float4 four;
      for (uint m = 0; m < 4; ++m) four[m] = fma(u, keys[l + m] * fk, s[l + m]);
      if (fours) {
        if (is_in && l / 4 * 128 + lane * 4 < dk) store_four(four, state + l / 4 * 128 + lane * 4);
      } else {
        for (uint m = 0; m < 4; ++m) {
          const uint j = (l + m) * 32 + lane;
          if (is_in && j < dk) state[j] = four[m];
        }
      }
    }
    if (lane == 0 && i < dv) {
      y[h.pair * dv + i] = narrow<T>(off ? 0.0f : fq * (say_q + u * fk * kq));
    }
  }
}

// ---- names ----

#define MAKE(name, ...) template [[host_name(name)]] [[kernel]] decltype(__VA_ARGS__) __VA_ARGS__;
#define MAKE_TYPE(type, T)                                                            \
  MAKE("gated_delta_rule_fwd64_" type, gated_delta_rule_walk<T, 64, kDeltaForward>)   \
  MAKE("gated_delta_rule_fwd128_" type, gated_delta_rule_walk<T, 128, kDeltaForward>) \
  MAKE("gated_delta_rule_fwd256_" type, gated_delta_rule_walk<T, 256, kDeltaForward>) \
  MAKE("gated_delta_rule_one_" type, gated_delta_rule_one<T>)
MAKE_TYPE("f32", float)
MAKE_TYPE("f16", half)
MAKE_TYPE("bf16", bf16)

#else

#include <algorithm>
#include <string>

#include "backends/metal/launch.h"

namespace mlxtape::ops {

namespace {

using delta::Sizes;
using metal::Launch;

constexpr std::int64_t kThreads = 256;
constexpr std::int64_t kMostSimds = 8;  // of a group, each with 8 value channels
constexpr std::int64_t kStepRows = 8;   // of a state, which a simdgroup has in a step

constexpr const char* kForward[] = {"gated_delta_rule_fwd64", "gated_delta_rule_fwd128",
                                    "gated_delta_rule_fwd256"};

template <class T>
void forward(const KernelCall& call) {
  const auto& args = call.as<GatedDeltaRuleArgs>();
  const Sizes size(args, kMostSimds);
  const DeltaWalk walk{0, 0, 0, size.slices};
  Launch(call, metal::kernel<T>(kForward[size.width]))
      .constant(0, call.in[5] != nullptr)
      .constant(1, call.in[7] != nullptr)
      .constant(2, call.out[1] != nullptr)
      .input(0, call.in[0])
      .input(1, call.in[1])
      .input(2, call.in[2])
      .input(3, call.in[3])
      .input(4, call.in[4])
      .input(5, call.in[5])
      .input(6, call.in[6])
      .input(7, call.in[7])
      .output(8, call.out[0])
      .output(9, call.out[1])
      .input(10, nullptr)
      .input(11, nullptr)
      .input(12, nullptr)
      .bytes(13, args)
      .bytes(14, walk)
      .in_parts()
      .operations(delta::operations_of(size, args.tokens * args.value_heads, 3))
      .groups(args.sequences * args.value_heads * size.slices)
      .threads(size.simds * metal::kSimd)
      .run();
}

// ---- one token ----

template <class T>
void step(const KernelCall& call) {
  const auto& args = call.as<GatedDeltaRuleArgs>();
  const std::int64_t simds = std::min(kThreads / metal::kSimd, ceil_div(args.value_dim, kStepRows));
  const DeltaWalk walk{0, 0, 0, ceil_div(args.value_dim, simds * kStepRows)};
  Launch(call, metal::kernel<T>("gated_delta_rule_one"))
      .constant(0, call.in[5] != nullptr)
      .constant(4, args.key_dim % 4 == 0 && metal::is_aligned(call.out[1]))
      .buffers()
      .bytes(9, walk)
      .in_parts()
      .groups(args.sequences * args.value_heads * walk.slices)
      .threads(simds * metal::kSimd)
      .run();
}

template <class T>
void add_kernels(KernelRegistry& registry) {
  const std::string type = name_of(kDType<T>);
  registry.add(Backend::kMetal, "gated_delta_rule_fwd_" + type, forward<T>);
  registry.add(Backend::kMetal, "gated_delta_rule_step_" + type, step<T>);
}

}  // namespace

void register_gated_delta_rule_metal(KernelRegistry& registry) {
  add_kernels<float>(registry);
  add_kernels<F16>(registry);
  add_kernels<BF16>(registry);
  delta::register_back(registry);
}

}  // namespace mlxtape::ops

#endif
