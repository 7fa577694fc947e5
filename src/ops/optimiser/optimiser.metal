// Metal kernels of optimiser (formulas: mlxtape/ops/optimiser.h). A group has one piece of one parameter, found by bisection
// among the pieces of all; addresses travel as a table in the constant space. A thread has four elements at a time. By rows,
// the pieces are the gradient's. Sums of squares: one of each piece, which one group adds up in one order. Bound by memory.
// Threads of a group: 256. Threadgroup memory: 32 bytes. About 40 registers a thread.
#include "optimiser_args.h"

namespace mlxtape::ops {

// Which piece is whose.
struct OptimiserPieces {
  uint64_t aligned;  // a bit for each parameter: all its arrays begin at a multiple of 16 bytes
  int32_t ends[kOptimiserMost];  // of pieces, counted over all parameters
  int32_t count;                 // of parameters
};

}  // namespace mlxtape::ops

#ifdef __METAL_VERSION__

#include "backends/metal/device/rows.h"

using namespace mlxtape::ops;

constant bool has_scale [[function_constant(0)]];
constant bool has_t [[function_constant(1)]];
constant bool has_states [[function_constant(2)]];
constant bool has_master [[function_constant(3)]];

constant constexpr uint kThreads = 256;
constant constexpr uint kEach = 4;

#define OPTIMISER_PLACE                                                                       \
  constant uint &first_group [[buffer(30)]], uint group [[threadgroup_position_in_grid]],     \
      uint index [[thread_position_in_threadgroup]], uint lane [[thread_index_in_simdgroup]], \
      uint simd [[simdgroup_index_in_threadgroup]], uint simds [[simdgroups_per_threadgroup]]

// ---- rules ----

// exp(x) − 1 for x ≤ 0, which a subtraction would make of few bits where x is small.
inline float exp_less_one(float x) {
  if (x < -0.5f) return precise::exp(x) - 1;
  float sum = 1.0f / 362880;  // x/1! + … + x⁹/9!
  sum = fma(sum, x, 1.0f / 40320);
  sum = fma(sum, x, 1.0f / 5040);
  sum = fma(sum, x, 1.0f / 720);
  sum = fma(sum, x, 1.0f / 120);
  sum = fma(sum, x, 1.0f / 24);
  sum = fma(sum, x, 1.0f / 6);
  sum = fma(sum, x, 0.5f);
  sum = fma(sum, x, 1.0f);
  return sum * x;
}
inline float root(float v) { return precise::sqrt(v); }
// 0 of 0, and NaN of NaN: it must reach the weight.
inline float sign_or_nan(float v) { return fabs(v) > 0 ? copysign(1.0f, v) : v; }
template <typename V>
inline V number_of(float value) {
  return value;
}
#define MT_STEP inline
#define MT_OWN thread
#define MT_GIVEN constant
#define expm1f exp_less_one
#define sqrtf root
#define all number_of
#define sign sign_or_nan
#include "optimiser_formula.h"
#undef all
#undef sign
#undef sqrtf
#undef expm1f

// ---- steps ----

// Where every parameter's arrays are.
template <typename T, typename G>
struct Addresses {
  device const G* grad[kOptimiserMost];
  device const int* ids[kOptimiserMostRows];
  device T* w[kOptimiserMost];
  device float* state0[kOptimiserMost];
  device float* state1[kOptimiserMost];
  device float* master[kOptimiserMost];
};

