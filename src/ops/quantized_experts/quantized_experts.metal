// Metal kernels of quantized_experts (formula: mlxtape/ops/experts.h and quantize.h), for few pairs.
//
// Each pair's products are made by themselves: a simdgroup has four rows of its expert's weights and goes along them
// (backends/metal/device/quantized.h), so there are enough reads under way for one token; two simdgroups a group, about 60
// registers. Bound by reading the codes; pairs of one expert find them in the cache. What lies between the products is left in
// f32: the activations, and what each pair brings to y, by kernels with a thread for each number, 256 a group.
#include "quantized_experts_args.h"

// One of the weights: n rows of k codes for each expert; row pair/per of what it is multiplied with.
struct QuantizedExpertsProduct {
  int64_t n, k, per;
  mlxtape::ops::QuantizedExpertsArgs::Form form;
  int32_t unused;
};

#ifdef __METAL_VERSION__

#include "backends/metal/device/exp.h"
#include "backends/metal/device/quantized.h"

using namespace mlxtape::ops;

constant bool packs [[function_constant(0)]];  // rows of x begin at multiples of 16 bytes

// out [pairs, n]; nothing where the index is past E.
template <typename T, typename X, int kBits>
[[kernel, max_total_threads_per_threadgroup(64)]] void quantized_experts_dots(
    device const X* x [[buffer(0)]], device const uint* indices [[buffer(1)]],
    device const uint* codes [[buffer(2)]], device const uchar* scales [[buffer(3)]],
    device const uchar* biases [[buffer(4)]], device float* out [[buffer(5)]],
    constant QuantizedExpertsArgs& args [[buffer(6)]],
    constant QuantizedExpertsProduct& product [[buffer(7)]],
    constant uint& first_group [[buffer(30)]], uint group [[threadgroup_position_in_grid]],
    uint lane [[thread_index_in_simdgroup]], uint simd [[simdgroup_index_in_threadgroup]]) {
  enum { kRows = 4 };
  const long part = (long(group) + first_group) * 2 + simd, n = product.n;
  const long parts = n / kRows;
  const long pair = part / parts, first = part % parts * kRows;
  const long pairs = args.tokens * args.chosen;
  const long expert = pair < pairs ? long(indices[pair]) : args.experts;
  if (expert < args.experts) {  // alike for a simdgroup
    Quantized w;
    w.codes = codes;
    w.scales = scales;
    w.biases = biases;
    w.k = uint(product.k);
    w.group_shift = product.form.group == 32 ? 5 : product.form.group == 64 ? 6 : 7;
    w.wide = product.form.wide != 0;
    QuantizedSums<kRows, 1> sums;
    quantized_products<T, kBits>(w, expert * n + first, (expert + 1) * n,
                                 x + pair / product.per * product.k, 0, 1, packs, lane, sums);
    const float mine = quantized_sum(sums, lane);
    // Rows are outputs of one weight and inputs of another, whole groups of 32: there are always four.
    if (lane < uint(kRows)) out[pair * n + first + lane] = mine;
  }
}

// a = g·σ(g)∘u, in place of g.
[[kernel, max_total_threads_per_threadgroup(256)]] void quantized_experts_activate(
    device const float* u [[buffer(0)]], device const uint* indices [[buffer(1)]],
    device float* g [[buffer(2)]], constant QuantizedExpertsArgs& args [[buffer(3)]],
    constant uint& first_group [[buffer(30)]], uint group [[threadgroup_position_in_grid]],
    uint index [[thread_position_in_threadgroup]]) {
  const long at = (long(group) + first_group) * 256 + index;
  const long pair = at / args.inner;
  if (pair >= args.tokens * args.chosen || indices[pair] >= args.experts) return;
  g[at] = g[at] * sigmoid<float>(g[at]).value * u[at];
}

// y_t = Σ_j scores[t,j]·from[t,j], in the order of the choices.
template <typename T>
[[kernel, max_total_threads_per_threadgroup(256)]] void quantized_experts_combine(
    device const float* from [[buffer(0)]], device const uint* indices [[buffer(1)]],
    device const T* scores [[buffer(2)]], device T* y [[buffer(3)]],
    constant QuantizedExpertsArgs& args [[buffer(4)]], constant uint& first_group [[buffer(30)]],
    uint group [[threadgroup_position_in_grid]], uint index [[thread_position_in_threadgroup]]) {
  const long at = (long(group) + first_group) * 256 + index;
  if (at >= args.tokens * args.width) return;
  const long t = at / args.width, h = at % args.width;
  float sum = 0;
  for (long pair = t * args.chosen; pair < (t + 1) * args.chosen; ++pair) {
    if (indices[pair] < args.experts) {
      sum = fma(widen(scores[pair]), from[pair * args.width + h], sum);
    }
  }
  y[at] = narrow<T>(sum);
}

#define MAKE(name, ...) template [[host_name(name)]] [[kernel]] decltype(__VA_ARGS__) __VA_ARGS__;
#define MAKE_DOTS(which, type, T, X)                                           \
  MAKE("quantized_experts_" which "_2_" type, quantized_experts_dots<T, X, 2>) \
  MAKE("quantized_experts_" which "_3_" type, quantized_experts_dots<T, X, 3>) \
  MAKE("quantized_experts_" which "_4_" type, quantized_experts_dots<T, X, 4>) \
  MAKE("quantized_experts_" which "_5_" type, quantized_experts_dots<T, X, 5>) \
  MAKE("quantized_experts_" which "_6_" type, quantized_experts_dots<T, X, 6>) \
  MAKE("quantized_experts_" which "_8_" type, quantized_experts_dots<T, X, 8>)
