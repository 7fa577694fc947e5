#include "mlxtape/ops/experts.h"

#include <string>

#include "experts_args.h"
#include "ops/expect.h"
#include "ops/views.h"

namespace mlxtape::ops {

namespace {

constinit const KernelHandle kOrder("experts_order");
constinit const KernelHandle kHidden("experts_hidden_fwd");
constinit const KernelHandle kOut("experts_out_fwd");
constinit const KernelHandle kHiddenBack("experts_hidden_bwd");
constinit const KernelHandle kXBack("experts_x_bwd");
constinit const KernelHandle kWeightsBack("experts_weights_bwd");

constexpr std::int64_t kMostExperts = 1024, kMostChosen = 64;

Error wrong(Errc code, const std::string& what) { return {code, "experts: " + what}; }

Check expect_tensor(const Tensor& x, const char* name, const Tensor& t, const Shape& shape,
                    DType dtype) {
  return ops::expect_tensor(Beside{"experts", "x", x}, name, t, shape, dtype);
}

ExpertsArgs args_of(const Tensor& x, const ExpertRoute& route, const ExpertWeights& weights) {
  return {x.dim(0), route.indices.dim(1), weights.gate.dim(0), x.dim(1), weights.gate.dim(1)};
}

// What the kernels are given, without gaps, and what they multiply in packs.
struct Dense {
  Tensor x, indices, scores, offsets, gate, up, down;
  Dense(CommandEncoder& encoder, const Tensor& rows, const ExpertRoute& route,
        const ExpertWeights& weights)
      : x(in_packs(encoder, rows)),
        indices(encoder.contiguous(route.indices)),
        scores(encoder.contiguous(route.scores)),
        offsets(encoder.contiguous(route.offsets)),
        gate(in_packs(encoder, weights.gate)),
        up(in_packs(encoder, weights.up)),
        down(in_packs(encoder, weights.down)) {}
};

Shape hidden_shape(const ExpertsArgs& args) { return {args.tokens * args.chosen, 2, args.inner}; }

// From a kernel to a later one.
Tensor room_for_active(CommandEncoder& encoder, const ExpertsArgs& args, DType dtype) {
  const bool kept = encoder.device().traits().keeps_half_activations && size_of(dtype) == 2;
  return encoder.empty({kept ? args.tokens * args.chosen : 0, args.inner}, dtype);
}

}  // namespace

Check experts_check(const Tensor& x, const ExpertRoute& route, const ExpertWeights& weights) {
  if (!is_kernel_float(x.dtype())) {
    return wrong(Errc::kDType,
                 std::string("x must be f32, f16 or bf16, got ") + name_of(x.dtype()));
  }
  if (x.rank() != 2) return wrong(Errc::kShape, "x must be [T, H], got " + to_string(x.shape()));
  const Tensor& gate = weights.gate;
  if (gate.rank() != 3 || gate.dim(2) != x.dim(1) || gate.dim(0) < 1 ||
      gate.dim(0) > kMostExperts) {
    return wrong(Errc::kShape, "gate must be [E, I, H] with H = " + std::to_string(x.dim(1)) +
                                   " and E from 1 to 1024, got " + to_string(gate.shape()));
  }
  const std::int64_t experts = gate.dim(0), inner = gate.dim(1);
  const Tensor& indices = route.indices;
  if (indices.rank() != 2 || indices.dim(0) != x.dim(0) || indices.dim(1) < 1 ||
      indices.dim(1) > kMostChosen) {
    return wrong(Errc::kShape, "indices must be [T, k] with T = " + std::to_string(x.dim(0)) +
                                   " and k from 1 to 64, got " + to_string(indices.shape()));
  }
  const std::int64_t chosen = indices.dim(1);
  if (x.dim(0) * chosen > 0xffffffffLL) {
    return wrong(Errc::kShape, "T·k must be below 2^32, got " + std::to_string(x.dim(0)) + "·" +
                                   std::to_string(chosen));
  }
  const struct {
    const char* name;
    const Tensor& t;
    Shape shape;
    DType dtype;
  } others[] = {{"gate", gate, gate.shape(), x.dtype()},
                {"up", weights.up, gate.shape(), x.dtype()},
                {"down", weights.down, {experts, x.dim(1), inner}, x.dtype()},
                {"indices", indices, indices.shape(), DType::kU32},
                {"scores", route.scores, indices.shape(), x.dtype()},
                {"offsets", route.offsets, {experts + 1}, DType::kU32}};
  for (const auto& [name, t, shape, dtype] : others) {
    if (const Check check = expect_tensor(x, name, t, shape, dtype)) return check;
  }
  return std::nullopt;
}

Check experts_backward_check(const Tensor& x, const ExpertRoute& route,
                             const ExpertWeights& weights, const ExpertsResult& result,
                             const Tensor& dy) {
  if (const Check check = experts_check(x, route, weights)) return check;
  const ExpertsArgs args = args_of(x, route, weights);
  if (const Check check =
          expect_tensor(x, "hidden", result.hidden, hidden_shape(args), x.dtype())) {
    return check;
  }
  if (const Check check =
          expect_tensor(x, "order", result.order, {args.tokens * args.chosen}, DType::kU32)) {
    return check;
  }
  return expect_tensor(x, "dy", dy, x.shape(), x.dtype());
}

ExpertsResult experts(CommandEncoder& encoder, const Tensor& x, const ExpertRoute& route,
                      const ExpertWeights& weights) {
  require(experts_check(x, route, weights));
  const ExpertsArgs args = args_of(x, route, weights);
  ExpertsResult result{encoder.empty_like(x), encoder.empty(hidden_shape(args), x.dtype()),
                       encoder.empty({args.tokens * args.chosen}, DType::kU32)};
  if (args.tokens == 0 || args.width == 0) return result;
  if (args.inner == 0) {  // a sum of nothing
    result.y = encoder.zeros(x.shape(), x.dtype());
    return result;
  }
  const Dense in(encoder, x, route, weights);
  encoder.dispatch(kOrder, DType::kU32, args, {in.indices, in.offsets}, {result.order});
  const Tensor active = room_for_active(encoder, args, x.dtype());
  encoder.dispatch(kHidden, x.dtype(), args, {in.x, result.order, in.offsets, in.gate, in.up},
                   {result.hidden, active});
  encoder.dispatch(kOut, x.dtype(), args,
                   {result.hidden, result.order, in.offsets, in.scores, in.down, active},
                   {result.y});
  return result;
}

ExpertsGradients experts_backward(CommandEncoder& encoder, const Tensor& x,
                                  const ExpertRoute& route, const ExpertWeights& weights,
                                  const ExpertsResult& result, const Tensor& dy,
                                  const ExpertsWanted& wanted) {
  require(experts_backward_check(x, route, weights, result, dy));
  const ExpertsArgs args = args_of(x, route, weights);
  ExpertsGradients grads;
  const bool nothing = args.tokens == 0 || args.width == 0 || args.inner == 0;
  const auto room = [&](const Tensor& like) {
    return nothing ? encoder.zeros(like.shape(), like.dtype()) : encoder.empty_like(like);
  };
  grads.dscores = room(route.scores);
  if (wanted.x) grads.dx = room(x);
  if (wanted.weights) {
    grads.dgate = room(weights.gate);
    grads.dup = room(weights.up);
    grads.ddown = room(weights.down);
  }
  if (nothing) return grads;
  const Dense in(encoder, x, route, weights);
  const Tensor dy_rows = in_packs(encoder, dy);
  const Tensor hidden = in_packs(encoder, result.hidden), order = encoder.contiguous(result.order);
  const Tensor d_hidden = encoder.empty(hidden_shape(args), x.dtype());
  const Tensor active = room_for_active(encoder, args, x.dtype());
  encoder.dispatch(kHiddenBack, x.dtype(), args,
                   {dy_rows, hidden, order, in.offsets, in.scores, in.down},
                   {d_hidden, grads.dscores, active});
  if (wanted.x) {
    encoder.dispatch(kXBack, x.dtype(), args, {d_hidden, order, in.offsets, in.gate, in.up},
                     {grads.dx});
  }
  if (wanted.weights) {
    encoder.dispatch(kWeightsBack, x.dtype(), args,
                     {in.x, dy_rows, hidden, d_hidden, order, in.offsets, in.scores, active},
                     {grads.dgate, grads.dup, grads.ddown});
  }
  return grads;
}

namespace {

void experts_pullback(Pullback& pullback) {
  // x, indices, scores, offsets, gate, up, down, hidden, order
  const Saved& saved = pullback.saved();
  const ExpertsWanted wanted{pullback.needs(0),
                             pullback.needs(2) || pullback.needs(3) || pullback.needs(4)};
  const ExpertsGradients grads = experts_backward(
      pullback.encoder(), saved[0], {saved[1], saved[2], saved[3]}, {saved[4], saved[5], saved[6]},
      {{}, saved[7], saved[8]}, pullback.grad(), wanted);
  if (wanted.x) pullback.give(0, grads.dx);
  pullback.give(1, grads.dscores);
  if (wanted.weights) {
    pullback.give(2, grads.dgate);
    pullback.give(3, grads.dup);
    pullback.give(4, grads.ddown);
  }
}

}  // namespace

Tensor experts(Tape& tape, const Tensor& x, const ExpertRoute& route,
               const ExpertWeights& weights) {
  ExpertsResult result = experts(tape.encoder(), x, route, weights);
  if (tape.wants({x, route.scores, weights.gate, weights.up, weights.down})) {
    tape.record("experts", experts_pullback,
                {x, route.scores, weights.gate, weights.up, weights.down}, {&result.y},
                Saved({x, route.indices, route.scores, route.offsets, weights.gate, weights.up,
                       weights.down, result.hidden, result.order}));
  }
  return result.y;
}

}  // namespace mlxtape::ops
