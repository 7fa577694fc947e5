// CPU kernels of optimiser (formulas: mlxtape/ops/optimiser.h). Pieces of all parameters over threads; each
// vector is read, stepped and written once. By rows, a piece of the gradient is cut at the ends of its rows. Bound by memory.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/optimiser/optimiser.cpu.cpp"
#include <hwy/foreach_target.h>

#include <cmath>

#include "backends/cpu/device/simd-inl.h"
#include "mlxtape/core/registry.h"
#include "mlxtape/core/threads.h"
#include "optimiser_args.h"

HWY_BEFORE_NAMESPACE();
namespace mlxtape::ops::HWY_NAMESPACE {
namespace {

HWY_INLINE VF root(VF v) { return hn::Sqrt(v); }
// 0 of 0, and NaN of NaN: it must reach the weight.
HWY_INLINE VF sign(VF v) {
  const DF d;
  return hn::IfThenElse(hn::Gt(hn::Abs(v), hn::Zero(d)), hn::CopySign(hn::Set(d, 1), v), v);
}
template <class V>
HWY_INLINE V all(float value) {
  return hn::Set(DF(), value);
}
#undef MT_STEP
#define MT_STEP HWY_INLINE
#include "optimiser_formula.h"  // NOLINT: inside this namespace, once for each target

// Calls body(parameter, first, count) for every piece of every parameter.
template <class Body>
void for_pieces(const OptimiserArgs& args, const Body& body) {
  std::int64_t ends[kOptimiserMost];
  std::int64_t all = 0;
  for (std::int64_t p = 0; p < args.count; ++p) ends[p] = all += optimiser_pieces(args.sizes[p]);
  parallel_for(all, [&](std::int64_t task) {
    const std::int64_t p = std::upper_bound(ends, ends + args.count, task) - ends;
    const std::int64_t first = (task - (p == 0 ? 0 : ends[p - 1])) * kOptimiserPiece;
    body(static_cast<std::size_t>(p), first, task,
         static_cast<std::size_t>(std::min(kOptimiserPiece, args.sizes[p] - first)));
  });
}

// Calls run(first of the gradient, first of the parameter, count) for what is next to each other in both of a piece.
// at: number of the ids among the inputs.
template <bool kRows, class Run>
HWY_INLINE void for_runs(const KernelCall& call, std::size_t at, std::size_t p, std::int64_t first,
                         std::size_t n, const Run& run) {
  if constexpr (!kRows) {
    run(first, first, n);
  } else {
    const std::int64_t width = call.as<OptimiserArgs>().widths[p];
    const auto rows = static_cast<std::uint64_t>(call.as<OptimiserArgs>().rows[p]);
    const auto* ids = call.input<std::int32_t>(at);
    const std::int64_t end = first + static_cast<std::int64_t>(n);
    for (std::int64_t i = first, next; i < end; i = next) {
      const std::int64_t row = i / width;
      next = std::min(end, (row + 1) * width);
      const std::int64_t id = ids[row];
      if (static_cast<std::uint64_t>(id) >= rows) continue;
      run(i, id * width + i - row * width, static_cast<std::size_t>(next - i));
    }
  }
}

// Calls step(g, w, ...) on vectors of a piece: load, step, store; the last may be a part. master null: w itself.
template <class T, class G, class Step>
HWY_INLINE void step_piece(T* w, float* master, const G* g, std::size_t n, const Step& step) {
  const DF d;
  for_row(
      d, n,
      [&](std::size_t i) HWY_ATTR {
        VF value = master != nullptr ? load(d, master + i) : load(d, w + i);
        step(i, hn::Lanes(d), load(d, g + i), value);
        if (master != nullptr) store(d, value, master + i);
        store(d, value, w + i);
      },
      [&](std::size_t i, std::size_t count) HWY_ATTR {
        VF value = master != nullptr ? load_n(d, master + i, count) : load_n(d, w + i, count);
        step(i, count, load_n(d, g + i, count), value);
        if (master != nullptr) store_n(d, value, master + i, count);
        store_n(d, value, w + i, count);
      });
}

HWY_INLINE VF load_some(DF d, const float* p, std::size_t count) {
  return count == hn::Lanes(d) ? load(d, p) : load_n(d, p, count);
}
HWY_INLINE void store_some(DF d, VF v, float* p, std::size_t count) {
  count == hn::Lanes(d) ? store(d, v, p) : store_n(d, v, p, count);
}

template <template <class> class Rule, bool kRows, class T, class G>
void step_all(const KernelCall& call) {
  constexpr std::size_t kStates = Rule<VF>::kStates, kEach = kStates + 2;
  const auto& args = call.as<OptimiserArgs>();
  const float t = call.in[1] == nullptr ? 0 : static_cast<float>(*call.input<std::int32_t>(1));
  const float scale = call.in[2] == nullptr ? 1 : *call.input<float>(2);
  if (std::isnan(scale)) return;
  const Rule<VF> rule(args, *call.input<float>(0), t);
  for_pieces(args, [&](std::size_t p, std::int64_t first, std::int64_t, std::size_t n) HWY_ATTR {
    const DF d;
    const VF factor = hn::Set(d, scale);
    const std::size_t ids = 3 + static_cast<std::size_t>(args.count) + p;
    const auto run = [&](std::int64_t from, std::int64_t to, std::size_t some) HWY_ATTR {
      float* states[kStates];
      for (std::size_t k = 0; k < kStates; ++k) {
        states[k] = call.output<float>(kEach * p + 1 + k);
        if (states[k] != nullptr) states[k] += to;
      }
      float* master = call.output<float>(kEach * p + kEach - 1);
      step_piece(call.output<T>(kEach * p) + to, master == nullptr ? nullptr : master + to,
                 call.input<G>(3 + p) + from, some,
                 [&](std::size_t i, std::size_t count, VF g, VF& w) HWY_ATTR {
                   VF values[kStates];
                   for (std::size_t k = 0; k < kStates; ++k) {
                     values[k] =
                         states[k] == nullptr ? hn::Zero(d) : load_some(d, states[k] + i, count);
                   }
                   rule(hn::Mul(g, factor), w, values);
                   for (std::size_t k = 0; k < kStates; ++k) {
                     if (states[k] != nullptr) store_some(d, values[k], states[k] + i, count);
                   }
                 });
    };
    for_runs<kRows>(call, ids, p, first, n, run);
  });
}

template <template <class> class Rule, bool kRows, class T>
void step(const KernelCall& call) {
  call.as<OptimiserArgs>().f32_grads != 0 ? step_all<Rule, kRows, T, float>(call)
                                          : step_all<Rule, kRows, T, T>(call);
}

// A sum for each piece, then the sum of those in order.
template <class T>
void squares(const KernelCall& call) {
  const auto& args = call.as<OptimiserArgs>();
  auto* sums = static_cast<float*>(call.workspace);
  std::int64_t all = 0;
  for (std::int64_t p = 0; p < args.count; ++p) all += optimiser_pieces(args.sizes[p]);
  for_pieces(args,
             [&](std::size_t p, std::int64_t first, std::int64_t task, std::size_t n) HWY_ATTR {
               const DF d;
               const T* g = call.input<T>(p) + first;
               VF a = hn::Zero(d), b = a;
               const std::size_t lanes = hn::Lanes(d);
               std::size_t i = 0;
               for (; i + 2 * lanes <= n; i += 2 * lanes) {
                 const VF x = load(d, g + i), y = load(d, g + i + lanes);
                 a = hn::MulAdd(x, x, a);
                 b = hn::MulAdd(y, y, b);
               }
               for (std::size_t count; i < n; i += count) {
                 count = std::min(lanes, n - i);
                 const VF x = load_n(d, g + i, count);
                 a = hn::MulAdd(x, x, a);
               }
               sums[task] = sum_lanes(d, hn::Add(a, b));
             });
  double sum = 0;
  for (std::int64_t i = 0; i < all; ++i) sum += sums[i];
  *call.output<float>(0) = static_cast<float>(sum);
}

std::size_t squares_workspace(const void* args) {
  const auto& a = *static_cast<const OptimiserArgs*>(args);
  std::int64_t all = 0;
  for (std::int64_t p = 0; p < a.count; ++p) all += optimiser_pieces(a.sizes[p]);
  return static_cast<std::size_t>(all) * sizeof(float);
}

void norm(const KernelCall& call) {
  const auto& args = call.as<NormArgs>();
  double sum = 0;
  for (std::int64_t i = 0; i < args.sums; ++i) sum += call.input<float>(0)[i];
  const auto norm = static_cast<float>(std::sqrt(sum));
  *call.output<float>(0) = norm;
  *call.output<float>(1) = std::min(1.0F, args.most / (norm + 1e-6F));
}

void advance_by_one(const KernelCall& call) { ++*call.output<std::int32_t>(0); }

template <template <class> class Rule, class T>
void add_steps(KernelRegistry& registry, const std::string& name) {
  const std::string type = name_of(kDType<T>);
  registry.add(Backend::kCpu, "optimiser_" + name + "_" + type, step<Rule, false, T>);
  registry.add(Backend::kCpu, "optimiser_" + name + "_rows_" + type, step<Rule, true, T>);
}

template <class T>
void add_kernels(KernelRegistry& registry) {
  add_steps<AdamWRule, T>(registry, "adamw");
  add_steps<SgdRule, T>(registry, "sgd");
  add_steps<LionRule, T>(registry, "lion");
  registry.add(Backend::kCpu, std::string("optimiser_muon_") + name_of(kDType<T>),
               step<MuonRule, false, T>);
  registry.add(Backend::kCpu, std::string("optimiser_squares_") + name_of(kDType<T>), squares<T>,
               squares_workspace);
}

}  // namespace

void register_optimiser(KernelRegistry& registry) {
  add_kernels<float>(registry);
  add_kernels<F16>(registry);
  add_kernels<BF16>(registry);
  registry.add(Backend::kCpu, "optimiser_norm_f32", norm);
  registry.add(Backend::kCpu, "optimiser_advance_i32", advance_by_one);
}

}  // namespace mlxtape::ops::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

MT_REGISTER_CPU_KERNELS(optimiser)
