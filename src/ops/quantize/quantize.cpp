#include "mlxtape/ops/quantize.h"

#include <bit>
#include <string>

#include "ops/expect.h"
#include "quantize_args.h"

namespace mlxtape::ops {

namespace {

constinit const KernelHandle kQuantize("quantize_fwd");
constinit const KernelHandle kForward("dequantize_fwd");
constinit const KernelHandle kBackward("dequantize_bwd");

Check format_check(const std::string& op, const QuantizeFormat& format) {
  const auto [bits, group] = format;
  if (bits < 2 || bits == 7 || bits > 8) {
    return Error(Errc::kArgument,
                 op + ": bits must be 2, 3, 4, 5, 6 or 8, got " + std::to_string(bits));
  }
  if (group != 32 && group != 64 && group != 128) {
    return Error(Errc::kArgument,
                 op + ": group_size must be 32, 64 or 128, got " + std::to_string(group));
  }
  return std::nullopt;
}

Check float_check(const std::string& op, const std::string& name, DType dtype) {
  if (is_kernel_float(dtype)) return std::nullopt;
  return Error(Errc::kDType, op + ": " + name + " must be f32, f16 or bf16, got " + name_of(dtype));
}

Shape with_last(Shape shape, std::int64_t last) {
  shape[shape.rank() - 1] = last;
  return shape;
}

Shape weights_shape(const Quantized& w, const QuantizeFormat& format) {
  return with_last(w.scales.shape(), w.scales.shape().back() * format.group_size);
}

QuantizeArgs args_of(std::int64_t groups, const QuantizeFormat& format, DType scales) {
  return {groups, std::countr_zero(static_cast<unsigned>(format.group_size)), format.bits, 0,
          static_cast<std::int32_t>(scales)};
}

void dequantize_pullback(Pullback& pullback) {
  const Saved& saved = pullback.saved();
  const auto grads = dequantize_backward(pullback.encoder(), {saved[0], saved[1], saved[1]},
                                         saved.args<QuantizeFormat>(), pullback.grad());
  pullback.give(0, grads.d_scales);
  pullback.give(1, grads.d_biases);
}

}  // namespace

Check quantize_check(const Tensor& w, const QuantizeFormat& format) {
  if (const Check check = format_check("quantize", format)) return check;
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

Check dequantize_check(const Quantized& w, const QuantizeFormat& format, DType dtype) {
  if (const Check check = format_check("dequantize", format)) return check;
  if (w.scales.rank() < 2) {
    return Error(Errc::kShape, "dequantize: scales must be [..., out, groups], got " +
                                   to_string(w.scales.shape()));
  }
  if (const Check check = float_check("dequantize", "scales", w.scales.dtype())) return check;
  const Beside beside{"dequantize", "scales", w.scales};
  const std::int64_t words = w.scales.shape().back() * format.group_size / 32 * format.bits;
  if (const Check check = expect_tensor(beside, "codes", w.codes,
                                        with_last(w.scales.shape(), words), DType::kU32)) {
    return check;
  }
  if (const Check check =
          expect_tensor(beside, "biases", w.biases, w.scales.shape(), w.scales.dtype())) {
    return check;
  }
  return float_check("dequantize", "the result", dtype);
}

Check dequantize_backward_check(const Quantized& w, const QuantizeFormat& format,
                                const Tensor& dw) {
  if (const Check check = dequantize_check(w, format, dw.dtype())) return check;
  return expect_tensor(Beside{"dequantize", "scales", w.scales}, "dw", dw, weights_shape(w, format),
                       dw.dtype());
}

Quantized quantize(CommandEncoder& encoder, const Tensor& w, const QuantizeFormat& format,
                   QuantizeRule rule) {
  require(quantize_check(w, format));
  const std::int64_t cols = w.shape().back();
  const Shape groups = with_last(w.shape(), cols / format.group_size);
  Quantized out{encoder.empty(with_last(w.shape(), cols / 32 * format.bits), DType::kU32),
                encoder.empty(groups, w.dtype()), encoder.empty(groups, w.dtype())};
  if (w.size() == 0) return out;
  QuantizeArgs args = args_of(out.scales.size(), format, w.dtype());
  args.gpu_rule = rule == QuantizeRule::kGpu ? 1 : 0;
  const Tensor dense = encoder.contiguous(w);
  encoder.dispatch(kQuantize, w.dtype(), args, {dense}, {out.codes, out.scales, out.biases});
  return out;
}

Tensor dequantize(CommandEncoder& encoder, const Quantized& w, const QuantizeFormat& format,
                  std::optional<DType> dtype) {
  const DType stored = dtype.value_or(w.scales.dtype());
  require(dequantize_check(w, format, stored));
  Tensor out = encoder.empty(weights_shape(w, format), stored);
  if (out.size() == 0) return out;
  const Tensor codes = encoder.contiguous(w.codes);
  const Tensor scales = encoder.contiguous(w.scales);
  const Tensor biases = encoder.contiguous(w.biases);
  encoder.dispatch(kForward, stored, args_of(scales.size(), format, scales.dtype()),
                   {codes, scales, biases}, {out});
  return out;
}

DequantizeGradients dequantize_backward(CommandEncoder& encoder, const Quantized& w,
                                        const QuantizeFormat& format, const Tensor& dw) {
  require(dequantize_backward_check(w, format, dw));
  DequantizeGradients grads{encoder.empty_like(w.scales), encoder.empty_like(w.biases)};
  if (dw.size() == 0) return grads;
  const Tensor codes = encoder.contiguous(w.codes);
  const Tensor dense = encoder.contiguous(dw);
  encoder.dispatch(kBackward, dw.dtype(), args_of(w.scales.size(), format, w.scales.dtype()),
                   {codes, dense}, {grads.d_scales, grads.d_biases});
  return grads;
}

Tensor dequantize(Tape& tape, const Quantized& w, const QuantizeFormat& format,
                  std::optional<DType> dtype) {
  Tensor out = dequantize(tape.encoder(), w, format, dtype);
  if (tape.wants({w.scales, w.biases})) {
    // Of the scales only shape and type are asked again.
    const Tensor like = Tensor::meta(w.scales.shape(), w.scales.dtype(), w.scales.backend());
    tape.record("dequantize", dequantize_pullback, {w.scales, w.biases}, {&out},
                Saved({w.codes, like}, format));
  }
  return out;
}

}  // namespace mlxtape::ops
