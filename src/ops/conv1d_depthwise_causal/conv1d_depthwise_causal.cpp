#include "mlxtape/ops/conv1d_depthwise_causal.h"

#include "conv1d_depthwise_causal_args.h"
#include "ops/expect.h"
#include "ops/views.h"

namespace mlxtape::ops {

namespace {

constinit const KernelHandle kForward("conv1d_depthwise_causal_fwd");
constinit const KernelHandle kBackward("conv1d_depthwise_causal_bwd");
constinit const KernelHandle kStep("conv1d_depthwise_causal_step");

constexpr std::int64_t kMostTaps = 16;

Error wrong(Errc code, const std::string& what) {
  return {code, "conv1d_depthwise_causal: " + what};
}

// A tensor whose shape, type and place follow from x.
Check like_x(const Tensor& x, const char* name, const Tensor& t, const Shape& shape) {
  if (!(t.shape() == shape)) {
    return wrong(Errc::kShape, std::string(name) + " must be " + to_string(shape) + ", got " +
                                   to_string(t.shape()));
  }
  if (t.dtype() != x.dtype()) {
    return wrong(Errc::kDType, std::string(name) + " must have the type of x " +
                                   name_of(x.dtype()) + ", got " + name_of(t.dtype()));
  }
  if (t.backend() != x.backend()) {
    return wrong(Errc::kDevice, std::string(name) + " must be where x is (" + name_of(x.backend()) +
                                    "), got " + name_of(t.backend()));
  }
  return std::nullopt;
}

Check check_taps(const Tensor& x, const Tensor& w) {
  const std::int64_t channels = x.shape().back();
  if (!is_kernel_float(x.dtype())) {
    return wrong(Errc::kDType,
                 std::string("x must be f32, f16 or bf16, got ") + name_of(x.dtype()));
  }
  if (w.rank() != 2 || w.dim(0) != channels) {
    return wrong(Errc::kShape, "w must be [C, K] = [" + std::to_string(channels) + ", K], got " +
                                   to_string(w.shape()));
  }
  if (w.dim(1) < 1 || w.dim(1) > kMostTaps) {
    return wrong(Errc::kShape, "K must be from 1 to 16, got " + std::to_string(w.dim(1)));
  }
  if (w.dtype() != x.dtype() && w.dtype() != DType::kF32) {
    return wrong(Errc::kDType, std::string("w must have the type of x ") + name_of(x.dtype()) +
                                   " or f32, got " + name_of(w.dtype()));
  }
  if (w.backend() != x.backend()) {
    return wrong(Errc::kDevice, std::string("w must be where x is (") + name_of(x.backend()) +
                                    "), got " + name_of(w.backend()));
  }
  return std::nullopt;
}

Conv1dDepthwiseCausalArgs args_of(const Tensor& x, const Tensor& w, const Tensor& starts,
                                  bool silu) {
  const bool batched = x.rank() == 3;
  Conv1dDepthwiseCausalArgs args{};
  args.channels = x.shape().back();
  args.taps = w.dim(1);
  args.sequences = starts.defined() ? starts.dim(0) - 1 : batched ? x.dim(0) : 1;
  args.sequence_rows = x.dim(batched ? 1 : 0);
  args.rows = batched ? x.dim(0) * x.dim(1) : x.dim(0);
  args.start_bytes = starts.defined() ? static_cast<std::int32_t>(size_of(starts.dtype())) : 0;
  args.w_is_f32 = w.dtype() == DType::kF32 ? 1 : 0;
  args.silu = silu ? 1 : 0;
  return args;
}

Shape state_shape(const Conv1dDepthwiseCausalArgs& args) {
  return {args.sequences, args.taps - 1, args.channels};
}

}  // namespace

Check conv1d_depthwise_causal_check(const Tensor& x, const Tensor& w,
                                    const Conv1dDepthwiseCausalOptions& options) {
  if (x.rank() != 2 && x.rank() != 3) {
    return wrong(Errc::kShape, "x must be [T, C] or [B, T, C], got " + to_string(x.shape()));
  }
  if (const Check check = check_taps(x, w)) return check;
  if (options.sequence_starts.defined()) {
    if (const Check check = expect_starts({"conv1d_depthwise_causal", "x", x}, "[T, C]", 2,
                                          "sequence_starts", options.sequence_starts)) {
      return check;
    }
  }
  if (options.initial_state.defined()) {
    const Shape shape = state_shape(args_of(x, w, options.sequence_starts, options.silu));
    return like_x(x, "initial_state", options.initial_state, shape);
  }
  return std::nullopt;
}

Check conv1d_depthwise_causal_backward_check(const Tensor& x, const Tensor& w, const Tensor& dy,
                                             const Conv1dDepthwiseCausalOptions& options,
                                             const Tensor& d_final_state) {
  if (const Check check = conv1d_depthwise_causal_check(x, w, options)) return check;
  if (const Check check = like_x(x, "dy", dy, x.shape())) return check;
  if (d_final_state.defined()) {
    const Shape shape = state_shape(args_of(x, w, options.sequence_starts, options.silu));
    return like_x(x, "d_final_state", d_final_state, shape);
  }
  return std::nullopt;
}

Check conv1d_depthwise_causal_step_check(const Tensor& x, const Tensor& w, const Tensor& state) {
  if (x.rank() != 2) {
    return wrong(Errc::kShape, "x of a step must be [B, C], got " + to_string(x.shape()));
  }
  if (const Check check = check_taps(x, w)) return check;
  if (const Check check = like_x(x, "state", state, {x.dim(0), w.dim(1) - 1, x.dim(1)})) {
    return check;
  }
  if (!state.is_contiguous()) {
    return wrong(Errc::kShape,
                 "state must be contiguous, for it is changed in place, got strides " +
                     to_string(state.strides()));
  }
  if (x.has_memory() && x.buffer().address() == state.buffer().address()) {
    return wrong(Errc::kArgument, "state is changed in place: x must lie in another buffer");
  }
  return std::nullopt;
}

Conv1dDepthwiseCausalResult conv1d_depthwise_causal(CommandEncoder& encoder, const Tensor& x,
                                                    const Tensor& w,
                                                    const Conv1dDepthwiseCausalOptions& options) {
  require(conv1d_depthwise_causal_check(x, w, options));
  const auto args = args_of(x, w, options.sequence_starts, options.silu);
  const Tensor x_rows = encoder.contiguous(x);
  const Tensor taps = encoder.contiguous(w);
  const Tensor starts = contiguous_or_absent(encoder, options.sequence_starts);
  const Tensor initial = contiguous_or_absent(encoder, options.initial_state);
  Conv1dDepthwiseCausalResult result{encoder.empty_like(x), {}};
  if (options.want_final_state) {
    result.final_state = encoder.empty(state_shape(args), x.dtype());
  }
  if (result.y.size() != 0 || result.final_state.size() != 0) {
    encoder.dispatch(kForward, x.dtype(), args, {x_rows, taps, starts, initial},
                     {result.y, result.final_state});
  }
  return result;
}

Conv1dDepthwiseCausalGradients conv1d_depthwise_causal_backward(
    CommandEncoder& encoder, const Tensor& x, const Tensor& w, const Tensor& dy,
    const Conv1dDepthwiseCausalOptions& options, const Tensor& d_final_state) {
  require(conv1d_depthwise_causal_backward_check(x, w, dy, options, d_final_state));
  const auto args = args_of(x, w, options.sequence_starts, options.silu);
  const Tensor x_rows = encoder.contiguous(x);
  const Tensor taps = encoder.contiguous(w);
  const Tensor dy_rows = encoder.contiguous(dy);
  const Tensor starts = contiguous_or_absent(encoder, options.sequence_starts);
  const Tensor initial = contiguous_or_absent(encoder, options.initial_state);
  const Tensor d_final = contiguous_or_absent(encoder, d_final_state);
  Conv1dDepthwiseCausalGradients result{encoder.empty_like(x), encoder.empty_like(w), {}};
  if (initial.defined()) result.d_initial_state = encoder.empty_like(initial);
  if (result.dw.size() != 0) {
    encoder.dispatch(kBackward, x.dtype(), args, {x_rows, taps, dy_rows, starts, initial, d_final},
                     {result.dx, result.dw, result.d_initial_state});
  }
  return result;
}

Tensor conv1d_depthwise_causal_step(CommandEncoder& encoder, const Tensor& x, const Tensor& w,
                                    const Tensor& state, bool silu) {
  require(conv1d_depthwise_causal_step_check(x, w, state));
  Conv1dDepthwiseCausalArgs args = args_of(x, w, {}, silu);
  args.sequences = x.dim(0);  // one row each
  args.sequence_rows = 1;
  const Tensor x_rows = encoder.contiguous(x);
  const Tensor taps = encoder.contiguous(w);
  Tensor y = encoder.empty_like(x);
  if (y.size() != 0) encoder.dispatch(kStep, x.dtype(), args, {x_rows, taps}, {y, state});
  return y;
}

namespace {

void conv1d_pullback(Pullback& pullback) {
  const Saved& saved = pullback.saved();  // x, w, sequence_starts, initial_state
  Conv1dDepthwiseCausalOptions options;
  options.sequence_starts = saved[2];
  options.initial_state = saved[3];
  options.silu = saved.args<bool>();
  CommandEncoder& encoder = pullback.encoder();
  const Conv1dDepthwiseCausalGradients grads = conv1d_depthwise_causal_backward(
      encoder, saved[0], saved[1],
      pullback.has_grad(0) ? pullback.grad(0) : encoder.zeros(saved[0].shape(), saved[0].dtype()),
      options, pullback.has_grad(1) ? pullback.grad(1) : Tensor());
  pullback.give(0, grads.dx);
  pullback.give(1, grads.dw);
  pullback.give(2, grads.d_initial_state);
}

}  // namespace

Conv1dDepthwiseCausalResult conv1d_depthwise_causal(Tape& tape, const Tensor& x, const Tensor& w,
                                                    const Conv1dDepthwiseCausalOptions& options) {
  Conv1dDepthwiseCausalResult result = conv1d_depthwise_causal(tape.encoder(), x, w, options);
  const Tensor& initial = options.initial_state;
  if (tape.wants({x, w, initial})) {
    tape.record("conv1d_depthwise_causal", conv1d_pullback, {x, w, initial},
                {&result.y, &result.final_state},
                Saved({x, w, options.sequence_starts, initial}, options.silu));
  }
  return result;
}

}  // namespace mlxtape::ops
