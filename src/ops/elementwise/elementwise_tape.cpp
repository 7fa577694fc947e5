// The elementwise family on a tape: what each function saves, and its gradient from that.
#include <array>
#include <string_view>

#include "elementwise_run.h"
#include "mlxtape/base/error.h"
#include "mlxtape/core/reuse.h"
#include "mlxtape/ops/elementwise.h"
#include "mlxtape/ops/reduce.h"

namespace mlxtape::ops {

#include "ops/elementwise/formulas.h"  // the tables

using elementwise::Operand;
using elementwise::run_into;

namespace {

// ---- of one tensor ----

void unary_backward(Pullback& pullback, const KernelHandle& handle) {
  const Tensor dy = pullback.take_grad();
  const Tensor& kept = pullback.saved()[0];
  pullback.give(0, run_into(pullback.encoder(), handle, dy.dtype(), dy.shape(), {dy, kept}, dy));
}

void negative_backward(Pullback& pullback) {
  pullback.give(0, negative(pullback.encoder(), pullback.take_grad()));
}

#define MT_BACKWARD(name)                                        \
  void name##_backward(Pullback& pullback) {                     \
    static constinit const KernelHandle kBackward(#name "_bwd"); \
    unary_backward(pullback, kBackward);                         \
  }
MT_BACKWARD(abs)
MT_BACKWARD(exp)
MT_BACKWARD(gelu)
MT_BACKWARD(gelu_tanh)
MT_BACKWARD(log)
MT_BACKWARD(log1p)
MT_BACKWARD(rsqrt)
MT_BACKWARD(sigmoid)
MT_BACKWARD(silu)
MT_BACKWARD(softplus)
MT_BACKWARD(sqrt)
MT_BACKWARD(square)
MT_BACKWARD(tanh)
#undef MT_BACKWARD

struct ClipSaved {
  double low, high;
};
void clip_backward(Pullback& pullback) {
  static constinit const KernelHandle kBackward("clip_bwd");
  const Tensor dy = pullback.take_grad();
  const auto& bounds = pullback.saved().args<ClipSaved>();
  pullback.give(0, run_into(pullback.encoder(), kBackward, dy.dtype(), dy.shape(),
                            {dy, pullback.saved()[0], bounds.low, bounds.high}, dy));
}

struct CastSaved {
  DType from;
};
void cast_backward(Pullback& pullback) {
  const DType from = pullback.saved().args<CastSaved>().from;
  pullback.give(0, cast(pullback.encoder(), pullback.take_grad(), from));
}

// ---- of two ----

// The operands of a recorded function: their shapes, and which are saved, in order, or a number.
struct PairSaved {
  std::array<Shape, 2> shape;
  std::array<bool, 2> is_saved;
  std::array<bool, 2> is_number;
  double number;

