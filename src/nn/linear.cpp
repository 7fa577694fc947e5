#include "mlxtape/nn/linear.h"

#include "expect.h"
#include "mlxtape/ops/elementwise.h"
#include "mlxtape/ops/layout.h"
#include "mlxtape/ops/matmul.h"

namespace mlxtape::nn {

Check linear_check(const Tensor& x, const Tensor& w) {
  if (x.rank() == 0 || w.rank() != 2 || w.shape()[1] != x.shape().back()) {
    return Error(Errc::kShape, "linear: w must be [out, in] for x [..., in], got " +
                                   to_string(w.shape()) + " and " + to_string(x.shape()));
  }
  return std::nullopt;
}

Tensor linear(Tape& tape, const Tensor& x, const Tensor& w) {
  require(linear_check(x, w));
  Shape shape = x.shape();
  const Tensor rows =
      ops::reshape(tape, x, {*element_count(Shape(shape.begin(), shape.end() - 1)), shape.back()});
  shape[shape.rank() - 1] = w.shape()[0];
  return ops::reshape(tape, ops::matmul(tape, rows, ops::transpose(tape, w, {1, 0})), shape);
}

Check swiglu_network_check(const Tensor& x, const SwigluWeights& w) {
  if (x.rank() == 0) {
    return Error(Errc::kShape, "swiglu_network: x must be [..., width], got []");
  }
  return expect_swiglu("swiglu_network", x, w, "gate", "up", "down");
}

Tensor swiglu_network(Tape& tape, const Tensor& x, const SwigluWeights& w) {
  require(swiglu_network_check(x, w));
  return linear(tape, ops::swiglu(tape, linear(tape, x, w.gate), linear(tape, x, w.up)), w.down);
}

}  // namespace mlxtape::nn