// The parameter and the first element of a group's piece.
struct Piece {
  int parameter;
  long first;
};
inline Piece piece_of(constant OptimiserPieces& pieces, long number) {
  int low = 0, high = pieces.count - 1;
  while (low < high) {
    const int middle = (low + high) / 2;
    if (number < pieces.ends[middle]) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  Piece piece;
  piece.parameter = low;
  piece.first = (number - (low == 0 ? 0 : pieces.ends[low - 1])) * kOptimiserPiece;
  return piece;
}

// Four elements, or fewer at the end, or one by one where p is not aligned.
template <typename T>
inline void load_some(device const T* p, bool whole, uint count, thread float* v) {
  if (whole) {
    const float4 four = load_four(p);
    for (uint i = 0; i < kEach; ++i) v[i] = four[i];
  } else {
    for (uint i = 0; i < kEach; ++i) v[i] = i < count ? widen(p[i]) : 0.0f;
  }
}
template <typename T>
inline void store_some(device T* p, bool whole, uint count, thread const float* v) {
  if (whole) {
    store_four(float4(v[0], v[1], v[2], v[3]), p);
  } else {
    for (uint i = 0; i < count; ++i) p[i] = narrow<T>(v[i]);
  }
}

// A thread's elements from place `from` of the gradient, at place `at` of the parameter.
template <typename Rule, typename T, typename G>
inline void step_some(Rule rule, float factor, constant Addresses<T, G>& all, int p, long from,
                      long at, bool whole, uint count) {
  float vw[kEach], vg[kEach], v0[kEach], v1[kEach];
  const bool two = has_states && int(Rule::kStates) == 2;
  load_some(all.grad[p] + from, whole, count, vg);
  for (uint k = 0; k < kEach; ++k) v0[k] = v1[k] = 0;
  if (has_states) load_some((device const float*)all.state0[p] + at, whole, count, v0);
  if (two) load_some((device const float*)all.state1[p] + at, whole, count, v1);
  if (has_master) {
    load_some((device const float*)all.master[p] + at, whole, count, vw);
  } else {
    load_some((device const T*)all.w[p] + at, whole, count, vw);
  }
  for (uint k = 0; k < kEach; ++k) {
    float states[2] = {v0[k], v1[k]};
    rule(vg[k] * factor, vw[k], states);
    v0[k] = states[0];
    v1[k] = states[1];
  }
  if (has_states) store_some(all.state0[p] + at, whole, count, v0);
  if (two) store_some(all.state1[p] + at, whole, count, v1);
  if (has_master) store_some(all.master[p] + at, whole, count, vw);
  store_some(all.w[p] + at, whole, count, vw);
}

template <typename Rule, bool kRows, typename T, typename G>
[[kernel, max_total_threads_per_threadgroup(256)]] void optimiser_step(
    device const float* lr [[buffer(0)]], device const int* t [[buffer(1)]],
    device const float* scale [[buffer(2)]], constant OptimiserArgs& args [[buffer(3)]],
    constant OptimiserPieces& pieces [[buffer(4)]], constant Addresses<T, G>& all [[buffer(5)]],
    OPTIMISER_PLACE) {
  const Piece piece = piece_of(pieces, long(group) + first_group);
  const int p = piece.parameter;
  const float factor = has_scale ? scale[0] : 1.0f;
  if (isnan(factor)) return;
  const Rule rule(args, lr[0], has_t ? float(t[0]) : 0.0f);
  const bool aligned = (pieces.aligned >> p & 1) != 0;
  const long end = min(args.sizes[p], piece.first + kOptimiserPiece);
  for (long i = piece.first + index * kEach; i < end; i += kThreads * kEach) {
    const uint count = uint(min(long(kEach), end - i));
    if (!kRows) {
      step_some<Rule, T, G>(rule, factor, all, p, i, i, aligned && count == kEach, count);
      continue;
    }
    // Four elements of one row at once, or one by one where a row may end among them.
    const long width = args.widths[p];
    const bool whole = aligned && width % kEach == 0;
    const uint each = whole ? kEach : 1;
    for (uint k = 0; k < count; k += each) {
      const long row = (i + k) / width;
      const long id = all.ids[p][row];
      if (id < 0 || id >= args.rows[p]) continue;
      const long at = id * width + (i + k - row * width);
      step_some<Rule, T, G>(rule, factor, all, p, i + k, at, whole, each);
    }
  }
}

// ---- norm ----

template <typename T>
[[kernel, max_total_threads_per_threadgroup(256)]] void optimiser_squares(
    device float* sums [[buffer(0)]], constant OptimiserArgs& args [[buffer(1)]],
    constant OptimiserPieces& pieces [[buffer(2)]], constant Addresses<T, T>& all [[buffer(3)]],
    OPTIMISER_PLACE) {
  threadgroup float room[32];
  const Place place = {index, lane, simd, simds};
  const long number = long(group) + first_group;
  const Piece piece = piece_of(pieces, number);
  const int p = piece.parameter;
  const bool aligned = (pieces.aligned >> p & 1) != 0;
  const long end = min(args.sizes[p], piece.first + kOptimiserPiece);
  float sum = 0;
  for (long i = piece.first + index * kEach; i < end; i += kThreads * kEach) {
    const uint count = uint(min(long(kEach), end - i));
    float g[kEach];
    load_some(all.grad[p] + i, aligned && count == kEach, count, g);
    for (uint k = 0; k < kEach; ++k) sum = fma(g[k], g[k], sum);
  }
  sum = group_sum(sum, room, place);
  if (index == 0) sums[number] = sum;
}

// One group: each thread its share in order.
[[kernel, max_total_threads_per_threadgroup(256)]] void optimiser_total(
    device const float* sums [[buffer(0)]], device float* to [[buffer(1)]],
    constant long& count [[buffer(2)]], uint index [[thread_position_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]], uint simd [[simdgroup_index_in_threadgroup]],
    uint simds [[simdgroups_per_threadgroup]]) {
  threadgroup float room[32];
  const Place place = {index, lane, simd, simds};
  float sum = 0;
  for (long i = index; i < count; i += kThreads) sum += sums[i];
  sum = group_sum(sum, room, place);
  if (index == 0) to[0] = sum;
}

[[kernel, max_total_threads_per_threadgroup(32)]] void optimiser_norm(
    device const float* sums [[buffer(0)]], device float* norm [[buffer(1)]],
    device float* scale [[buffer(2)]], constant NormArgs& args [[buffer(3)]],
    uint index [[thread_position_in_threadgroup]]) {
  if (index != 0) return;
  float sum = 0;
  for (long i = 0; i < args.sums; ++i) sum += sums[i];
  const float of_all = root(sum);
  norm[0] = of_all;
  const float share = args.most / (of_all + 1e-6f);
  scale[0] = share < 1 ? share : 1.0f;
}

[[kernel, max_total_threads_per_threadgroup(32)]] void optimiser_advance(
    device int* t [[buffer(0)]], uint index [[thread_position_in_threadgroup]]) {
  if (index == 0) t[0] += 1;
}

// ---- names ----

#define MAKE(name, ...) template [[host_name(name)]] [[kernel]] decltype(__VA_ARGS__) __VA_ARGS__;
#define MAKE_RULE(name, Rule, grads, type, T, G)                                   \
  MAKE("optimiser_" name grads "_" type, optimiser_step<Rule<float>, false, T, G>) \
  MAKE("optimiser_" name "_rows" grads "_" type, optimiser_step<Rule<float>, true, T, G>)
#define MAKE_STEPS(grads, type, T, G)              \
  MAKE_RULE("adamw", AdamWRule, grads, type, T, G) \
  MAKE_RULE("sgd", SgdRule, grads, type, T, G)     \
  MAKE_RULE("lion", LionRule, grads, type, T, G)   \
  MAKE("optimiser_muon" grads "_" type, optimiser_step<MuonRule<float>, false, T, G>)
MAKE_STEPS("", "f32", float, float)
MAKE_STEPS("", "f16", half, half)
MAKE_STEPS("", "bf16", bf16, bf16)
MAKE_STEPS("_of_f32", "f16", half, float)
MAKE_STEPS("_of_f32", "bf16", bf16, float)
MAKE("optimiser_squares_f32", optimiser_squares<float>)
MAKE("optimiser_squares_f16", optimiser_squares<half>)
MAKE("optimiser_squares_bf16", optimiser_squares<bf16>)

#else

#include <array>
#include <string>

#include "backends/metal/launch.h"
#include "mlxtape/base/error.h"

namespace mlxtape::ops {

namespace {

using metal::Launch;

constexpr std::int64_t kThreads = 256;

// A rule's names: dense, then by rows; of gradients of the weight's type, then of f32.
struct Names {
  const char* of[2][2];
  int states;
};
constexpr Names kAdamW{{{"optimiser_adamw", "optimiser_adamw_of_f32"},
                        {"optimiser_adamw_rows", "optimiser_adamw_rows_of_f32"}},
                       2};
constexpr Names kSgd{{{"optimiser_sgd", "optimiser_sgd_of_f32"},
                      {"optimiser_sgd_rows", "optimiser_sgd_rows_of_f32"}},
                     1};
constexpr Names kLion{{{"optimiser_lion", "optimiser_lion_of_f32"},
                       {"optimiser_lion_rows", "optimiser_lion_rows_of_f32"}},
                      1};
constexpr Names kMuon{{{"optimiser_muon", "optimiser_muon_of_f32"}, {nullptr, nullptr}}, 2};

// As the kernels' Addresses: what is read, then what is written.
struct Tables {
  std::array<void*, kOptimiserMost + kOptimiserMostRows> in{};
  std::array<std::array<void*, kOptimiserMost>, 4> out{};  // w, two states, master
  static constexpr std::size_t kSize = 5 * kOptimiserMost + kOptimiserMostRows;

  void give(Launch& launch, unsigned long index) const {
    launch.table(index, kSize, in, std::span<void* const>(out[0].data(), 4 * kOptimiserMost));
  }
};

OptimiserPieces pieces_of(const OptimiserArgs& args) {
  OptimiserPieces pieces{};
  pieces.count = static_cast<std::int32_t>(args.count);
  std::int64_t end = 0;
  for (std::int64_t p = 0; p < args.count; ++p) {
    end += optimiser_pieces(args.sizes[p]);
    if (end > std::numeric_limits<std::int32_t>::max()) {
      throw Error(Errc::kShape, "at most 2^31 pieces of 16384 elements in one step");
    }
    pieces.ends[p] = static_cast<std::int32_t>(end);
  }
  return pieces;
}
std::int64_t all_of(const OptimiserPieces& pieces) { return pieces.ends[pieces.count - 1]; }

template <bool kRows, class T>
void step(const KernelCall& call, const Names& names) {
  const auto& args = call.as<OptimiserArgs>();
  const auto count = static_cast<std::size_t>(args.count);
  const auto states = static_cast<std::size_t>(names.states);
  OptimiserPieces pieces = pieces_of(args);
  Tables tables;
  for (std::size_t p = 0; p < count; ++p) {
    bool aligned = true;
    const auto note = [&](void*& place, void* address) {
      place = address;
      aligned = aligned && metal::is_aligned(address);
    };
    note(tables.in[p], call.in[3 + p]);
    if (kRows) tables.in[kOptimiserMost + p] = call.in[3 + count + p];
    const std::size_t first = (states + 2) * p;
    note(tables.out[0][p], call.out[first]);
    for (std::size_t s = 0; s < states; ++s) note(tables.out[1 + s][p], call.out[first + 1 + s]);
    note(tables.out[3][p], call.out[first + 1 + states]);
    if (aligned) pieces.aligned |= std::uint64_t{1} << p;
  }
  const bool of_f32 = args.f32_grads != 0 && sizeof(T) != 4;
  Launch launch(call, metal::kernel<T>(names.of[kRows ? 1 : 0][of_f32 ? 1 : 0]));
  launch.constant(0, call.in[2] != nullptr)
      .constant(1, call.in[1] != nullptr)
      .constant(2, tables.out[1][0] != nullptr)
      .constant(3, args.has_master != 0)
      .input(0, call.in[0])
      .input(1, call.in[1])
      .input(2, call.in[2])
      .bytes(3, args)
      .bytes(4, pieces);
  tables.give(launch, 5);
  launch.in_parts().groups(all_of(pieces)).threads(kThreads).run();
}

template <class T>
void squares(const KernelCall& call) {
  const auto& args = call.as<OptimiserArgs>();
  OptimiserPieces pieces = pieces_of(args);
  Tables tables;
  for (std::size_t p = 0; p < static_cast<std::size_t>(args.count); ++p) {
    tables.in[p] = call.in[p];
    if (metal::is_aligned(call.in[p])) pieces.aligned |= std::uint64_t{1} << p;
  }
  Launch launch(call, metal::kernel<T>("optimiser_squares"));
  launch.output(0, call.workspace).bytes(1, args).bytes(2, pieces);
  tables.give(launch, 3);
  launch.in_parts().groups(all_of(pieces)).threads(kThreads).run();
  Launch(call, metal::kernel("optimiser_total"))
      .input(0, call.workspace)
      .output(1, call.out[0])
      .bytes(2, all_of(pieces))
      .groups(1)
      .threads(kThreads)
      .run();
}

std::size_t squares_workspace(const void* args) {
  const auto& a = *static_cast<const OptimiserArgs*>(args);
  std::int64_t all = 0;
  for (std::int64_t p = 0; p < a.count; ++p) all += optimiser_pieces(a.sizes[p]);
  return static_cast<std::size_t>(all) * sizeof(float);
}

void norm(const KernelCall& call) {
  Launch(call, metal::kernel("optimiser_norm")).buffers().groups(1).threads(metal::kSimd).run();
}

void advance_by_one(const KernelCall& call) {
  Launch(call, metal::kernel("optimiser_advance"))
      .output(0, call.out[0])
      .groups(1)
      .threads(metal::kSimd)
      .run();
}

template <class T, const Names& kNames>
void add_steps(KernelRegistry& registry, const std::string& name) {
  const std::string type = name_of(kDType<T>);
  registry.add(Backend::kMetal, "optimiser_" + name + "_" + type,
               [](const KernelCall& call) { step<false, T>(call, kNames); });
  if (kNames.of[1][0] == nullptr) return;
  registry.add(Backend::kMetal, "optimiser_" + name + "_rows_" + type,
               [](const KernelCall& call) { step<true, T>(call, kNames); });
}

template <class T>
void add_kernels(KernelRegistry& registry) {
  add_steps<T, kAdamW>(registry, "adamw");
  add_steps<T, kSgd>(registry, "sgd");
  add_steps<T, kLion>(registry, "lion");
  add_steps<T, kMuon>(registry, "muon");
  registry.add(Backend::kMetal, std::string("optimiser_squares_") + name_of(kDType<T>), squares<T>,
               squares_workspace);
}

}  // namespace

void register_optimiser_metal(KernelRegistry& registry) {
  add_kernels<float>(registry);
  add_kernels<F16>(registry);
  add_kernels<BF16>(registry);
  registry.add(Backend::kMetal, "optimiser_norm_f32", norm);
  registry.add(Backend::kMetal, "optimiser_advance_i32", advance_by_one);
}

}  // namespace mlxtape::ops

#endif
