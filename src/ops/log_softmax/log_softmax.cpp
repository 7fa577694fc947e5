#include "mlxtape/ops/log_softmax.h"

#include "log_softmax_args.h"

namespace mlxtape::ops {

namespace {

constinit const KernelHandle kForward("log_softmax_fwd");
constinit const KernelHandle kBackward("log_softmax_bwd");

Error wrong(Errc code, const std::string& what) { return {code, "log_softmax: " + what}; }

LogSoftmaxArgs args_of(const Shape& shape, std::int64_t axis) {
  const std::int64_t a = *normal_axis(axis, shape.rank());
  LogSoftmaxArgs args{1, shape[a], 1};
  for (std::int64_t i = 0; i < a; ++i) args.outer *= shape[i];
  for (std::int64_t i = a + 1; i < shape.rank(); ++i) args.inner *= shape[i];
  return args;
}

}  // namespace

Check log_softmax_check(const Tensor& x, std::int64_t axis) {
  if (x.rank() < 1) return wrong(Errc::kShape, "x must have at least one axis, got []");
  if (!normal_axis(axis, x.rank())) {
    return wrong(Errc::kArgument, "axis must be in [-" + std::to_string(x.rank()) + ", " +
                                      std::to_string(x.rank()) + "), got " + std::to_string(axis));
  }
  if (!is_kernel_float(x.dtype())) {
    return wrong(Errc::kDType,
                 std::string("x must be f32, f16 or bf16, got ") + name_of(x.dtype()));
  }
  return std::nullopt;
}

Check log_softmax_backward_check(const Tensor& y, const Tensor& dy, std::int64_t axis) {
  if (const Check check = log_softmax_check(y, axis)) return check;
  if (!(dy.shape() == y.shape())) {
    return wrong(Errc::kShape, "dy must have the shape of y " + to_string(y.shape()) + ", got " +
                                   to_string(dy.shape()));
  }
  if (dy.dtype() != y.dtype()) {
    return wrong(Errc::kDType, std::string("dy must have the type of y ") + name_of(y.dtype()) +
                                   ", got " + name_of(dy.dtype()));
  }
  if (dy.backend() != y.backend()) {
    return wrong(Errc::kDevice, std::string("dy must be where y is (") + name_of(y.backend()) +
                                    "), got " + name_of(dy.backend()));
  }
  return std::nullopt;
}

Tensor log_softmax(CommandEncoder& encoder, const Tensor& x, std::int64_t axis) {
  require(log_softmax_check(x, axis));
  const Tensor rows = encoder.contiguous(x);
  Tensor y = encoder.empty_like(x);
  if (y.size() != 0) encoder.dispatch(kForward, x.dtype(), args_of(x.shape(), axis), {rows}, {y});
  return y;
}

Tensor log_softmax_backward(CommandEncoder& encoder, const Tensor& y, const Tensor& dy,
                            std::int64_t axis) {
  require(log_softmax_backward_check(y, dy, axis));
  const Tensor y_rows = encoder.contiguous(y);
  const Tensor dy_rows = encoder.contiguous(dy);
  Tensor dx = encoder.empty_like(y);
  if (dx.size() != 0) {
    encoder.dispatch(kBackward, y.dtype(), args_of(y.shape(), axis), {y_rows, dy_rows}, {dx});
  }
  return dx;
}

namespace {

void log_softmax_pullback(Pullback& pullback) {
  pullback.give(0, log_softmax_backward(pullback.encoder(), pullback.saved()[0], pullback.grad(),
                                        pullback.saved().args<std::int64_t>()));
}

}  // namespace

Tensor log_softmax(Tape& tape, const Tensor& x, std::int64_t axis) {
  Tensor y = log_softmax(tape.encoder(), x, axis);
  if (tape.wants({x}))
    tape.record("log_softmax", log_softmax_pullback, {x}, {&y}, Saved({y}, axis));
  return y;
}

}  // namespace mlxtape::ops
