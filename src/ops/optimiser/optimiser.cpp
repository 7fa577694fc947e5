#include "mlxtape/ops/optimiser.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <functional>
#include <string>

#include "optimiser_args.h"

namespace mlxtape::ops {

namespace {

constinit const KernelHandle kAdamW("optimiser_adamw");
constinit const KernelHandle kSgd("optimiser_sgd");
constinit const KernelHandle kLion("optimiser_lion");
constinit const KernelHandle kAdamWRows("optimiser_adamw_rows");
constinit const KernelHandle kSgdRows("optimiser_sgd_rows");
constinit const KernelHandle kLionRows("optimiser_lion_rows");
constinit const KernelHandle kSquares("optimiser_squares");
constinit const KernelHandle kNorm("optimiser_norm");
constinit const KernelHandle kAdvance("optimiser_advance");

Error wrong(Errc code, const std::string& what) { return {code, "optimiser: " + what}; }

std::string of(std::size_t slot) { return " of parameter " + std::to_string(slot); }

Check check_number(const char* name, const Tensor& t, DType dtype, Backend backend) {
  if (t.size() != 1 || t.dtype() != dtype) {
    return wrong(t.dtype() != dtype ? Errc::kDType : Errc::kShape,
                 std::string(name) + " must be one " + name_of(dtype) + ", got " +
                     to_string(t.shape()) + " " + name_of(t.dtype()));
  }
  if (t.backend() != backend) {
    return wrong(Errc::kDevice, std::string(name) + " must be where the parameters are");
  }
  return std::nullopt;
}

Check check_state(const char* name, const Tensor& t, const Tensor& w, DType dtype,
                  std::size_t slot) {
  if (!t.defined()) {
    return wrong(Errc::kArgument, std::string(name) + of(slot) + " is needed, got none");
  }
  if (!(t.shape() == w.shape())) {
    return wrong(Errc::kShape, std::string(name) + of(slot) + " must have its shape " +
                                   to_string(w.shape()) + ", got " + to_string(t.shape()));
  }
  if (t.dtype() != dtype) {
    return wrong(Errc::kDType, std::string(name) + of(slot) + " must be " + name_of(dtype) +
                                   ", got " + name_of(t.dtype()));
  }
  if (!t.is_contiguous()) {
    return wrong(Errc::kShape, std::string(name) + of(slot) + " must be contiguous, got strides " +
                                   to_string(t.strides()));
  }
  if (t.backend() != w.backend()) {
    return wrong(Errc::kDevice, std::string(name) + of(slot) + " must be where it is, " +
                                    name_of(w.backend()) + ", got " + name_of(t.backend()));
  }
  return std::nullopt;
}

// ids, and the rows that they name of w.
Check check_rows(const Tensor& ids, const Tensor& grad, const Tensor& w, DType grad_type,
                 std::size_t slot) {
  if (ids.rank() != 1 || w.rank() < 1) {
    return wrong(Errc::kShape, "ids" + of(slot) + " must be [n] and it [V, …], got " +
                                   to_string(ids.shape()) + " and " + to_string(w.shape()));
  }
  if (const Check check = check_state("ids", ids, ids, DType::kI32, slot)) return check;
  if (ids.backend() != w.backend()) {
    return wrong(Errc::kDevice, "ids" + of(slot) + " must be where it is, " + name_of(w.backend()) +
                                    ", got " + name_of(ids.backend()));
  }
  Shape shape = w.shape();
  shape[0] = ids.dim(0);
  if (!element_count(shape)) {
    return wrong(Errc::kShape,
                 "the rows" + of(slot) + " must fit in 63 bits, got " + to_string(shape));
  }
  return check_state("grad", grad, Tensor::meta(shape, grad_type, w.backend()), grad_type, slot);
}

Check check_parameter(const Tensor& w, const Tensor& grad, const Tensor& master, const Tensor& ids,
                      Backend backend, std::size_t slot) {
  if (!is_kernel_float(w.dtype())) {
    return wrong(Errc::kDType,
                 "w" + of(slot) + " must be f32, f16 or bf16, got " + name_of(w.dtype()));
  }
  if (w.backend() != backend) {
    return wrong(Errc::kDevice, "w" + of(slot) + " must be where the first is, " +
                                    name_of(backend) + ", got " + name_of(w.backend()));
  }
  if (const Check bad = check_state("w", w, w, w.dtype(), slot)) return bad;
  const DType grad_type = grad.dtype() == DType::kF32 ? DType::kF32 : w.dtype();
  const Check check = ids.defined() ? check_rows(ids, grad, w, grad_type, slot)
                                    : check_state("grad", grad, w, grad_type, slot);
  if (check) return check;
  if (!master.defined()) return std::nullopt;
  return check_state("master", master, w, DType::kF32, slot);
}

Check check_numbers(const StepNumbers& numbers, Backend backend, bool has_t) {
  if (const Check check = check_number("lr", numbers.lr, DType::kF32, backend)) return check;
  if (has_t) {
    if (const Check check = check_number("t", numbers.t, DType::kI32, backend)) return check;
  }
  if (!numbers.scale.defined()) return std::nullopt;
  return check_number("scale", numbers.scale, DType::kF32, backend);
}

Check check_rate(const char* name, double value) {
  if (value >= 0 && value < 1) return std::nullopt;
  return wrong(Errc::kArgument,
               std::string(name) + " must be in [0, 1), got " + std::to_string(value));
}

Check check_least(const char* name, double value) {
  if (value >= 0 && std::isfinite(value)) return std::nullopt;
  return wrong(Errc::kArgument,
               std::string(name) + " must be at least 0 and finite, got " + std::to_string(value));
}

// Two slots that write one parameter would do so at once, in no order.
template <class Slot>
Check check_apart(const std::vector<Slot>& slots) {
  struct Extent {
    std::uintptr_t first, end;
    std::size_t slot;
  };
  std::vector<Extent> extents;
  extents.reserve(slots.size());
  for (std::size_t i = 0; i < slots.size(); ++i) {
    const Tensor& w = slots[i].w;
    if (!w.has_memory() || w.size() == 0) continue;
    const auto first = reinterpret_cast<std::uintptr_t>(w.data());
    extents.push_back({first, first + w.bytes(), i});
  }
  const auto before = [](const Extent& a, const Extent& b) {
    return a.first < b.first;
  };
  // Parameters that were made one after the other often lie so.
  if (!std::is_sorted(extents.begin(), extents.end(), before)) {
    std::sort(extents.begin(), extents.end(), before);
  }
  for (std::size_t i = 1; i < extents.size(); ++i) {
    if (extents[i].first >= extents[i - 1].end) continue;
    const auto [low, high] = std::minmax(extents[i - 1].slot, extents[i].slot);
    return wrong(Errc::kArgument, "w" + of(high) + " must have memory of its own, got that" +
                                      of(low) + "; each parameter once in a step");
  }
  return std::nullopt;
}

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
  if (const Check check = check_apart(slots)) return check;
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
