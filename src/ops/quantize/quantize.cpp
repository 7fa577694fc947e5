#include "mlxtape/ops/quantize.h"

#include <bit>
#include <string>

#include "ops/expect_quantized.h"
#include "quantize_args.h"

namespace mlxtape::ops {

namespace {

constinit const KernelHandle kQuantize("quantize_fwd");
constinit const KernelHandle kForward("dequantize_fwd");
constinit const KernelHandle kBackward("dequantize_bwd");

Check float_check(const std::string& op, const std::string& name, DType dtype) {
  if (is_kernel_float(dtype)) return std::nullopt;
  return Error(Errc::kDType, op + ": " + name + " must be f32, f16 or bf16, got " + name_of(dtype));
}

Shape with_last(Shape shape, std::int64_t last) {
  shape[shape.rank() - 1] = last;
  return shape;
}

Shape weights_shape(const QuantizedWeight& w) {
  return with_last(w.scales.shape(), w.scales.shape().back() * w.format.group_size);
}

QuantizeArgs args_of(const QuantizedWeight& w) {
  return {w.scales.size(), std::countr_zero(static_cast<unsigned>(w.format.group_size)),
          w.format.bits, 0, static_cast<std::int32_t>(w.scales.dtype())};
}

void dequantize_pullback(Pullback& pullback) {
  const Saved& saved = pullback.saved();
  const auto [bits, group_size] = saved.args<QuantizeFormat>();
  const auto grads = dequantize_backward(
      pullback.encoder(), {saved[0], saved[1], saved[1], bits, group_size}, pullback.grad());
  pullback.give(0, grads.d_scales);
  pullback.give(1, grads.d_biases);
}

}  // namespace

Check quantize_check(const Tensor& w, const QuantizeFormat& format) {
  if (const Check check = expect_format("quantize: ", format.bits, format.group_size)) return check;
  if (w.rank() < 2) {
    return Error(Errc::kShape, "quantize: w must be [..., out, in], got " + to_string(w.shape()));
  }
  if (const Check check = float_check("quantize", "w", w.dtype())) return check;
  if (w.shape().back() % format.group_size != 0) {
    return Error(Errc::kShape, "quantize: w's last extent must be a multiple of group_size " +
                                   std::to_string(format.group_size) + ", got " +
                                   to_string(w.shape()));
  }
  return std::nullopt;
}

Check dequantize_check(const QuantizedWeight& w, DType dtype) {
  if (w.scales.rank() < 2) {
    return Error(Errc::kShape, "dequantize: scales must be [..., out, groups], got " +
                                   to_string(w.scales.shape()));
  }
  if (const Check check = float_check("dequantize", "scales", w.scales.dtype())) return check;
  const Shape shape = weights_shape(w);
  if (const Check check =
          expect_quantized(Beside{"dequantize", "scales", w.scales}, "", w,
                           Shape(shape.begin(), shape.end() - 1), shape.back(), w.scales.dtype())) {
    return check;
  }
  return float_check("dequantize", "the result", dtype);
}

Check dequantize_backward_check(const QuantizedWeight& w, const Tensor& dw) {
  if (const Check check = dequantize_check(w, dw.dtype())) return check;
  return expect_tensor(Beside{"dequantize", "scales", w.scales}, "dw", dw, weights_shape(w),
                       dw.dtype());
}

QuantizedWeight quantize(CommandEncoder& encoder, const Tensor& w, const QuantizeFormat& format,
                         QuantizeRule rule) {
  require(quantize_check(w, format));
  const auto [bits, group_size] = format;
  const std::int64_t cols = w.shape().back();
  const Shape groups = with_last(w.shape(), cols / group_size);
  QuantizedWeight out{encoder.empty(with_last(w.shape(), cols / 32 * bits), DType::kU32),
                      encoder.empty(groups, w.dtype()), encoder.empty(groups, w.dtype()), bits,
                      group_size};
  if (w.size() == 0) return out;
  QuantizeArgs args = args_of(out);
  args.gpu_rule = rule == QuantizeRule::kGpu ? 1 : 0;
  const Tensor dense = encoder.contiguous(w);
  encoder.dispatch(kQuantize, w.dtype(), args, {dense}, {out.codes, out.scales, out.biases});
  return out;
}

Tensor dequantize(CommandEncoder& encoder, const QuantizedWeight& w, std::optional<DType> dtype) {
  const DType stored = dtype.value_or(w.scales.dtype());
  require(dequantize_check(w, stored));
  Tensor out = encoder.empty(weights_shape(w), stored);
  if (out.size() == 0) return out;
  const Tensor codes = encoder.contiguous(w.codes);
  const Tensor scales = encoder.contiguous(w.scales);
  const Tensor biases = encoder.contiguous(w.biases);
  encoder.dispatch(kForward, stored, args_of(w), {codes, scales, biases}, {out});
  return out;
}

DequantizeGradients dequantize_backward(CommandEncoder& encoder, const QuantizedWeight& w,
                                        const Tensor& dw) {
  require(dequantize_backward_check(w, dw));
  DequantizeGradients grads{encoder.empty_like(w.scales), encoder.empty_like(w.biases)};
  if (dw.size() == 0) return grads;
  const Tensor codes = encoder.contiguous(w.codes);
  const Tensor dense = encoder.contiguous(dw);
  encoder.dispatch(kBackward, dw.dtype(), args_of(w), {codes, dense},
                   {grads.d_scales, grads.d_biases});
  return grads;
}

Tensor dequantize(Tape& tape, const QuantizedWeight& w, std::optional<DType> dtype) {
  Tensor out = dequantize(tape.encoder(), w, dtype);
  if (tape.wants({w.scales, w.biases})) {
    // Of the scales only shape and type are asked again.
    const Tensor like = Tensor::meta(w.scales.shape(), w.scales.dtype(), w.scales.backend());
    tape.record("dequantize", dequantize_pullback, {w.scales, w.biases}, {&out},
                Saved({w.codes, like}, w.format));
  }
  return out;
}

}  // namespace mlxtape::ops
