#include "mlxtape/nn/moe.h"

#include "expect.h"
#include "mlxtape/ops/elementwise.h"
#include "mlxtape/ops/layout.h"
#include "mlxtape/ops/moe_route.h"
#include "run_experts.h"

namespace mlxtape::nn {

Check moe_check(const Tensor& x, const MoeWeights& w, const MoeShape& shape) {
  constexpr const char* kBlock = "moe";
  if (const Check check = expect_tokens(kBlock, x)) return check;
  const std::int64_t width = x.shape().back();
  if (const Check check = expect_weights(kBlock, x, {{"router", w.router, {kAny, width}}})) {
    return check;
  }
  const std::int64_t experts = w.router.shape()[0];
  if (shape.chosen < 1 || shape.chosen > experts) {
    return Error(Errc::kArgument, "moe: chosen must be from 1 to the router's " +
                                      std::to_string(experts) + ", got " +
                                      std::to_string(shape.chosen));
  }
  const SwigluWeights& e = w.experts;
  if (const Check check =
          expect_weights(kBlock, x, {{"experts.gate", e.gate, {experts, kAny, width}}})) {
    return check;
  }
  const std::int64_t inner = e.gate.shape()[1];
  if (const Check check = expect_weights(kBlock, x,
                                         {{"experts.up", e.up, {experts, inner, width}},
                                          {"experts.down", e.down, {experts, width, inner}}})) {
    return check;
  }
  if (const Check check = expect_absent(kBlock,
                                        {{"experts.gate_bias", e.gate_bias},
                                         {"experts.up_bias", e.up_bias},
                                         {"experts.down_bias", e.down_bias}},
                                        "of experts")) {
    return check;
  }
  const SwigluWeights& shared = w.shared;
  if (!w.shared_gate.defined()) {
    return expect_absent(
        kBlock,
        {{"shared.gate", shared.gate}, {"shared.up", shared.up}, {"shared.down", shared.down}},
        "without shared_gate");
  }
  if (const Check check =
          expect_swiglu(kBlock, x, shared, "shared.gate", "shared.up", "shared.down")) {
    return check;
  }
  return expect_weights(kBlock, x, {{"shared_gate", w.shared_gate, {1, width}}});
}

Tensor moe(Tape& tape, const Tensor& x, const MoeWeights& w, const MoeShape& shape,
           Tensor* counts) {
  require(moe_check(x, w, shape));
  const std::int64_t width = x.shape().back();
  const Tensor rows = ops::reshape(tape, x, {x.shape()[0] * x.shape()[1], width});
  const ops::MoeRoute route =
      ops::moe_route(tape, linear(tape, rows, w.router), shape.chosen, {shape.renormalise});
  if (counts != nullptr) *counts = route.counts;
  Tensor y = run_experts(tape, rows, {route.indices, route.scores, route.offsets}, w.experts);
  if (w.shared_gate.defined()) {
    const Tensor open = ops::sigmoid(tape, linear(tape, rows, w.shared_gate));
    y = ops::add(tape, y, ops::multiply(tape, swiglu_network(tape, rows, w.shared), open));
  }
  return ops::reshape(tape, y, x.shape());
}

}  // namespace mlxtape::nn
