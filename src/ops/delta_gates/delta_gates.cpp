#include "mlxtape/ops/delta_gates.h"

#include <string>

#include "delta_gates_args.h"
#include "mlxtape/ops/elementwise.h"
#include "mlxtape/ops/reduce.h"
#include "ops/expect.h"

namespace mlxtape::ops {

namespace {

constinit const KernelHandle kForward("delta_gates_fwd");
constinit const KernelHandle kBackward("delta_gates_bwd");

Error wrong(Errc code, const std::string& what) { return {code, "delta_gates: " + what}; }

Check expect_tensor(const Tensor& a, const char* name, const Tensor& t, const Shape& shape,
                    DType dtype) {
  return ops::expect_tensor(Beside{"delta_gates", "a", a}, name, t, shape, dtype);
}

// A_log and dt_bias: of any type that the kernels know.
Check expect_of_heads(const Tensor& a, const char* name, const Tensor& t) {
  if (!is_kernel_float(t.dtype())) {
    return wrong(Errc::kDType,
                 std::string(name) + " must be f32, f16 or bf16, got " + name_of(t.dtype()));
  }
  return expect_tensor(a, name, t, {a.shape().back()}, t.dtype());
}

DeltaGatesArgs args_of(const Tensor& a) {
  const std::int64_t heads = a.shape().back();
  return {heads == 0 ? 0 : a.size() / heads, heads};
}

// Inputs as the kernels take them.
struct Dense {
  Tensor a, b, a_log, dt_bias;

  Dense(CommandEncoder& encoder, const DeltaGatesInputs& in)
      : a(encoder.contiguous(in.a)),
        b(encoder.contiguous(in.b)),
        a_log(encoder.contiguous(cast(encoder, in.a_log, DType::kF32))),
        dt_bias(encoder.contiguous(cast(encoder, in.dt_bias, DType::kF32))) {}
};

void delta_gates_pullback(Pullback& pullback) {
  const Saved& saved = pullback.saved();
  const DeltaGatesGradients grads =
      delta_gates_backward(pullback.encoder(), {saved[0], saved[1], saved[2], saved[3]},
                           pullback.has_grad(0) ? pullback.grad(0) : Tensor(),
                           pullback.has_grad(1) ? pullback.grad(1) : Tensor());
  pullback.give(0, grads.da);
  pullback.give(1, grads.db);
  pullback.give(2, grads.d_a_log);
  pullback.give(3, grads.d_dt_bias);
}

}  // namespace

Check delta_gates_check(const DeltaGatesInputs& in) {
  if (!in.a.defined() || in.a.rank() == 0) {
    return wrong(Errc::kShape, "a must have an axis of heads");
  }
  if (!is_kernel_float(in.a.dtype())) {
    return wrong(Errc::kDType,
                 std::string("a must be f32, f16 or bf16, got ") + name_of(in.a.dtype()));
  }
  if (const Check check = expect_tensor(in.a, "b", in.b, in.a.shape(), in.a.dtype())) return check;
  if (const Check check = expect_of_heads(in.a, "A_log", in.a_log)) return check;
  return expect_of_heads(in.a, "dt_bias", in.dt_bias);
}

Check delta_gates_backward_check(const DeltaGatesInputs& in, const Tensor& d_decay,
                                 const Tensor& d_beta) {
  if (const Check check = delta_gates_check(in)) return check;
  for (const auto& [name, t] : {std::pair{"d_decay", &d_decay}, {"d_beta", &d_beta}}) {
    if (!t->defined()) continue;
    if (const Check check = expect_tensor(in.a, name, *t, in.a.shape(), DType::kF32)) return check;
  }
  return std::nullopt;
}

DeltaGates delta_gates(CommandEncoder& encoder, const DeltaGatesInputs& in) {
  require(delta_gates_check(in));
  DeltaGates gates{encoder.empty(in.a.shape(), DType::kF32),
                   encoder.empty(in.a.shape(), DType::kF32)};
  if (in.a.size() == 0) return gates;
  const Dense dense(encoder, in);
  encoder.dispatch(kForward, in.a.dtype(), args_of(in.a),
                   {dense.a, dense.b, dense.a_log, dense.dt_bias}, {gates.decay, gates.beta});
  return gates;
}

DeltaGatesGradients delta_gates_backward(CommandEncoder& encoder, const DeltaGatesInputs& in,
                                         const Tensor& d_decay, const Tensor& d_beta) {
  require(delta_gates_backward_check(in, d_decay, d_beta));
  DeltaGatesGradients grads{
      encoder.empty(in.a.shape(), in.a.dtype()), encoder.empty(in.a.shape(), in.a.dtype()), {}, {}};
  const DeltaGatesArgs args = args_of(in.a);
  const Tensor rates = encoder.empty({args.tokens, args.heads}, DType::kF32);
  const Tensor shifts = encoder.empty({args.tokens, args.heads}, DType::kF32);
  if (in.a.size() != 0) {
    const Dense dense(encoder, in);
    const auto given = [&](const Tensor& t) {
      return t.defined() ? encoder.contiguous(t) : t;
    };
    const Tensor decay = given(d_decay), beta = given(d_beta);
    encoder.dispatch(kBackward, in.a.dtype(), args,
                     {dense.a, dense.b, dense.a_log, dense.dt_bias, decay, beta},
                     {grads.da, grads.db, rates, shifts});
  }
  grads.d_a_log = cast(encoder, sum(encoder, rates, {0}), in.a_log.dtype());
  grads.d_dt_bias = cast(encoder, sum(encoder, shifts, {0}), in.dt_bias.dtype());
  return grads;
}

DeltaGates delta_gates(Tape& tape, const DeltaGatesInputs& in) {
  DeltaGates gates = delta_gates(tape.encoder(), in);
  if (tape.wants({in.a, in.b, in.a_log, in.dt_bias})) {
    tape.record("delta_gates", delta_gates_pullback, {in.a, in.b, in.a_log, in.dt_bias},
                {&gates.decay, &gates.beta}, Saved({in.a, in.b, in.a_log, in.dt_bias}));
  }
  return gates;
}

}  // namespace mlxtape::ops
