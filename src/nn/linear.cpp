#include "mlxtape/nn/linear.h"

#include "expect.h"
#include "linear_node.h"
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

// y with an adapter that has dropout, and so an x of its own.
Tensor with_adapter(Tape& tape, const Tensor& x, const Tensor& y, const Adapter& adapter) {
  Tensor rows = ops::reshape(tape, x, {y.size() / y.shape().back(), x.shape().back()});
  rows = ops::dropout(tape, rows, adapter.dropout, adapter.key);
  const Tensor seen = ops::matmul(tape, rows, ops::cast(tape, adapter.a, x.dtype()));
  ops::MatmulOptions options;
  options.residual = ops::reshape(tape, y, {rows.dim(0), y.shape().back()});
  const Tensor all = ops::matmul(tape, ops::multiply(tape, seen, adapter.scale),
                                 ops::cast(tape, adapter.b, x.dtype()), options);
  return ops::reshape(tape, all, y.shape());
}

}  // namespace

Tensor linear(Tape& tape, const Tensor& x, const Weight& w, const Tensor& bias) {
  return linears(tape, x, {{w, bias}}).front();
}

std::vector<Tensor> linears(Tape& tape, const Tensor& x, std::initializer_list<Linear> all) {
  if (all.size() < 1 || all.size() > kMostLinears) {
    throw Error(Errc::kArgument, "linears: from 1 to " + std::to_string(kMostLinears) +
                                     " weights, got " + std::to_string(all.size()));
  }
  std::vector<Linear> in_node(all);
  for (Linear& one : in_node) {
    require(linear_check(x, one.weight, one.bias));
    if (one.weight.adapter.dropout > 0) one.weight.adapter = {};
  }
  std::vector<Tensor> ys = linear_node(tape, x, in_node);
  for (std::size_t i = 0; i < ys.size(); ++i) {
    const Adapter& adapter = all.begin()[i].weight.adapter;
    if (adapter.dropout > 0 && ys[i].size() > 0) ys[i] = with_adapter(tape, x, ys[i], adapter);
  }
  return ys;
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
  const std::vector<Tensor> both = linears(tape, x, {{w.gate, w.gate_bias}, {w.up, w.up_bias}});
  const Tensor &gate = both[0], &up = both[1];
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
