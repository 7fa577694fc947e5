#include "mlxtape/ops/rms_norm.h"

#include <cmath>

#include "rms_norm_args.h"

namespace mlxtape::ops {

namespace {

constinit const KernelHandle kForward("rms_norm_fwd");
constinit const KernelHandle kBackward("rms_norm_bwd");
constinit const KernelHandle kResidualForward("rms_norm_residual_fwd");
constinit const KernelHandle kResidualBackward("rms_norm_residual_bwd");
constinit const KernelHandle kGatedForward("rms_norm_gated_fwd");
constinit const KernelHandle kGatedBackward("rms_norm_gated_bwd");

Error wrong(Errc code, const std::string& what) { return {code, "rms_norm: " + what}; }

Shape row_shape(const Tensor& x) { return {x.shape().begin(), x.shape().end() - 1}; }

RmsNormArgs args_of(const Tensor& x, const Tensor& w, float eps = 0) {
  const std::int64_t cols = x.shape().back();
  RmsNormArgs args{1, cols, eps, kRmsNormNoWeight, static_cast<float>(cols), 0};
  for (const std::int64_t n : row_shape(x)) args.rows *= n;
  if (w.defined()) args.weight = w.dtype() == x.dtype() ? kRmsNormWeightLikeX : kRmsNormWeightF32;
  return args;
}

RmsNormArgs l2_args_of(const Tensor& x, float eps = 0) {
  RmsNormArgs args = args_of(x, Tensor(), eps);
  args.divisor = 1;
  return args;
}

// The gradient of w: nothing where w is nothing.
Tensor gradient_of(CommandEncoder& encoder, const Tensor& w) {
  return w.defined() ? encoder.empty_like(w) : Tensor();
}

Check check_device(const char* name, const Tensor& t, const Tensor& x) {
  if (t.backend() == x.backend()) return std::nullopt;
  return wrong(Errc::kDevice, std::string(name) + " must be where x is (" + name_of(x.backend()) +
                                  "), got " + name_of(t.backend()));
}

// x (or h) and w: what every form asks of them.
Check check_input(const Tensor& x, const Tensor& w) {
  if (x.rank() < 1) return wrong(Errc::kShape, "x must have at least one axis, got []");
  if (x.shape().back() < 1) {
    return wrong(Errc::kShape, "the last axis of x must not be empty, got " + to_string(x.shape()));
  }
  if (!is_kernel_float(x.dtype())) {
    return wrong(Errc::kDType,
                 std::string("x must be f32, f16 or bf16, got ") + name_of(x.dtype()));
  }
  if (!w.defined()) return std::nullopt;
  if (!(w.shape() == Shape{x.shape().back()})) {
    return wrong(Errc::kShape, "w must be [D] = [" + std::to_string(x.shape().back()) + "], got " +
                                   to_string(w.shape()));
  }
  if (w.dtype() != x.dtype() && w.dtype() != DType::kF32) {
    return wrong(Errc::kDType, std::string("w must have the type of x ") + name_of(x.dtype()) +
                                   ", or f32, got " + name_of(w.dtype()));
  }
  return check_device("w", w, x);
}

Check check_like(const char* name, const Tensor& t, const Tensor& x) {
  if (!(t.shape() == x.shape())) {
    return wrong(Errc::kShape, std::string(name) + " must have the shape of x " +
                                   to_string(x.shape()) + ", got " + to_string(t.shape()));
  }
  if (t.dtype() != x.dtype()) {
    return wrong(Errc::kDType, std::string(name) + " must have the type of x " +
                                   name_of(x.dtype()) + ", got " + name_of(t.dtype()));
  }
  return check_device(name, t, x);
}

Check check_r(const Tensor& r, const Tensor& x) {
  if (!(r.shape() == row_shape(x))) {
    return wrong(Errc::kShape, "r must have the shape of x without its last axis, " +
                                   to_string(row_shape(x)) + ", got " + to_string(r.shape()));
  }
  if (r.dtype() != DType::kF32) {
    return wrong(Errc::kDType, std::string("r must be f32, got ") + name_of(r.dtype()));
  }
  return check_device("r", r, x);
}

}  // namespace

Check rms_norm_check(const Tensor& x, const Tensor& w, float eps) {
  if (const Check check = check_input(x, w)) return check;
  if (!(eps >= 0 && std::isfinite(eps))) {
    return wrong(Errc::kArgument, "eps must be finite and at least 0, got " + std::to_string(eps));
  }
  return std::nullopt;
}

Check rms_norm_backward_check(const Tensor& x, const Tensor& w, const Tensor& r, const Tensor& dy) {
  if (const Check check = check_input(x, w)) return check;
  if (const Check check = check_r(r, x)) return check;
  return check_like("dy", dy, x);
}

Check rms_norm_residual_check(const Tensor& x, const Tensor& residual, const Tensor& w, float eps) {
  if (const Check check = rms_norm_check(x, w, eps)) return check;
  return check_like("residual", residual, x);
}

Check rms_norm_residual_backward_check(const Tensor& h, const Tensor& w, const Tensor& r,
                                       const Tensor& dy, const Tensor& dh_in) {
  if (const Check check = rms_norm_backward_check(h, w, r, dy)) return check;
  return dh_in.defined() ? check_like("dh_in", dh_in, h) : std::nullopt;
}

Check rms_norm_gated_check(const Tensor& x, const Tensor& w, const Tensor& g, float eps) {
  if (const Check check = rms_norm_check(x, w, eps)) return check;
  return check_like("g", g, x);
}

Check rms_norm_gated_backward_check(const Tensor& x, const Tensor& w, const Tensor& g,
                                    const Tensor& r, const Tensor& dy) {
  if (const Check check = rms_norm_backward_check(x, w, r, dy)) return check;
  return check_like("g", g, x);
}

RmsNorm rms_norm(CommandEncoder& encoder, const Tensor& x, const Tensor& w, float eps) {
  require(rms_norm_check(x, w, eps));
  const Tensor x_rows = encoder.contiguous(x);
  const Tensor weight = encoder.contiguous(w);
  RmsNorm out{encoder.empty_like(x), encoder.empty(row_shape(x), DType::kF32)};
  encoder.dispatch(kForward, x.dtype(), args_of(x, w, eps), {x_rows, weight}, {out.y, out.r});
  return out;
}

RmsNormGrads rms_norm_backward(CommandEncoder& encoder, const Tensor& x, const Tensor& w,
                               const Tensor& r, const Tensor& dy) {
  require(rms_norm_backward_check(x, w, r, dy));
  const Tensor x_rows = encoder.contiguous(x);
  const Tensor weight = encoder.contiguous(w);
  const Tensor r_rows = encoder.contiguous(r);
  const Tensor dy_rows = encoder.contiguous(dy);
  RmsNormGrads out{encoder.empty_like(x), gradient_of(encoder, w)};
  encoder.dispatch(kBackward, x.dtype(), args_of(x, w), {x_rows, weight, r_rows, dy_rows},
                   {out.dx, out.dw});
  return out;
}

RmsNormResidual rms_norm_residual(CommandEncoder& encoder, const Tensor& x, const Tensor& residual,
                                  const Tensor& w, float eps) {
  require(rms_norm_residual_check(x, residual, w, eps));
  const Tensor x_rows = encoder.contiguous(x);
  const Tensor residual_rows = encoder.contiguous(residual);
  const Tensor weight = encoder.contiguous(w);
  RmsNormResidual out{encoder.empty_like(x), encoder.empty_like(x),
                      encoder.empty(row_shape(x), DType::kF32)};
  encoder.dispatch(kResidualForward, x.dtype(), args_of(x, w, eps), {x_rows, weight, residual_rows},
                   {out.y, out.h, out.r});
  return out;
}

RmsNormResidualGrads rms_norm_residual_backward(CommandEncoder& encoder, const Tensor& h,
                                                const Tensor& w, const Tensor& r, const Tensor& dy,
                                                const Tensor& dh_in) {
  require(rms_norm_residual_backward_check(h, w, r, dy, dh_in));
  const Tensor h_rows = encoder.contiguous(h);
  const Tensor weight = encoder.contiguous(w);
  const Tensor r_rows = encoder.contiguous(r);
  const Tensor dy_rows = encoder.contiguous(dy);
  RmsNormResidualGrads out{encoder.empty_like(h), gradient_of(encoder, w)};
  if (!dh_in.defined()) {
    encoder.dispatch(kBackward, h.dtype(), args_of(h, w), {h_rows, weight, r_rows, dy_rows},
                     {out.dh, out.dw});
    return out;
  }
  const Tensor dh_rows = encoder.contiguous(dh_in);
  encoder.dispatch(kResidualBackward, h.dtype(), args_of(h, w),
                   {h_rows, weight, r_rows, dy_rows, dh_rows}, {out.dh, out.dw});
  return out;
}

RmsNorm rms_norm_gated(CommandEncoder& encoder, const Tensor& x, const Tensor& w, const Tensor& g,
                       float eps) {
  require(rms_norm_gated_check(x, w, g, eps));
  const Tensor x_rows = encoder.contiguous(x);
  const Tensor weight = encoder.contiguous(w);
  const Tensor g_rows = encoder.contiguous(g);
  RmsNorm out{encoder.empty_like(x), encoder.empty(row_shape(x), DType::kF32)};
  encoder.dispatch(kGatedForward, x.dtype(), args_of(x, w, eps), {x_rows, weight, g_rows},
                   {out.y, out.r});
  return out;
}

RmsNormGatedGrads rms_norm_gated_backward(CommandEncoder& encoder, const Tensor& x, const Tensor& w,
                                          const Tensor& g, const Tensor& r, const Tensor& dy) {
  require(rms_norm_gated_backward_check(x, w, g, r, dy));
  const Tensor x_rows = encoder.contiguous(x);
  const Tensor weight = encoder.contiguous(w);
  const Tensor g_rows = encoder.contiguous(g);
  const Tensor r_rows = encoder.contiguous(r);
  const Tensor dy_rows = encoder.contiguous(dy);
  RmsNormGatedGrads out{encoder.empty_like(x), gradient_of(encoder, w), encoder.empty_like(g)};
  encoder.dispatch(kGatedBackward, x.dtype(), args_of(x, w),
                   {x_rows, weight, r_rows, dy_rows, g_rows}, {out.dx, out.dw, out.dg});
  return out;
}

RmsNorm l2_norm(CommandEncoder& encoder, const Tensor& x, float eps) {
  require(rms_norm_check(x, Tensor(), eps));
  const Tensor x_rows = encoder.contiguous(x);
  const Tensor no_w;
  RmsNorm out{encoder.empty_like(x), encoder.empty(row_shape(x), DType::kF32)};
  encoder.dispatch(kForward, x.dtype(), l2_args_of(x, eps), {x_rows, no_w}, {out.y, out.r});
  return out;
}

Tensor l2_norm_backward(CommandEncoder& encoder, const Tensor& x, const Tensor& r,
                        const Tensor& dy) {
  require(rms_norm_backward_check(x, Tensor(), r, dy));
  const Tensor x_rows = encoder.contiguous(x);
  const Tensor r_rows = encoder.contiguous(r);
  const Tensor dy_rows = encoder.contiguous(dy);
  const Tensor no_w;
  Tensor dx = encoder.empty_like(x);
  encoder.dispatch(kBackward, x.dtype(), l2_args_of(x), {x_rows, no_w, r_rows, dy_rows},
                   {dx, no_w});
  return dx;
}

// ---- on a tape ----

namespace {

void rms_norm_pullback(Pullback& pullback) {
  const Saved& saved = pullback.saved();  // x, w, r
  const RmsNormGrads grads =
      rms_norm_backward(pullback.encoder(), saved[0], saved[1], saved[2], pullback.grad());
  pullback.give(0, grads.dx);
  pullback.give(1, grads.dw);
}

void residual_pullback(Pullback& pullback) {
  const Saved& saved = pullback.saved();  // h, w, r
  CommandEncoder& encoder = pullback.encoder();
  if (!pullback.has_grad(0)) {  // h alone was used: a plain sum
    const Tensor dh = pullback.take_grad(1);
    pullback.give(0, dh);
    pullback.give(1, dh);
    pullback.give_none(2);
    return;
  }
  const RmsNormResidualGrads grads =
      rms_norm_residual_backward(encoder, saved[0], saved[1], saved[2], pullback.grad(0),
                                 pullback.has_grad(1) ? pullback.grad(1) : Tensor());
  pullback.give(0, grads.dh);
  pullback.give(1, grads.dh);
  pullback.give(2, grads.dw);
}

void gated_pullback(Pullback& pullback) {
  const Saved& saved = pullback.saved();  // x, w, g, r
  const RmsNormGatedGrads grads = rms_norm_gated_backward(pullback.encoder(), saved[0], saved[1],
                                                          saved[2], saved[3], pullback.grad());
  pullback.give(0, grads.dx);
  pullback.give(1, grads.dw);
  pullback.give(2, grads.dg);
}

void l2_pullback(Pullback& pullback) {
  const Saved& saved = pullback.saved();  // x, r
  pullback.give(0, l2_norm_backward(pullback.encoder(), saved[0], saved[1], pullback.grad()));
}

}  // namespace

Tensor rms_norm(Tape& tape, const Tensor& x, const Tensor& w, float eps) {
  RmsNorm out = rms_norm(tape.encoder(), x, w, eps);
  if (tape.wants({x, w})) {
    tape.record("rms_norm", rms_norm_pullback, {x, w}, {&out.y}, Saved({x, w, out.r}));
  }
  return out.y;
}

RmsNormResidual rms_norm_residual(Tape& tape, const Tensor& x, const Tensor& residual,
                                  const Tensor& w, float eps) {
  RmsNormResidual out = rms_norm_residual(tape.encoder(), x, residual, w, eps);
  if (tape.wants({x, residual, w})) {
    tape.record("rms_norm_residual", residual_pullback, {x, residual, w}, {&out.y, &out.h},
                Saved({out.h, w, out.r}));
  }
  out.r = Tensor();
  return out;
}

Tensor rms_norm_gated(Tape& tape, const Tensor& x, const Tensor& w, const Tensor& g, float eps) {
  RmsNorm out = rms_norm_gated(tape.encoder(), x, w, g, eps);
  if (tape.wants({x, w, g})) {
    tape.record("rms_norm_gated", gated_pullback, {x, w, g}, {&out.y}, Saved({x, w, g, out.r}));
  }
  return out.y;
}

Tensor l2_norm(Tape& tape, const Tensor& x, float eps) {
  RmsNorm out = l2_norm(tape.encoder(), x, eps);
  if (tape.wants({x})) tape.record("l2_norm", l2_pullback, {x}, {&out.y}, Saved({x, out.r}));
  return out.y;
}

}  // namespace mlxtape::ops
