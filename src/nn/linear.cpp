#include "mlxtape/nn/linear.h"

#include "expect.h"
#include "mlxtape/ops/dropout.h"
#include "mlxtape/ops/elementwise.h"
#include "mlxtape/ops/embedding.h"
#include "mlxtape/ops/layout.h"
#include "mlxtape/ops/matmul.h"
#include "mlxtape/ops/quantize.h"

namespace mlxtape::nn {

Shape Weight::shape() const {
  if (!is_quantized()) return plain.shape();
  Shape shape = quantized.scales.shape();
  if (shape.rank() > 0) shape[shape.rank() - 1] *= quantized.format.group_size;
  return shape;
}

Tensor dequantized(Tape& tape, const Weight& w) {
  if (!w.is_quantized()) return w.plain;
  return ops::dequantize(tape, w.quantized);
}

Check linear_check(const Tensor& x, const Weight& w, const Tensor& bias) {
  const Shape shape = w.shape();
  if (x.rank() == 0 || shape.rank() != 2 || shape[1] != x.shape().back()) {
    return Error(Errc::kShape, "linear: w must be [out, in] for x [..., in], got " +
                                   to_string(shape) + " and " + to_string(x.shape()));
  }
  if (bias.defined() && bias.shape() != Shape{shape[0]}) {
    return Error(Errc::kShape, "linear: bias must be [out] = " + to_string(Shape{shape[0]}) +
                                   ", got " + to_string(bias.shape()));
  }
  return expect_adapter("linear", "w", x, w);
}

namespace {

Tensor without_adapter(Tape& tape, const Tensor& x, const Weight& w, const Tensor& bias) {
  if (w.is_quantized()) {
    const Tensor y = ops::quantized_matmul(tape, x, w.quantized);
    return bias.defined() ? ops::add(tape, y, bias) : y;
  }
  Shape shape = x.shape();
  const Tensor rows =
      ops::reshape(tape, x, {*element_count(Shape(shape.begin(), shape.end() - 1)), shape.back()});
  shape[shape.rank() - 1] = w.plain.dim(0);
  ops::MatmulOptions options;
  options.bias = bias;
  const Tensor turned = ops::transpose(tape, w.plain, {1, 0});
  return ops::reshape(tape, ops::matmul(tape, rows, turned, options), shape);
}

// The scale is given to the narrow product; the wide one is added to y as it is stored.
Tensor with_adapter(Tape& tape, const Tensor& x, const Tensor& y, const Adapter& adapter) {
  Tensor rows = ops::reshape(tape, x, {y.size() / y.shape().back(), x.shape().back()});
  if (adapter.dropout > 0) rows = ops::dropout(tape, rows, adapter.dropout, adapter.key);
  const Tensor seen = ops::matmul(tape, rows, ops::cast(tape, adapter.a, x.dtype()));
  ops::MatmulOptions options;
  options.residual = ops::reshape(tape, y, {rows.dim(0), y.shape().back()});
  const Tensor all = ops::matmul(tape, ops::multiply(tape, seen, adapter.scale),
                                 ops::cast(tape, adapter.b, x.dtype()), options);
  return ops::reshape(tape, all, y.shape());
}

}  // namespace

Tensor linear(Tape& tape, const Tensor& x, const Weight& w, const Tensor& bias) {
  require(linear_check(x, w, bias));
  const Tensor y = without_adapter(tape, x, w, bias);
  return w.adapter.defined() && y.size() > 0 ? with_adapter(tape, x, y, w.adapter) : y;
}

Tensor embed(Tape& tape, const Weight& w, const Tensor& ids) {
  if (w.adapter.defined()) throw Error(Errc::kArgument, "embed: w must not have an adapter");
  if (!w.is_quantized()) return ops::embedding(tape, w.plain, ids);
  const auto rows = [&](const Tensor& table) {
    return ops::embedding(tape, table, ids);
  };
  return dequantized(tape, ops::QuantizedWeight{rows(w.quantized.codes), rows(w.quantized.scales),
                                                rows(w.quantized.biases), w.quantized.format});
}

Check swiglu_network_check(const Tensor& x, const SwigluWeights& w) {
  if (x.rank() == 0) {
    return Error(Errc::kShape, "swiglu_network: x must be [..., width], got []");
  }
  return expect_swiglu("swiglu_network", x, w, "gate", "up", "down");
}

Tensor swiglu_network(Tape& tape, const Tensor& x, const SwigluWeights& w,
                      GateActivation activation) {
  require(swiglu_network_check(x, w));
  const Tensor gate = linear(tape, x, w.gate, w.gate_bias), up = linear(tape, x, w.up, w.up_bias);
  const auto opened = [&] {
    switch (activation) {
      case GateActivation::kGelu: return ops::multiply(tape, ops::gelu(tape, gate), up);
      case GateActivation::kGeluTanh: return ops::multiply(tape, ops::gelu_tanh(tape, gate), up);
      case GateActivation::kSilu: break;
    }
    return ops::swiglu(tape, gate, up);
  };
  return linear(tape, opened(), w.down, w.down_bias);
}

}  // namespace mlxtape::nn
