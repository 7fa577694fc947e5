#include "mlxtape/ops/quantized_matmul.h"

#include <algorithm>
#include <string>

#include "mlxtape/base/checked.h"
#include "mlxtape/ops/elementwise.h"
#include "mlxtape/ops/matmul.h"
#include "ops/expect_quantized.h"
#include "quantized_matmul_args.h"

namespace mlxtape::ops {

namespace {

constinit const KernelHandle kForward("quantized_matmul_fwd");
constinit const KernelHandle kUnpack("quantized_matmul_unpack");
constinit const KernelHandle kParamsBack("quantized_matmul_params_bwd");

// Rows of x up to which codes are read where they are used. On a CPU more rows share less: codes are widened
// again for each 8.
constexpr std::int64_t kCudaFew = 8;
constexpr std::int64_t kCpuFew = 32;

// Bytes of w or dW at a time: on a CPU what the last cache keeps until the product reads it.
constexpr std::int64_t kCudaBytes = std::int64_t{64} << 20;
constexpr std::int64_t kCpuBytes = std::int64_t{1} << 20;

Error wrong(Errc code, const std::string& what) { return {code, "quantized_matmul: " + what}; }

QuantizedMatmulArgs args_of(const Tensor& x, const QuantizedWeight& w) {
  const std::int64_t k = x.shape().back();
  return {k == 0 ? 0 : x.size() / k,
          w.codes.dim(0),
          k,
          w.bits,
          w.group_size,
          w.scales.dtype() == DType::kF32 ? 1 : 0,
          0};
}

Shape result_shape(const Tensor& x, const QuantizedWeight& w) {
  Shape shape(x.shape().begin(), x.shape().end() - 1);
  shape.push_back(w.codes.dim(0));
  return shape;
}

// What the kernels are given, without gaps.
QuantizedWeight dense(CommandEncoder& encoder, const QuantizedWeight& w) {
  return {encoder.contiguous(w.codes), encoder.contiguous(w.scales), encoder.contiguous(w.biases),
          w.bits, w.group_size};
}

// Calls body(start, stop) for the rows of the weights, as many at a time as fit.
template <class Body>
void each_part(CommandEncoder& encoder, const QuantizedMatmulArgs& args, DType dtype,
               const Body& body) {
  const std::int64_t most = encoder.backend() == Backend::kCuda ? kCudaBytes : kCpuBytes;
  const std::int64_t row = args.k * static_cast<std::int64_t>(size_of(dtype));
  const std::int64_t fit = std::max<std::int64_t>(most / std::max<std::int64_t>(row, 1), 1);
  const std::int64_t parts = ceil_div(args.n, fit);
  for (std::int64_t i = 0; i < parts; ++i) body(args.n * i / parts, args.n * (i + 1) / parts);
}

// Rows [start, stop) of w in the type of x.
Tensor unpacked(CommandEncoder& encoder, const QuantizedWeight& w, QuantizedMatmulArgs args,
                std::int64_t start, std::int64_t stop, DType dtype) {
  Tensor out = encoder.empty({stop - start, args.k}, dtype);
  args.n = stop - start;
  const Tensor codes = w.codes.slice(0, start, stop), scales = w.scales.slice(0, start, stop),
               biases = w.biases.slice(0, start, stop);
  encoder.dispatch(kUnpack, dtype, args, {codes, scales, biases}, {out});
  return out;
}

void gradient_x(CommandEncoder& encoder, const QuantizedWeight& w, const QuantizedMatmulArgs& args,
                const Tensor& dy, Tensor& dx) {
  // Parts are added in f32.
  Tensor sum = dx;
  each_part(encoder, args, dx.dtype(), [&](std::int64_t start, std::int64_t stop) {
    const Tensor rows = unpacked(encoder, w, args, start, stop, dx.dtype());
    if (start == 0 && stop < args.n) sum = encoder.empty(dx.shape(), DType::kF32);
    matmul_into(encoder, dy.slice(1, start, stop), rows, sum, start == 0 ? 0 : 1);
  });
  dx = cast(encoder, sum, dx.dtype());
}

// Sums over groups, part by part: dw_of(start, stop) gives rows of dW as f32.
template <class DwOf>
void gradient_params(CommandEncoder& encoder, const QuantizedWeight& w,
                     const QuantizedMatmulArgs& args, const Tensor& dscales, const Tensor& dbiases,
                     const DwOf& dw_of) {
  each_part(encoder, args, DType::kF32, [&](std::int64_t start, std::int64_t stop) {
    const Tensor dw = dw_of(start, stop);
    const auto rows = [&](const Tensor& t) {
      return t.defined() ? t.slice(0, start, stop) : t;
    };
    QuantizedMatmulArgs part = args;
    part.n = stop - start;
    const Tensor codes = rows(w.codes), ds = rows(dscales), db = rows(dbiases);
    encoder.dispatch(kParamsBack, w.scales.dtype(), part, {dw, codes}, {ds, db});
  });
}

// w of any number of axes as one matrix.
Tensor as_matrix(CommandEncoder& encoder, const Tensor& t) {
  const std::int64_t columns = t.shape().back();
  return encoder.contiguous(t).reshape({columns == 0 ? 0 : t.size() / columns, columns});
}
std::int64_t row_length(const QuantizedWeight& w) { return w.codes.shape().back() * 32 / w.bits; }

void quantized_matmul_pullback(Pullback& pullback) {
  // x, codes, scales, biases
  const Saved& saved = pullback.saved();
  const auto& args = saved.args<QuantizedMatmulArgs>();
  const QuantizedMatmulWanted wanted{pullback.needs(0), pullback.needs(1), pullback.needs(2)};
  const QuantizedMatmulGrads grads = quantized_matmul_backward(
      pullback.encoder(), saved[0], {saved[1], saved[2], saved[3], args.bits, args.group},
      pullback.grad(), wanted);
  if (wanted.x) pullback.give(0, grads.dx);
  if (wanted.scales) pullback.give(1, grads.dscales);
  if (wanted.biases) pullback.give(2, grads.dbiases);
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
  const QuantizedWeight packed = dense(encoder, w);
  if (args.m <= (encoder.backend() == Backend::kCuda ? kCudaFew : kCpuFew)) {
    encoder.dispatch(kForward, x.dtype(), args, {rows, packed.codes, packed.scales, packed.biases},
                     {y});
    return y;
  }
  const Tensor out = y.reshape({args.m, args.n});
  each_part(encoder, args, x.dtype(), [&](std::int64_t start, std::int64_t stop) {
    const Tensor part = unpacked(encoder, packed, args, start, stop, x.dtype()).transpose({1, 0});
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
  const bool nothing = args.m == 0 || args.n == 0 || args.k == 0;
  const auto room = [&](const Tensor& like) {
    return nothing ? encoder.zeros(like.shape(), like.dtype()) : encoder.empty_like(like);
  };
  QuantizedMatmulGrads grads;
  if (wanted.x) grads.dx = room(x);
  if (wanted.scales) grads.dscales = room(w.scales);
  if (wanted.biases) grads.dbiases = room(w.biases);
  if (nothing) return grads;
  const QuantizedWeight packed = dense(encoder, w);
  const Tensor dy_rows = encoder.contiguous(dy).reshape({args.m, args.n});
  if (wanted.x) {
    Tensor dx = grads.dx.reshape({args.m, args.k});
    gradient_x(encoder, packed, args, dy_rows, dx);
    grads.dx = dx.reshape(x.shape());
  }
  if (wanted.scales || wanted.biases) {
    const Tensor rows = encoder.contiguous(x).reshape({args.m, args.k});
    gradient_params(encoder, packed, args, grads.dscales, grads.dbiases,
                    [&](std::int64_t start, std::int64_t stop) {
                      const Tensor dw = encoder.empty({stop - start, args.k}, DType::kF32);
                      matmul_into(encoder, dy_rows.slice(1, start, stop).transpose({1, 0}), rows,
                                  dw, 0);
                      return dw;
                    });
  }
  return grads;
}

Check quantized_unpack_check(const QuantizedWeight& w, DType dtype) {
  const Tensor& codes = w.codes;
  const auto refuse = [](Errc code, const std::string& what) {
    return Error(code, "quantized_unpack: " + what);
  };
  if (!is_kernel_float(dtype)) {
    return refuse(Errc::kDType,
                  std::string("dtype must be f32, f16 or bf16, got ") + name_of(dtype));
  }
  if (codes.rank() < 2 || w.bits < 1) {
    return refuse(Errc::kShape, "codes must be [..., N, K·bits/32], got " +
                                    to_string(codes.shape()) + " of " + std::to_string(w.bits) +
                                    " bits");
  }
  return expect_quantized(Beside{"quantized_unpack", "codes", codes}, "", w,
                          Shape(codes.shape().begin(), codes.shape().end() - 1), row_length(w),
                          dtype);
}

Tensor quantized_unpack(CommandEncoder& encoder, const QuantizedWeight& w, DType dtype) {
  require(quantized_unpack_check(w, dtype));
  const QuantizedWeight rows{as_matrix(encoder, w.codes), as_matrix(encoder, w.scales),
                             as_matrix(encoder, w.biases), w.bits, w.group_size};
  const QuantizedMatmulArgs args =
      args_of(Tensor::meta({0, row_length(w)}, dtype, w.codes.backend()), rows);
  Shape shape(w.codes.shape().begin(), w.codes.shape().end() - 1);
  shape.push_back(args.k);
  if (args.n == 0) return encoder.empty(shape, dtype);
  return unpacked(encoder, rows, args, 0, args.n, dtype).reshape(shape);
}

QuantizedMatmulGrads quantized_unpack_backward(CommandEncoder& encoder, const QuantizedWeight& w,
                                               const Tensor& dw) {
  require(quantized_unpack_check(w, dw.dtype()));
  Shape shape(w.codes.shape().begin(), w.codes.shape().end() - 1);
  shape.push_back(row_length(w));
  require(expect_tensor(Beside{"quantized_unpack", "codes", w.codes}, "dw", dw, shape, dw.dtype()));
  QuantizedMatmulGrads grads{{}, encoder.empty_like(w.scales), encoder.empty_like(w.biases)};
  if (dw.size() == 0) return grads;
  const Tensor rows = as_matrix(encoder, dw);
  const QuantizedWeight packed{as_matrix(encoder, w.codes), w.scales, w.biases, w.bits,
                               w.group_size};
  gradient_params(encoder, packed, args_of(rows, packed), as_matrix(encoder, grads.dscales),
                  as_matrix(encoder, grads.dbiases), [&](std::int64_t start, std::int64_t stop) {
                    return cast(encoder, rows.slice(0, start, stop), DType::kF32);
                  });
  return grads;
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
