#include "mlxtape/ops/reduce.h"

#include <algorithm>
#include <array>
#include <string>
#include <utility>

#include "mlxtape/ops/elementwise.h"
#include "reduce_args.h"

namespace mlxtape::ops {

namespace {

constinit const KernelHandle kSum("sum_fwd");
constinit const KernelHandle kMax("max_fwd");
constinit const KernelHandle kMin("min_fwd");
constinit const KernelHandle kLogsumexp("logsumexp_fwd");
constinit const KernelHandle kVar("var_fwd");
constinit const KernelHandle kSumBackward("sum_bwd");
constinit const KernelHandle kExtremeBackward("extreme_bwd");
constinit const KernelHandle kLogsumexpBackward("logsumexp_bwd");
constinit const KernelHandle kVarBackward("var_bwd");

Error wrong(const char* op, Errc code, const std::string& what) {
  return {code, std::string(op) + ": " + what};
}

// Which axes of x are reduced; the axes must have passed the check.
std::array<bool, kMaxRank> reduced(const Shape& shape, const Axes& axes) {
  std::array<bool, kMaxRank> is{};
  for (std::int64_t i = 0; i < shape.rank(); ++i) is[static_cast<std::size_t>(i)] = axes.all;
  for (const std::int64_t axis : axes.list) {
    is[static_cast<std::size_t>(*normal_axis(axis, shape.rank()))] = true;
  }
  return is;
}

// A reduction of x as the kernels see it.
struct Plan {
  Tensor x;         // [outer, count, inner], contiguous
  ReduceArgs args;  // divisor 1
  Shape order;      // how x's axes were permuted for that
  Shape permuted;   // and its shape then
  Shape kept;       // of the result, without the reduced axes
  Shape result;
};

Plan plan_of(CommandEncoder& encoder, const Tensor& x, const Axes& axes, bool keepdims) {
  const auto is_reduced = reduced(x.shape(), axes);
  const auto at = [&](std::int64_t i) {
    return is_reduced[static_cast<std::size_t>(i)];
  };
  Plan plan{};
  plan.args = {1, 1, 1, 1};
  int changes = 0;  // between kept and reduced, axes of length 1 left aside
  bool before = false;
  for (std::int64_t i = 0; i < x.rank(); ++i) {
    if (!at(i)) plan.kept.push_back(x.dim(i));
    if (!at(i) || keepdims) plan.result.push_back(at(i) ? 1 : x.dim(i));
    if (x.dim(i) == 1) continue;
    changes += at(i) != before ? 1 : 0;
    before = at(i);
    (at(i) ? plan.args.count : changes == 0 ? plan.args.outer : plan.args.inner) *= x.dim(i);
  }
  for (std::int64_t i = 0; i < x.rank(); ++i) plan.order.push_back(i);
  plan.permuted = x.shape();
  if (changes > 2) {  // reduced axes with others in between: these go last
    plan.args = {1, 1, 1, 1};
    Shape order;
    for (const bool last : {false, true}) {
      for (std::int64_t i = 0; i < x.rank(); ++i) {
        if (at(i) != last) continue;
        order.push_back(i);
        (last ? plan.args.count : plan.args.outer) *= x.dim(i);
      }
    }
    plan.order = order;
    plan.permuted = Shape();
    Strides strides;
    for (const std::int64_t i : order) {
      plan.permuted.push_back(x.dim(i));
      strides.push_back(x.strides()[i]);
    }
    plan.x =
        x.has_memory()
            ? encoder.contiguous(Tensor(x.buffer(), x.dtype(), plan.permuted, strides, x.offset()))
            : x;
  } else {
    plan.x = encoder.contiguous(x);
  }
  return plan;
}

// What the backward functions need to know of the forward pass.
struct Reduced {
  ReduceArgs args;
  Shape shape;  // of x
  std::int8_t order[kMaxRank];
};
Reduced reduced_of(const Plan& plan, const Shape& shape) {
  Reduced r{plan.args, shape, {}};
  for (std::int64_t i = 0; i < shape.rank(); ++i) {
    r.order[i] = static_cast<std::int8_t>(plan.order[i]);
  }
  return r;
}

// dx, which the kernels wrote as [outer, count, inner], in the shape of x.
Tensor in_shape_of_x(const Tensor& dx, const Reduced& r) {
  Shape permuted;
  for (std::int64_t i = 0; i < r.shape.rank(); ++i) permuted.push_back(r.shape[r.order[i]]);
  const Strides there = contiguous_strides(permuted);
  Strides strides = there;
  for (std::int64_t i = 0; i < r.shape.rank(); ++i) strides[r.order[i]] = there[i];
  return {dx.buffer(), dx.dtype(), r.shape, strides, dx.offset()};
}

// dy as the kernels read it, [outer, inner].
Tensor flat_grad(Pullback& pullback) { return pullback.encoder().contiguous(pullback.take_grad()); }

template <class... In>
void give_dx(Pullback& pullback, const KernelHandle& handle, const Tensor& dy, const In&... in) {
  const auto& r = pullback.saved().args<Reduced>();
  CommandEncoder& encoder = pullback.encoder();
  const Tensor dx = encoder.empty({*element_count(r.shape)}, dy.dtype());
  if (dx.size() != 0) encoder.dispatch(handle, dy.dtype(), r.args, {dy, in...}, {dx});
  pullback.give(0, encoder.contiguous(in_shape_of_x(dx, r)));
}

void sum_backward(Pullback& pullback) { give_dx(pullback, kSumBackward, flat_grad(pullback)); }
void extreme_backward(Pullback& pullback) {
  const Saved& saved = pullback.saved();
  give_dx(pullback, kExtremeBackward, flat_grad(pullback), saved[0], saved[1]);
}
void logsumexp_backward(Pullback& pullback) {
  const Saved& saved = pullback.saved();
  give_dx(pullback, kLogsumexpBackward, flat_grad(pullback), saved[0], saved[1]);
}
void var_backward(Pullback& pullback) {
  const Saved& saved = pullback.saved();
  give_dx(pullback, kVarBackward, flat_grad(pullback), saved[0], saved[1]);
}

// The type that sums of t are made in.
DType sum_type(DType t) {
  switch (t) {
    case DType::kBool:
    case DType::kI8:
    case DType::kI16: return DType::kI32;
    case DType::kU8:
    case DType::kU16: return DType::kU32;
    default: return t;
  }
}
DType float_type(DType t) { return is_float(t) ? t : DType::kF32; }

// y in the shape of the result.
Tensor finished(const Tensor& y, const Plan& plan) { return y.reshape(plan.result); }

Tensor summed(CommandEncoder& encoder, const Plan& plan) {
  const Tensor y = encoder.empty(plan.kept, plan.x.dtype());
  if (y.size() != 0) encoder.dispatch(kSum, y.dtype(), plan.args, {plan.x}, {y});
  return finished(y, plan);
}

Tensor extreme(CommandEncoder& encoder, const KernelHandle& handle, const Plan& plan) {
  const Tensor y = encoder.empty(plan.kept, plan.x.dtype());
  if (y.size() != 0) encoder.dispatch(handle, y.dtype(), plan.args, {plan.x}, {y});
  return finished(y, plan);
}

// y, and for the gradient the largest number and the sum of exponentials relative to it, [2, results].
std::pair<Tensor, Tensor> logsummed(CommandEncoder& encoder, const Plan& plan) {
  const Tensor y = encoder.empty(plan.kept, plan.x.dtype());
  const Tensor parts = encoder.empty({2, y.size()}, DType::kF32);
  if (y.size() != 0) encoder.dispatch(kLogsumexp, y.dtype(), plan.args, {plan.x}, {y, parts});
  return {finished(y, plan), parts};
}

// y and the means, [results].
std::pair<Tensor, Tensor> varied(CommandEncoder& encoder, const Plan& plan) {
  const Tensor y = encoder.empty(plan.kept, plan.x.dtype());
  const Tensor means = encoder.empty({y.size()}, DType::kF32);
  if (y.size() != 0) encoder.dispatch(kVar, y.dtype(), plan.args, {plan.x}, {y, means});
  return {finished(y, plan), means};
}

Plan sum_plan(CommandEncoder& encoder, const Tensor& x, const Axes& axes, bool keepdims) {
  require(reduce_check("sum", x, axes));
  return plan_of(encoder, cast(encoder, x, sum_type(x.dtype())), axes, keepdims);
}
Plan mean_plan(CommandEncoder& encoder, const Tensor& x, const Axes& axes, bool keepdims) {
  require(reduce_check("mean", x, axes));
  Plan plan = plan_of(encoder, cast(encoder, x, float_type(x.dtype())), axes, keepdims);
  plan.args.divisor = static_cast<double>(plan.args.count);
  return plan;
}
Plan float_plan(CommandEncoder& encoder, const char* op, const Tensor& x, const Axes& axes,
                bool keepdims) {
  require(reduce_check(op, x, axes));
  return plan_of(encoder, cast(encoder, x, float_type(x.dtype())), axes, keepdims);
}
Plan var_plan(CommandEncoder& encoder, const Tensor& x, const Axes& axes, bool keepdims,
              std::int64_t ddof) {
  Plan plan = float_plan(encoder, "var", x, axes, keepdims);
  plan.args.divisor =
      std::max(static_cast<double>(plan.args.count) - static_cast<double>(ddof), 0.0);
  return plan;
}

// The node of y from x. cast(tape, ...) has made x a float before.
Tensor recorded(Tape& tape, const char* name, BackwardFn backward, const Tensor& x, Tensor y,
                const Plan& plan, std::initializer_list<Tensor> kept) {
  tape.record(name, backward, {x}, {&y}, Saved(kept, reduced_of(plan, x.shape())));
  return y;
}

}  // namespace

Check reduce_check(const char* op, const Tensor& x, const Axes& axes) {
  std::array<bool, kMaxRank> seen{};
  for (const std::int64_t axis : axes.list) {
    const auto a = normal_axis(axis, x.rank());
    if (!a) {
      return wrong(op, Errc::kArgument,
                   "axes must be in [-" + std::to_string(x.rank()) + ", " +
                       std::to_string(x.rank()) + "), got " + std::to_string(axis));
    }
    if (std::exchange(seen[static_cast<std::size_t>(*a)], true)) {
      return wrong(op, Errc::kArgument, "each axis at most once, got " + to_string(axes.list));
    }
  }
  const std::string_view name = op;
  const bool of_floats = name == "max" || name == "min";
  if (of_floats ? !is_kernel_float(x.dtype()) : x.dtype() == DType::kF64) {
    return wrong(op, Errc::kDType,
                 std::string(of_floats ? "x must be f32, f16 or bf16, got "
                                       : "x must not be wider than f32, got ") +
                     name_of(x.dtype()));
  }
  if (name == "logsumexp" && x.size() == 0) {
    return wrong(op, Errc::kShape, "x must not be empty, got " + to_string(x.shape()));
  }
  if (of_floats) {
    const auto is_reduced = reduced(x.shape(), axes);
    std::int64_t count = 1, results = 1;
    for (std::int64_t i = 0; i < x.rank(); ++i) {
      (is_reduced[static_cast<std::size_t>(i)] ? count : results) *= x.dim(i);
    }
    if (count == 0 && results != 0) {
      return wrong(op, Errc::kShape,
                   "there must be something to reduce, got " + to_string(x.shape()));
    }
  }
  return std::nullopt;
}

Check sum_to_check(const Tensor& x, const Shape& shape) {
  const auto both = broadcast_shapes(x.shape(), shape);
  if (!both || !(*both == x.shape())) {
    return wrong("sum_to", Errc::kShape,
                 "the shape must broadcast to that of x " + to_string(x.shape()) + ", got " +
                     to_string(shape));
  }
  if (!is_kernel_float(x.dtype())) {
    return wrong("sum_to", Errc::kDType,
                 std::string("x must be f32, f16 or bf16, got ") + name_of(x.dtype()));
  }
  return std::nullopt;
}

Tensor sum(CommandEncoder& encoder, const Tensor& x, const Axes& axes, bool keepdims) {
  return summed(encoder, sum_plan(encoder, x, axes, keepdims));
}
Tensor mean(CommandEncoder& encoder, const Tensor& x, const Axes& axes, bool keepdims) {
  return summed(encoder, mean_plan(encoder, x, axes, keepdims));
}
Tensor max(CommandEncoder& encoder, const Tensor& x, const Axes& axes, bool keepdims) {
  return extreme(encoder, kMax, float_plan(encoder, "max", x, axes, keepdims));
}
Tensor min(CommandEncoder& encoder, const Tensor& x, const Axes& axes, bool keepdims) {
  return extreme(encoder, kMin, float_plan(encoder, "min", x, axes, keepdims));
}
Tensor logsumexp(CommandEncoder& encoder, const Tensor& x, const Axes& axes, bool keepdims) {
  return logsummed(encoder, float_plan(encoder, "logsumexp", x, axes, keepdims)).first;
}
Tensor var(CommandEncoder& encoder, const Tensor& x, const Axes& axes, bool keepdims,
           std::int64_t ddof) {
  return varied(encoder, var_plan(encoder, x, axes, keepdims, ddof)).first;
}

Tensor sum(Tape& tape, const Tensor& x, const Axes& axes, bool keepdims) {
  const Plan plan = sum_plan(tape.encoder(), x, axes, keepdims);
  Tensor y = summed(tape.encoder(), plan);
  if (!tape.wants({x})) return y;
  return recorded(tape, "sum", sum_backward, x, y, plan, {});
}
Tensor mean(Tape& tape, const Tensor& x, const Axes& axes, bool keepdims) {
  const Plan plan = mean_plan(tape.encoder(), x, axes, keepdims);
  Tensor y = summed(tape.encoder(), plan);
  if (!tape.wants({x})) return y;
  return recorded(tape, "mean", sum_backward, x, y, plan, {});
}
Tensor max(Tape& tape, const Tensor& x, const Axes& axes, bool keepdims) {
  const Plan plan = float_plan(tape.encoder(), "max", x, axes, keepdims);
  Tensor y = extreme(tape.encoder(), kMax, plan);
  if (!tape.wants({x})) return y;
  return recorded(tape, "max", extreme_backward, x, y, plan, {plan.x, y});
}
Tensor min(Tape& tape, const Tensor& x, const Axes& axes, bool keepdims) {
  const Plan plan = float_plan(tape.encoder(), "min", x, axes, keepdims);
  Tensor y = extreme(tape.encoder(), kMin, plan);
  if (!tape.wants({x})) return y;
  return recorded(tape, "min", extreme_backward, x, y, plan, {plan.x, y});
}
Tensor logsumexp(Tape& tape, const Tensor& x, const Axes& axes, bool keepdims) {
  const Plan plan = float_plan(tape.encoder(), "logsumexp", x, axes, keepdims);
  auto [y, parts] = logsummed(tape.encoder(), plan);
  if (!tape.wants({x})) return y;
  return recorded(tape, "logsumexp", logsumexp_backward, x, y, plan, {plan.x, parts});
}
Tensor var(Tape& tape, const Tensor& x, const Axes& axes, bool keepdims, std::int64_t ddof) {
  const Plan plan = var_plan(tape.encoder(), x, axes, keepdims, ddof);
  auto [y, means] = varied(tape.encoder(), plan);
  if (!tape.wants({x})) return y;
  return recorded(tape, "var", var_backward, x, y, plan, {plan.x, means});
}

Tensor sum_to(CommandEncoder& encoder, Tensor x, const Shape& shape) {
  if (x.shape() == shape) return x;
  require(sum_to_check(x, shape));
  const std::int64_t extra = x.rank() - shape.rank();
  Axes axes;
  axes.all = false;
  for (std::int64_t i = 0; i < x.rank(); ++i) {
    if (i < extra || shape[i - extra] != x.dim(i)) axes.list.push_back(i);
  }
  return sum(encoder, x, axes, true).reshape(shape);
}

}  // namespace mlxtape::ops
