#include "mlxtape/ops/quantized_matmul.h"

#include <algorithm>
#include <string>
#include <utility>

#include "mlxtape/base/checked.h"
#include "mlxtape/ops/elementwise.h"
#include "mlxtape/ops/matmul.h"
#include "ops/expect_quantized.h"
#include "quantized_matmul_args.h"

namespace mlxtape::ops {

namespace {

constinit const KernelHandle kForward("quantized_matmul_fwd");

Error wrong(Errc code, const std::string& what) { return {code, "quantized_matmul: " + what}; }

QuantizedMatmulArgs args_of(const Tensor& x, const QuantizedWeight& w) {
  const std::int64_t k = x.shape().back();
  return {k == 0 ? 0 : x.size() / k,
          w.codes.dim(0),
          k,
          w.format.bits,
          w.format.group_size,
          w.scales.dtype() == DType::kF32 ? 1 : 0,
          0};
}

Shape result_shape(const Tensor& x, const QuantizedWeight& w) {
  Shape shape(x.shape().begin(), x.shape().end() - 1);
  shape.push_back(w.codes.dim(0));
  return shape;
}

// Parts begin at multiples of so many rows: products of slices that begin at odd places have no quick kernels. On an H200
// all products of a training step with a head of 151936 rows took 83 ms where parts began at 30387, and take 47.
constexpr std::int64_t kPartStep = 128;

// Calls body(start, stop) for the rows of the weights, as many at a time as fit, in parts about equal.
template <class Body>
void each_part(CommandEncoder& encoder, const QuantizedMatmulArgs& args, DType dtype,
               const Body& body) {
  const std::int64_t most = encoder.device().traits().dequantized_bytes;
  const std::int64_t row = args.k * static_cast<std::int64_t>(size_of(dtype));
  const std::int64_t fit = std::max<std::int64_t>(most / std::max<std::int64_t>(row, 1), 1);
  const std::int64_t step = std::min(kPartStep, fit);
  const std::int64_t parts = ceil_div(args.n, fit / step * step);
  const std::int64_t each = ceil_div(ceil_div(args.n, parts), step) * step;
  for (std::int64_t start = 0; start < args.n; start += each) {
    body(start, std::min(args.n, start + each));
  }
}

// Rows [start, stop).
QuantizedWeight rows_of(const QuantizedWeight& w, std::int64_t start, std::int64_t stop) {
  return {w.codes.slice(0, start, stop), w.scales.slice(0, start, stop),
          w.biases.slice(0, start, stop), w.format};
}

// dy: [m, n], dx: [m, k]. Parts are added in f32.
void add_gradient_x(CommandEncoder& encoder, const QuantizedWeight& w,
                    const QuantizedMatmulArgs& args, const Tensor& dy, const Tensor& dx,
                    bool adds) {
  Tensor sum;
  each_part(encoder, args, dy.dtype(), [&](std::int64_t start, std::int64_t stop) {
    const Tensor rows = dequantize(encoder, rows_of(w, start, stop), dy.dtype());
    if (stop - start == args.n) return matmul_into(encoder, dy, rows, dx, adds ? 1 : 0);
    if (start == 0) sum = encoder.empty({args.m, args.k}, DType::kF32);
    matmul_into(encoder, dy.slice(1, start, stop), rows, sum, start == 0 ? 0 : 1);
  });
  if (!sum.defined()) return;
  const Tensor rounded = cast(encoder, sum, dy.dtype());
  adds ? encoder.add_into(dx, rounded) : encoder.copy(rounded, dx);
}

// x: [m, k], dy: [m, n].
DequantizeGradients gradient_params(CommandEncoder& encoder, const QuantizedWeight& w,
                                    const QuantizedMatmulArgs& args, const Tensor& x,
                                    const Tensor& dy) {
  DequantizeGradients all;
  each_part(encoder, args, DType::kF32, [&](std::int64_t start, std::int64_t stop) {
    const Tensor dw = encoder.empty({stop - start, args.k}, DType::kF32);
    matmul_into(encoder, dy.slice(1, start, stop).transpose({1, 0}), x, dw, 0);
    DequantizeGradients part = dequantize_backward(encoder, rows_of(w, start, stop), dw);
    if (stop - start == args.n) {
      all = std::move(part);
      return;
    }
    if (start == 0) all = {encoder.empty_like(w.scales), encoder.empty_like(w.biases)};
    encoder.copy(part.d_scales, all.d_scales.slice(0, start, stop));
    encoder.copy(part.d_biases, all.d_biases.slice(0, start, stop));
  });
  return all;
}

void quantized_matmul_pullback(Pullback& pullback) {
  // x, codes, scales, biases
  const Saved& saved = pullback.saved();
  const auto& args = saved.args<QuantizedMatmulArgs>();
  const QuantizedMatmulWanted wanted{pullback.needs(0), pullback.needs(1) || pullback.needs(2)};
  const QuantizedMatmulGrads grads = quantized_matmul_backward(
      pullback.encoder(), saved[0], {saved[1], saved[2], saved[3], args.bits, args.group},
      pullback.grad(), wanted);
  if (wanted.x) pullback.give(0, grads.dx);
  if (!wanted.params) return;
  pullback.give(1, grads.d_scales);
  pullback.give(2, grads.d_biases);
}

}  // namespace

Check quantized_matmul_check(const Tensor& x, const QuantizedWeight& w) {
  if (x.rank() < 1) return wrong(Errc::kShape, "x must have at least one axis, got []");
  if (!is_kernel_float(x.dtype())) {
    return wrong(Errc::kDType,
                 std::string("x must be f32, f16 or bf16, got ") + name_of(x.dtype()));
  }
  const std::int64_t n = w.codes.rank() == 2 ? w.codes.dim(0) : 0;
  return expect_quantized(Beside{"quantized_matmul", "x", x}, "", w, {n}, x.shape().back(),
                          x.dtype());
}

Check quantized_matmul_backward_check(const Tensor& x, const QuantizedWeight& w, const Tensor& dy) {
  if (const Check check = quantized_matmul_check(x, w)) return check;
  return expect_tensor(Beside{"quantized_matmul", "x", x}, "dy", dy, result_shape(x, w), x.dtype());
}

Tensor quantized_matmul(CommandEncoder& encoder, const Tensor& x, const QuantizedWeight& w) {
  require(quantized_matmul_check(x, w));
  const QuantizedMatmulArgs args = args_of(x, w);
  if (args.k == 0) return encoder.zeros(result_shape(x, w), x.dtype());
  Tensor y = encoder.empty(result_shape(x, w), x.dtype());
  if (y.size() == 0) return y;
  const Tensor rows = encoder.contiguous(x).reshape({args.m, args.k});
  if (args.m <= encoder.device().traits().quantized_rows) {
    const Tensor codes = encoder.contiguous(w.codes), scales = encoder.contiguous(w.scales),
                 biases = encoder.contiguous(w.biases);
    encoder.dispatch(kForward, x.dtype(), args, {rows, codes, scales, biases}, {y});
    return y;
  }
  const Tensor out = y.reshape({args.m, args.n});
  each_part(encoder, args, x.dtype(), [&](std::int64_t start, std::int64_t stop) {
    const Tensor part = dequantize(encoder, rows_of(w, start, stop), x.dtype()).transpose({1, 0});
    if (stop - start == args.n) return matmul_into(encoder, rows, part, out, 0);
    encoder.copy(matmul(encoder, rows, part), out.slice(1, start, stop));
  });
  return y;
}

QuantizedMatmulGrads quantized_matmul_backward(CommandEncoder& encoder, const Tensor& x,
                                               const QuantizedWeight& w, const Tensor& dy,
                                               QuantizedMatmulWanted wanted) {
  require(quantized_matmul_backward_check(x, w, dy));
  const QuantizedMatmulArgs args = args_of(x, w);
  QuantizedMatmulGrads grads;
  if (args.m == 0 || args.n == 0 || args.k == 0) {
    const auto none = [&](const Tensor& like) {
      return encoder.zeros(like.shape(), like.dtype());
    };
    if (wanted.x) grads.dx = none(x);
    if (wanted.params) grads.d_scales = none(w.scales);
    if (wanted.params) grads.d_biases = none(w.biases);
    return grads;
  }
  const Tensor dy_rows = encoder.contiguous(dy).reshape({args.m, args.n});
  if (wanted.x) {
    grads.dx = encoder.empty(x.shape(), x.dtype());
    add_gradient_x(encoder, w, args, dy_rows, grads.dx.reshape({args.m, args.k}), false);
  }
  if (wanted.params) {
    const Tensor rows = encoder.contiguous(x).reshape({args.m, args.k});
    const DequantizeGradients params = gradient_params(encoder, w, args, rows, dy_rows);
    grads.d_scales = params.d_scales;
    grads.d_biases = params.d_biases;
  }
  return grads;
}

Check quantized_matmul_dx_into_check(const QuantizedWeight& w, const Tensor& dy, const Tensor& dx) {
  if (!dx.is_contiguous()) {
    return wrong(Errc::kShape, "dx must be contiguous, got strides " + to_string(dx.strides()));
  }
  return quantized_matmul_backward_check(dx, w, dy);
}

void quantized_matmul_dx_into(CommandEncoder& encoder, const QuantizedWeight& w, const Tensor& dy,
                              const Tensor& dx, bool adds) {
  require(quantized_matmul_dx_into_check(w, dy, dx));
  const QuantizedMatmulArgs args = args_of(dx, w);
  if (args.m == 0 || args.k == 0) return;
  if (args.n == 0) {
    if (!adds) encoder.copy(encoder.zeros(dx.shape(), dx.dtype()), dx);
    return;
  }
  add_gradient_x(encoder, w, args, encoder.contiguous(dy).reshape({args.m, args.n}),
                 dx.reshape({args.m, args.k}), adds);
}

Tensor quantized_matmul(Tape& tape, const Tensor& x, const QuantizedWeight& w) {
  Tensor y = quantized_matmul(tape.encoder(), x, w);
  if (tape.wants({x, w.scales, w.biases})) {
    tape.record("quantized_matmul", quantized_matmul_pullback, {x, w.scales, w.biases}, {&y},
                Saved({x, w.codes, w.scales, w.biases}, args_of(x, w)));
  }
  return y;
}

}  // namespace mlxtape::ops
