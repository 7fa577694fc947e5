#include "mlxtape/ops/dampen.h"

#include "dampen_args.h"

namespace mlxtape::ops {

namespace {

constinit const KernelHandle kForward("dampen_fwd");
constinit const KernelHandle kBackward("dampen_bwd");

Error wrong(Errc code, const std::string& what) { return {code, "dampen: " + what}; }

// One number per row, f32, beside x.
Check check_per_row(const Tensor& x, const Tensor& t, const std::string& name) {
  if (!(t.shape() == Shape{x.dim(0)})) {
    return wrong(Errc::kShape, name + " must be [R] = [" + std::to_string(x.dim(0)) + "], got " +
                                   to_string(t.shape()));
  }
  if (t.dtype() != DType::kF32) {
    return wrong(Errc::kDType, name + " must be f32, got " + name_of(t.dtype()));
  }
  if (t.backend() != x.backend()) {
    return wrong(Errc::kDevice, name + " must be where x is (" + name_of(x.backend()) + "), got " +
                                    name_of(t.backend()));
  }
  return std::nullopt;
}

}  // namespace

Check dampen_check(const Tensor& x, const Tensor& gain) {
  if (x.rank() != 2) {
    return wrong(Errc::kShape, "x must be [R, C], got " + to_string(x.shape()));
  }
  if (x.dim(1) < 1) {
    return wrong(Errc::kShape, "x must have a column, got " + to_string(x.shape()));
  }
  if (!is_kernel_float(x.dtype())) {
    return wrong(Errc::kDType,
                 std::string("x must be f32, f16 or bf16, got ") + name_of(x.dtype()));
  }
  return check_per_row(x, gain, "gain");
}

Check dampen_backward_check(const Tensor& x, const Tensor& gain, const Tensor& m,
                            const Tensor& dy) {
  if (const Check check = dampen_check(x, gain)) return check;
  if (const Check check = check_per_row(x, m, "m")) return check;
  if (!(dy.shape() == x.shape())) {
    return wrong(Errc::kShape, "dy must have the shape of x " + to_string(x.shape()) + ", got " +
                                   to_string(dy.shape()));
  }
  if (dy.dtype() != x.dtype()) {
    return wrong(Errc::kDType, std::string("dy must have the type of x ") + name_of(x.dtype()) +
                                   ", got " + name_of(dy.dtype()));
  }
  if (dy.backend() != x.backend()) {
    return wrong(Errc::kDevice, std::string("dy must be where x is (") + name_of(x.backend()) +
                                    "), got " + name_of(dy.backend()));
  }
  return std::nullopt;
}

Dampened dampen(CommandEncoder& encoder, const Tensor& x, const Tensor& gain) {
  require(dampen_check(x, gain));
  const DampenArgs args{x.dim(0), x.dim(1)};
  const Tensor x_rows = encoder.contiguous(x);
  const Tensor gains = encoder.contiguous(gain);
  Dampened out{encoder.empty_like(x), encoder.empty_like(gain)};
  if (args.rows != 0) {
    encoder.dispatch(kForward, x.dtype(), args, {x_rows, gains}, {out.y, out.m});
  }
  return out;
}

DampenGradients dampen_backward(CommandEncoder& encoder, const Tensor& x, const Tensor& gain,
                                const Tensor& m, const Tensor& dy) {
  require(dampen_backward_check(x, gain, m, dy));
  const DampenArgs args{x.dim(0), x.dim(1)};
  const Tensor x_rows = encoder.contiguous(x);
  const Tensor gains = encoder.contiguous(gain);
  const Tensor means = encoder.contiguous(m);
  const Tensor dy_rows = encoder.contiguous(dy);
  DampenGradients out{encoder.empty_like(x), encoder.empty_like(gain)};
  if (args.rows != 0) {
    encoder.dispatch(kBackward, x.dtype(), args, {x_rows, gains, means, dy_rows},
                     {out.dx, out.dgain});
  }
  return out;
}

}  // namespace mlxtape::ops
