#include "mlxtape/ops/optimiser.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <functional>
#include <string>

#include "optimiser_args.h"
#include "optimiser_checks.h"
#include "optimiser_muon.h"

namespace mlxtape::ops {

using namespace optimiser;  // NOLINT(google-build-using-namespace): its checks

namespace {

constinit const KernelHandle kAdamW("optimiser_adamw");
constinit const KernelHandle kSgd("optimiser_sgd");
constinit const KernelHandle kLion("optimiser_lion");
constinit const KernelHandle kMuon("optimiser_muon");
constinit const KernelHandle kAdamWRows("optimiser_adamw_rows");
constinit const KernelHandle kSgdRows("optimiser_sgd_rows");
constinit const KernelHandle kLionRows("optimiser_lion_rows");
constinit const KernelHandle kSquares("optimiser_squares");
constinit const KernelHandle kNorm("optimiser_norm");
constinit const KernelHandle kAdvance("optimiser_advance");

constexpr int kByRows = 1 << 16;  // in a key

// Calls body for groups of numbers in [0, n) that key is the same for, as many as a kernel takes at once.
void in_groups(std::size_t n, const std::function<int(std::size_t)>& key,
               const std::function<void(const std::vector<std::size_t>&)>& body) {
  std::vector<std::vector<std::size_t>> open;
  std::vector<int> keys;
  for (std::size_t i = 0; i < n; ++i) {
    const int k = key(i);
    const auto at = static_cast<std::size_t>(std::find(keys.begin(), keys.end(), k) - keys.begin());
    if (at == keys.size()) {
      keys.push_back(k);
      open.emplace_back();
    }
    open[at].push_back(i);
    const int most = (k & kByRows) != 0 ? kOptimiserMostRows : kOptimiserMost;
    if (open[at].size() == static_cast<std::size_t>(most)) {
      body(open[at]);
      open[at].clear();
    }
  }
  for (const auto& group : open) {
    if (!group.empty()) body(group);
  }
}

int kind_of(const Tensor& w, const Tensor& grad, const Tensor& master, const Tensor& ids) {
  return static_cast<int>(w.dtype()) * 4 + (grad.dtype() == DType::kF32 ? 2 : 0) +
         (master.defined() ? 1 : 0) + (ids.defined() ? kByRows : 0);
}

// What a slot keeps between steps, in the order of the kernels.
struct State {
  const char* name;
  const Tensor& tensor;
};
std::array<State, 2> states_of(const AdamWSlot& s) { return {{{"m", s.m}, {"v", s.v}}}; }
std::array<State, 1> states_of(const SgdSlot& s) { return {{{"v", s.v}}}; }
std::array<State, 1> states_of(const LionSlot& s) { return {{{"m", s.m}}}; }
std::array<State, 2> states_of(const MomentumSlot& s) { return {{{"v", s.v}, {"u", s.u}}}; }

template <class Slot>
Check check_slots(const std::vector<Slot>& slots, const StepNumbers& numbers, bool has_states,
                  bool has_t) {
  if (slots.empty()) return std::nullopt;
  const Backend backend = slots[0].w.backend();
  for (std::size_t i = 0; i < slots.size(); ++i) {
    const Slot& s = slots[i];
    if (const Check check = check_parameter(s.w, s.grad, s.master, s.ids, backend, i)) return check;
    if (!has_states) continue;
    for (const State& state : states_of(s)) {
      if (const Check check = check_state(state.name, state.tensor, s.w, DType::kF32, i)) {
        return check;
      }
    }
  }
  const auto w_of = [&](std::size_t i) -> const Tensor& {
    return slots[i].w;
  };
  if (const Check check = check_apart(slots.size(), w_of)) return check;
  return check_numbers(numbers, backend, has_t);
}

// What of a group's slots the kernels need to know, and the ids behind all other inputs.
template <class Slot>
void describe(const std::vector<Slot>& slots, const std::vector<std::size_t>& group,
              OptimiserArgs& args, std::vector<TensorRef>& in) {
  const Slot& first = slots[group[0]];
  args.count = static_cast<std::int64_t>(group.size());
  args.f32_grads = first.grad.dtype() == DType::kF32;
  args.has_master = first.master.defined();
  for (std::size_t i = 0; i < group.size(); ++i) {
    const Slot& s = slots[group[i]];
    args.sizes[i] = s.grad.size();
    in.emplace_back(s.grad);
    if (!s.ids.defined()) continue;
    args.rows[i] = s.w.dim(0);
    args.widths[i] = s.ids.dim(0) == 0 ? 0 : s.grad.size() / s.ids.dim(0);
  }
  if (!first.ids.defined()) return;
  for (const std::size_t i : group) in.emplace_back(slots[i].ids);
}

// As few launches as there are kinds of slots, or more where one has not room for all. t not defined: not counted.
template <class Slot>
void step(CommandEncoder& encoder, const std::vector<Slot>& slots, const StepNumbers& numbers,
          OptimiserArgs args, const KernelHandle& dense, const KernelHandle& by_rows) {
  const auto key = [&](std::size_t i) {
    return kind_of(slots[i].w, slots[i].grad, slots[i].master, slots[i].ids);
  };
  in_groups(slots.size(), key, [&](const std::vector<std::size_t>& group) {
    std::vector<TensorRef> in{numbers.lr, numbers.t, numbers.scale}, out;
    describe(slots, group, args, in);
    for (const std::size_t i : group) {
      out.emplace_back(slots[i].w);
      for (const State& state : states_of(slots[i])) out.emplace_back(state.tensor);
      out.emplace_back(slots[i].master);
    }
    const Slot& first = slots[group[0]];
    encoder.dispatch(first.ids.defined() ? by_rows : dense, first.w.dtype(), args, in, out);
  });
}

// Two moments' shares, as AdamW and Lion have them.
template <class Options>
OptimiserArgs args_of(const Options& options) {
  OptimiserArgs args{};
  args.beta1 = static_cast<float>(options.beta1);
  args.beta2 = static_cast<float>(options.beta2);
  args.rest1 = static_cast<float>(1 - options.beta1);
  args.rest2 = static_cast<float>(1 - options.beta2);
  args.weight_decay = options.weight_decay;
  return args;
}

}  // namespace

Check adamw_step_check(const std::vector<AdamWSlot>& slots, const StepNumbers& numbers,
                       const AdamWOptions& options) {
  if (const Check check = check_rate("beta1", options.beta1)) return check;
  if (const Check check = check_rate("beta2", options.beta2)) return check;
  if (const Check check = check_least("eps", options.eps)) return check;
  if (const Check check = check_least("weight_decay", options.weight_decay)) return check;
  return check_slots(slots, numbers, true, true);
}

Check sgd_step_check(const std::vector<SgdSlot>& slots, const StepNumbers& numbers,
                     const SgdOptions& options) {
  if (const Check check = check_rate("momentum", options.momentum)) return check;
  if (const Check check = check_least("weight_decay", options.weight_decay)) return check;
  if (const Check check = check_least("dampening", options.dampening)) return check;
  if (options.nesterov && (options.momentum == 0 || options.dampening != 0)) {
    return wrong(Errc::kArgument, "nesterov needs momentum and no dampening");
  }
  return check_slots(slots, numbers, options.momentum != 0, false);
}

Check lion_step_check(const std::vector<LionSlot>& slots, const StepNumbers& numbers,
                      const LionOptions& options) {
  if (const Check check = check_rate("beta1", options.beta1)) return check;
  if (const Check check = check_rate("beta2", options.beta2)) return check;
  if (const Check check = check_least("weight_decay", options.weight_decay)) return check;
  return check_slots(slots, numbers, true, false);
}

Check muon_step_check(const std::vector<MuonSlot>& slots, const StepNumbers& numbers,
                      const MuonOptions& options) {
  if (const Check check = check_rate("momentum", options.momentum)) return check;
  if (const Check check = check_least("weight_decay", options.weight_decay)) return check;
  if (options.ns_steps < 1 || options.ns_steps > 100) {
    return wrong(Errc::kArgument,
                 "ns_steps must be from 1 to 100, got " + std::to_string(options.ns_steps));
  }
  std::vector<MomentumSlot> all;
  for (std::size_t i = 0; i < slots.size(); ++i) {
    const MuonSlot& s = slots[i];
    if (s.w.rank() < 2) {
      return wrong(Errc::kShape, "w" + of(i) + " must be a matrix or a stack of them, got " +
                                     to_string(s.w.shape()) + "; AdamW is for what is not");
    }
    all.push_back({s.w, s.grad, s.v, s.v, s.master});
  }
  return check_slots(all, numbers, true, false);
}

Check grad_norm_check(const std::vector<Tensor>& grads) {
  if (grads.empty()) return wrong(Errc::kArgument, "a norm needs gradients, got none");
  for (std::size_t i = 0; i < grads.size(); ++i) {
    if (!is_kernel_float(grads[i].dtype())) {
      return wrong(Errc::kDType,
                   "grad" + of(i) + " must be f32, f16 or bf16, got " + name_of(grads[i].dtype()));
    }
    if (const Check check = check_state("grad", grads[i], grads[i], grads[i].dtype(), i)) {
      return check;
    }
    if (grads[i].backend() != grads[0].backend()) {
      return wrong(Errc::kDevice, "grad" + of(i) + " must be where the first is, " +
                                      name_of(grads[0].backend()) + ", got " +
                                      name_of(grads[i].backend()));
    }
  }
  return std::nullopt;
}

void adamw_step(CommandEncoder& encoder, const std::vector<AdamWSlot>& slots,
                const StepNumbers& numbers, const AdamWOptions& options) {
  require(adamw_step_check(slots, numbers, options));
  OptimiserArgs args = args_of(options);
  args.eps = options.eps;
  args.log_beta1 = static_cast<float>(std::log(options.beta1));
  args.log_beta2 = static_cast<float>(std::log(options.beta2));
  args.bias_correction = options.bias_correction;
  step(encoder, slots, numbers, args, kAdamW, kAdamWRows);
}

void sgd_step(CommandEncoder& encoder, const std::vector<SgdSlot>& slots,
              const StepNumbers& numbers, const SgdOptions& options) {
  require(sgd_step_check(slots, numbers, options));
  OptimiserArgs args{};
  args.beta1 = options.momentum;
  args.rest1 = 1 - options.dampening;
  args.weight_decay = options.weight_decay;
  args.nesterov = options.nesterov;
  args.has_momentum = options.momentum != 0;
  step(encoder, slots, {numbers.lr, {}, numbers.scale}, args, kSgd, kSgdRows);
}

void lion_step(CommandEncoder& encoder, const std::vector<LionSlot>& slots,
               const StepNumbers& numbers, const LionOptions& options) {
  require(lion_step_check(slots, numbers, options));
  step(encoder, slots, {numbers.lr, {}, numbers.scale}, args_of(options), kLion, kLionRows);
}

namespace optimiser {

void muon_momentum(CommandEncoder& encoder, const MuonSlot& slot, const Tensor& u,
                   const StepNumbers& numbers, const MuonOptions& options) {
  OptimiserArgs args{};
  args.beta1 = static_cast<float>(options.momentum);
  args.rest1 = static_cast<float>(1 - options.momentum);
  args.weight_decay = options.weight_decay;
  args.nesterov = options.nesterov;
  const std::vector<MomentumSlot> one{{slot.w, slot.grad, slot.v, u, slot.master}};
  step(encoder, one, {numbers.lr, {}, numbers.scale}, args, kMuon, kMuon);
}

}  // namespace optimiser

void advance(CommandEncoder& encoder, const Tensor& t) {
  require(check_number("t", t, DType::kI32, encoder.backend()));
  encoder.dispatch(kAdvance, DType::kI32, NormArgs{}, {}, {t});
}

GradNorm grad_norm(CommandEncoder& encoder, const std::vector<Tensor>& grads, float most) {
  require(grad_norm_check(grads));
  std::vector<std::vector<std::size_t>> groups;
  in_groups(
      grads.size(), [&](std::size_t i) { return static_cast<int>(grads[i].dtype()); },
      [&](const std::vector<std::size_t>& group) { groups.push_back(group); });
  const auto count = static_cast<std::int64_t>(groups.size());
  const Tensor sums = encoder.empty({count}, DType::kF32);
  for (std::int64_t g = 0; g < count; ++g) {
    const auto& group = groups[static_cast<std::size_t>(g)];
    OptimiserArgs args{};
    args.count = static_cast<std::int64_t>(group.size());
    std::vector<TensorRef> in;
    for (std::size_t i = 0; i < group.size(); ++i) {
      args.sizes[i] = grads[group[i]].size();
      in.emplace_back(grads[group[i]]);
    }
    const Tensor sum = sums.slice(0, g, g + 1);
    const TensorRef out[] = {sum};
    encoder.dispatch(kSquares, grads[group[0]].dtype(), args, in, out);
  }
  GradNorm result{encoder.empty({1}, DType::kF32), encoder.empty({1}, DType::kF32)};
  encoder.dispatch(kNorm, DType::kF32, NormArgs{count, most}, {sums}, {result.norm, result.scale});
  return result;
}

}  // namespace mlxtape::ops