  Operand operand(const Saved& saved, std::size_t i) const {
    if (is_number[i]) return number;
    if (!is_saved[i]) return 0.0;  // its gradient does not ask for it
    return saved[i == 1 && is_saved[0] ? 1 : 0];
  }
};

// The gradient of operand i, reduced to its shape.
void give_reduced(Pullback& pullback, std::size_t i, Tensor gradient) {
  const auto& pair = pullback.saved().args<PairSaved>();
  // With a number there is one input.
  const std::size_t input = pair.is_number[0] ? 0 : i;
  pullback.give(input, sum_to(pullback.encoder(), std::move(gradient), pair.shape[i]));
}

bool needs_operand(const Pullback& pullback, std::size_t i) {
  const auto& pair = pullback.saved().args<PairSaved>();
  if (pair.is_number[i]) return false;
  return pullback.needs(pair.is_number[0] ? 0 : i);
}

// each(i, dy) makes the gradient of operand i; the last one that is needed may use dy's memory.
template <class Each>
void pair_backward(Pullback& pullback, const Each& each) {
  const bool second = needs_operand(pullback, 1);
  if (needs_operand(pullback, 0)) {
    give_reduced(pullback, 0, each(0, second ? pullback.grad() : pullback.take_grad()));
  }
  if (second) give_reduced(pullback, 1, each(1, pullback.take_grad()));
}

void add_backward(Pullback& pullback) {
  pair_backward(pullback, [](std::size_t, Tensor dy) { return dy; });
}

void subtract_backward(Pullback& pullback) {
  pair_backward(pullback, [&](std::size_t i, Tensor dy) {
    return i == 0 ? dy : negative(pullback.encoder(), std::move(dy));
  });
}

void multiply_backward(Pullback& pullback) {
  const auto& pair = pullback.saved().args<PairSaved>();
  pair_backward(pullback, [&](std::size_t i, Tensor dy) {
    const Operand other = pair.operand(pullback.saved(), 1 - i);
    return other.tensor == nullptr ? multiply(pullback.encoder(), std::move(dy), other.value)
                                   : multiply(pullback.encoder(), std::move(dy), *other.tensor);
  });
}

// By the kernels <name>_bwd_a and <name>_bwd_b of dy, a, b.
void binary_backward(Pullback& pullback, const std::array<const KernelHandle*, 2>& handles) {
  const auto& pair = pullback.saved().args<PairSaved>();
  pair_backward(pullback, [&](std::size_t i, const Tensor& dy) {
    return run_into(pullback.encoder(), *handles[i], dy.dtype(), dy.shape(),
                    {dy, pair.operand(pullback.saved(), 0), pair.operand(pullback.saved(), 1)}, dy);
  });
}

#define MT_BACKWARD(name, ...)                              \
  void name##_backward(Pullback& pullback) {                \
    static constinit const KernelHandle kA(#name "_bwd_a"); \
    static constinit const KernelHandle kB(#name "_bwd_b"); \
    binary_backward(pullback, {&kA, &kB});                  \
  }
MT_BINARY_FORMULAS(MT_BACKWARD)
#undef MT_BACKWARD

void swiglu_backward(Pullback& pullback) {
  static constinit const KernelHandle kBackward("swiglu_bwd");
  CommandEncoder& encoder = pullback.encoder();
  const Tensor dy = pullback.take_grad();
  const auto& saved = pullback.saved();
  const Tensor da = reuse_or_empty(encoder, dy, dy.shape(), dy.dtype());
  const Tensor db = encoder.empty_like(dy);
  elementwise::run(encoder, kBackward, dy.dtype(), dy.shape(), {dy, saved[0], saved[1]}, {da, db});
  if (pullback.needs(0)) give_reduced(pullback, 0, da);
  if (pullback.needs(1)) give_reduced(pullback, 1, db);
}

using TapeFn2 = Tensor (*)(CommandEncoder&, Tensor, const Tensor&);

bool holds(std::string_view needs, char operand) {
  return needs.find(operand) != std::string_view::npos;
}

// a_needs, b_needs: the operands that da and db are made from.
Tensor record_pair(Tape& tape, const char* name, BackwardFn backward, TapeFn2 forward,
                   const Tensor& a, const Tensor& b, std::string_view a_needs,
                   std::string_view b_needs) {
  require(binary_check(name, a, b));
  const DType dtype = promote(a.dtype(), b.dtype());
  const Tensor left = cast(tape, a, dtype);
  const Tensor right = cast(tape, b, dtype);
  Tensor y = forward(tape.encoder(), left, right);
  const bool wants_a = tape.wants({left});
  const bool wants_b = tape.wants({right});
  if (!wants_a && !wants_b) return y;
  const auto keeps = [&](char operand) {
    return (wants_a && holds(a_needs, operand)) || (wants_b && holds(b_needs, operand));
  };
  const PairSaved pair{{left.shape(), right.shape()}, {keeps('a'), keeps('b')}, {}, 0};
  Saved saved = keeps('a')   ? keeps('b') ? Saved({left, right}, pair) : Saved({left}, pair)
                  : keeps('b') ? Saved({right}, pair)
                             : Saved({}, pair);
  tape.record(name, backward, {left, right}, {&y}, std::move(saved));
  return y;
}

// y of a tensor and a number; i: which of the two operands the tensor is.
Tensor record_number(Tape& tape, const char* name, BackwardFn backward, Tensor y, const Tensor& x,
                     std::size_t i, double number, std::string_view needs) {
  if (!tape.wants({x})) return y;
  PairSaved pair{{x.shape(), x.shape()}, {}, {}, 0};
  pair.is_number[1 - i] = true;
  visit(x.dtype(), [&](auto stored) {
    convert(&number, DType::kF64, &stored, x.dtype(), 1);
    convert(&stored, x.dtype(), &pair.number, DType::kF64, 1);
  });
  pair.is_saved[i] = holds(needs, i == 0 ? 'a' : 'b');
  tape.record(name, backward, {x}, {&y}, pair.is_saved[i] ? Saved({x}, pair) : Saved({}, pair));
  return y;
}

// ---- where ----

struct WhereSaved {
  std::array<Shape, 2> shape;
};
void where_backward(Pullback& pullback) {
  static constinit const KernelHandle kWhere("where_fwd");
  CommandEncoder& encoder = pullback.encoder();
  const Tensor& condition = pullback.saved()[0];
  const auto& shapes = pullback.saved().args<WhereSaved>().shape;
  const std::size_t size = size_of(pullback.grad().dtype());
  const DType bits = size == 8 ? DType::kU64 : size == 4 ? DType::kU32 : DType::kU16;
  const auto side = [&](bool first, const Tensor& g) {
    const Tensor d = reuse_or_empty(encoder, g, g.shape(), g.dtype());
    if (first) {
      elementwise::run(encoder, kWhere, bits, g.shape(), {condition, g, 0.0}, {d});
    } else {
      elementwise::run(encoder, kWhere, bits, g.shape(), {condition, 0.0, g}, {d});
    }
    return d;
  };
  const bool second = pullback.needs(1);
  if (pullback.needs(0)) {
    const Tensor dy = second ? pullback.grad() : pullback.take_grad();
    pullback.give(0, sum_to(encoder, side(true, dy), shapes[0]));
  }
  if (second) pullback.give(1, sum_to(encoder, side(false, pullback.take_grad()), shapes[1]));
}

}  // namespace

#define MT_DEFINE(name, kept, value, pull)          \
  Tensor name(Tape& tape, const Tensor& x) {        \
    Tensor y = name(tape.encoder(), x);             \
    if (!tape.wants({x})) return y;                 \
    constexpr char kKeeps = name##_formula::kKeeps; \
    tape.record(#name, name##_backward, {x}, {&y},  \
                kKeeps == 'x'   ? Saved({x})        \
                : kKeeps == 'y' ? Saved({y})        \
                                : Saved());         \
    return y;                                       \
  }
MT_UNARY_FORMULAS(MT_DEFINE)
#undef MT_DEFINE

#define MT_DEFINE_PAIR(name, a_needs, b_needs)                                              \
  Tensor name(Tape& tape, const Tensor& a, const Tensor& b) {                               \
    return record_pair(tape, #name, name##_backward, name, a, b, a_needs, b_needs);         \
  }                                                                                         \
  Tensor name(Tape& tape, const Tensor& a, double b) {                                      \
    return record_number(tape, #name, name##_backward, name(tape.encoder(), a, b), a, 0, b, \
                         a_needs);                                                          \
  }                                                                                         \
  Tensor name(Tape& tape, double a, const Tensor& b) {                                      \
    return record_number(tape, #name, name##_backward, name(tape.encoder(), a, b), b, 1, a, \
                         b_needs);                                                          \
  }
MT_DEFINE_PAIR(add, "", "")
MT_DEFINE_PAIR(subtract, "", "")
MT_DEFINE_PAIR(multiply, "b", "a")
#define MT_DEFINE(name, value, a_needs, da, b_needs, db) MT_DEFINE_PAIR(name, #a_needs, #b_needs)
MT_BINARY_FORMULAS(MT_DEFINE)
#undef MT_DEFINE
#undef MT_DEFINE_PAIR

Tensor swiglu(Tape& tape, const Tensor& a, const Tensor& b) {
  return record_pair(tape, "swiglu", swiglu_backward, swiglu, a, b, "ab", "ab");
}

Tensor clip(Tape& tape, const Tensor& x, double low, double high) {
  Tensor y = clip(tape.encoder(), x, low, high);
  if (!tape.wants({x})) return y;
  const auto rounded = [&](double number) {
    double result = 0;
    visit(x.dtype(), [&](auto stored) {
      convert(&number, DType::kF64, &stored, x.dtype(), 1);
      convert(&stored, x.dtype(), &result, DType::kF64, 1);
    });
    return result;
  };
  tape.record("clip", clip_backward, {x}, {&y}, Saved({x}, ClipSaved{rounded(low), rounded(high)}));
  return y;
}

Tensor cast(Tape& tape, const Tensor& x, DType dtype) {
  if (x.dtype() == dtype) return x;
  Tensor y = cast(tape.encoder(), x, dtype);
  if (!is_float(dtype) || !tape.wants({x})) return y;
  tape.record("cast", cast_backward, {x}, {&y}, Saved({}, CastSaved{x.dtype()}));
  return y;
}

Tensor where(Tape& tape, const Tensor& condition, const Tensor& a, const Tensor& b) {
  require(where_check(condition, a, b));
  const DType dtype = promote(a.dtype(), b.dtype());
  const Tensor chosen = cast(tape.encoder(), condition, DType::kBool);
  const Tensor left = cast(tape, a, dtype);
  const Tensor right = cast(tape, b, dtype);
  Tensor y = where(tape.encoder(), chosen, left, right);
  if (!tape.wants({left, right})) return y;
  tape.record("where", where_backward, {left, right}, {&y},
              Saved({chosen}, WhereSaved{{left.shape(), right.shape()}}));
  return y;
}

}  // namespace mlxtape::ops