#define MAKE_COMBINE(type, T) MAKE("quantized_experts_combine_" type, quantized_experts_combine<T>)
MAKE_DOTS("like", "f32", float, float)
MAKE_DOTS("like", "f16", half, half)
MAKE_DOTS("like", "bf16", bf16, bf16)
MAKE_DOTS("wide", "f16", half, float)
MAKE_DOTS("wide", "bf16", bf16, float)
MAKE_COMBINE("f32", float)
MAKE_COMBINE("f16", half)
MAKE_COMBINE("bf16", bf16)

#else

#include <array>
#include <string>

#include "backends/metal/launch.h"

namespace mlxtape::ops {

namespace {

using Args = QuantizedExpertsArgs;

constexpr std::int64_t kRows = 4;       // of weights, for a simdgroup
constexpr std::int64_t kSimds = 2;      // of a group
constexpr std::int64_t kThreads = 256;  // of a group whose threads have a number each

// Names for x of the type of the weights' scales, and for x in f32.
const char* name_for(std::int32_t bits, bool wide) {
  constexpr std::array<std::array<const char*, 2>, 6> kNames{{
      {"quantized_experts_like_2", "quantized_experts_wide_2"},
      {"quantized_experts_like_3", "quantized_experts_wide_3"},
      {"quantized_experts_like_4", "quantized_experts_wide_4"},
      {"quantized_experts_like_5", "quantized_experts_wide_5"},
      {"quantized_experts_like_6", "quantized_experts_wide_6"},
      {"quantized_experts_like_8", "quantized_experts_wide_8"},
  }};
  return kNames[static_cast<std::size_t>(bits == 8 ? 5 : bits - 2)][wide ? 1 : 0];
}

// out [pairs, n] = w[its expert] [n, k]·(row pair/per of x). weight: which input holds its codes.
template <class T>
void products(const KernelCall& call, std::size_t weight, bool wide,
              const QuantizedExpertsProduct& product, void* out) {
  const auto& args = call.as<Args>();
  const std::int64_t pairs = args.tokens * args.chosen;
  metal::Launch(call, metal::kernel<T>(name_for(product.form.bits, wide && sizeof(T) == 2)))
      .constant(0, metal::is_aligned(call.in[0]))
      .input(0, call.in[0])
      .input(1, call.in[1])
      .input(2, call.in[weight])
      .input(3, call.in[weight + 1])
      .input(4, call.in[weight + 2])
      .output(5, out)
      .bytes(6, args)
      .bytes(7, product)
      .operations(2.0 * static_cast<double>(pairs) * static_cast<double>(product.n) *
                  static_cast<double>(product.k))
      .in_parts()
      .groups(ceil_div(pairs * (product.n / kRows), kSimds))
      .threads(kSimds * metal::kSimd)
      .run();
}

std::size_t hidden_room(const void* opaque) {  // u
  const auto& args = *static_cast<const Args*>(opaque);
  return static_cast<std::size_t>(args.tokens * args.chosen * args.inner) * sizeof(float);
}
std::size_t out_room(const void* opaque) {  // what each pair brings to y
  const auto& args = *static_cast<const Args*>(opaque);
  return static_cast<std::size_t>(args.tokens * args.chosen * args.width) * sizeof(float);
}

template <class T>
void hidden_fwd(const KernelCall& call) {
  const auto& args = call.as<Args>();
  void* active = call.out[0];  // [pairs, inner]
  products<T>(call, 2, false, {args.inner, args.width, args.chosen, args.gate, 0}, active);
  products<T>(call, 5, false, {args.inner, args.width, args.chosen, args.up, 0}, call.workspace);
  metal::Launch(call, metal::kernel("quantized_experts_activate"))
      .input(0, call.workspace)
      .input(1, call.in[1])
      .output(2, active)
      .bytes(3, args)
      .in_parts()
      .groups(ceil_div(args.tokens * args.chosen * args.inner, kThreads))
      .threads(kThreads)
      .run();
}

template <class T>
void out_fwd(const KernelCall& call) {
  const auto& args = call.as<Args>();
  products<T>(call, 3, true, {args.width, args.inner, 1, args.down, 0}, call.workspace);
  metal::Launch(call, metal::kernel<T>("quantized_experts_combine"))
      .input(0, call.workspace)
      .input(1, call.in[1])
      .input(2, call.in[2])
      .output(3, call.out[0])
      .bytes(4, args)
      .in_parts()
      .groups(ceil_div(args.tokens * args.width, kThreads))
      .threads(kThreads)
      .run();
}

}  // namespace

void register_quantized_experts_metal(KernelRegistry& registry) {
  const auto add = [&]<class T>(T, const std::string& type) {
    registry.add(Backend::kMetal, "quantized_experts_hidden_fwd_" + type, hidden_fwd<T>,
                 hidden_room);
    registry.add(Backend::kMetal, "quantized_experts_out_fwd_" + type, out_fwd<T>, out_room);
  };
  add(float(), "f32");
  add(F16(), "f16");
  add(BF16(), "bf16");
}

}  // namespace mlxtape::ops

#endif
