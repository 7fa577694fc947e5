#include "mlxtape/nn/moe.h"

#include "expect.h"
#include "mlxtape/ops/elementwise.h"
#include "mlxtape/ops/layout.h"
#include "mlxtape/ops/moe_route.h"

namespace mlxtape::nn {

Check moe_check(const Tensor& x, const MoeWeights& w) {
  if (const Check check = expect_tokens("moe", x)) return check;
  const std::int64_t width = x.shape().back();
  const std::int64_t experts = w.router.rank() == 2 ? w.router.shape()[0] : 1;
  const std::int64_t inner = w.experts.gate.rank() == 3 ? w.experts.gate.shape()[1] : 1;
  const std::int64_t shared = w.shared.gate.rank() == 2 ? w.shared.gate.shape()[0] : 1;
  const bool has_shared = w.shared_gate.defined();
  return expect_weights("moe", x,
                        {{true, "router", w.router, {experts, width}},
                         {true, "experts.gate", w.experts.gate, {experts, inner, width}},
                         {true, "experts.up", w.experts.up, {experts, inner, width}},
                         {true, "experts.down", w.experts.down, {experts, width, inner}},
                         {has_shared, "shared.gate", w.shared.gate, {shared, width}},
                         {has_shared, "shared.up", w.shared.up, {shared, width}},
                         {has_shared, "shared.down", w.shared.down, {width, shared}},
                         {has_shared, "shared_gate", w.shared_gate, {1, width}}});
}

Tensor moe(Tape& tape, const Tensor& x, const MoeWeights& w, const MoeShape& shape) {
  require(moe_check(x, w));
  const std::int64_t width = x.shape().back();
  const Tensor rows = ops::reshape(tape, x, {x.shape()[0] * x.shape()[1], width});
  const ops::MoeRoute route =
      ops::moe_route(tape, linear(tape, rows, w.router), shape.chosen, {shape.renormalise});
  Tensor y = ops::experts(tape, rows, {route.indices, route.scores, route.offsets}, w.experts);
  if (w.shared_gate.defined()) {
    const Tensor open = ops::sigmoid(tape, linear(tape, rows, w.shared_gate));
    y = ops::add(tape, y, ops::multiply(tape, swiglu_network(tape, rows, w.shared), open));
  }
  return ops::reshape(tape, y, x.shape());
}

}  // namespace mlxtape::nn
