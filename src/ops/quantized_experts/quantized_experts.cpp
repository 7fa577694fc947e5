#include "mlxtape/ops/quantized_experts.h"

#include <string>

#include "ops/expect_quantized.h"
#include "quantized_experts_args.h"

namespace mlxtape::ops {

namespace {

constinit const KernelHandle kHidden("quantized_experts_hidden_fwd");
constinit const KernelHandle kOut("quantized_experts_out_fwd");
constinit const KernelHandle kOrder("quantized_experts_order");
constinit const KernelHandle kHiddenBack("quantized_experts_hidden_bwd");
constinit const KernelHandle kXBack("quantized_experts_x_bwd");
constinit const KernelHandle kParamsBack("quantized_experts_params_bwd");

// Which of two ways a device has kernels for: pairs of a token and an expert sorted by their experts, so that each expert's
// codes are read once; or a few pairs each on its own, and for many all weights dequantised.
bool sorts_pairs(const CommandEncoder& encoder) {
  return kOrder.exists(encoder.backend(), DType::kU32);
}

// Pairs for each expert up to which the second way reads codes for each pair. Dequantising costs as much as reading an expert's
// codes about 9 times, and the products come on top.
constexpr std::int64_t kFewPairs = 8;

QuantizedExpertsArgs::Form form_of(const QuantizedWeight& w) {
  return {w.format.bits, w.format.group_size, w.scales.dtype() == DType::kF32 ? 1 : 0};
}

QuantizedExpertsArgs args_of(const Tensor& x, const ExpertRoute& route,
                             const QuantizedExpertWeights& w) {
  return {x.dim(0),        route.indices.dim(1), w.gate.codes.dim(0), x.dim(1), w.gate.codes.dim(1),
          form_of(w.gate), form_of(w.up),        form_of(w.down),     0};
}

QuantizedWeight dense(CommandEncoder& encoder, const QuantizedWeight& w) {
  return {encoder.contiguous(w.codes), encoder.contiguous(w.scales), encoder.contiguous(w.biases),
          w.format.bits, w.format.group_size};
}

ExpertRoute dense(CommandEncoder& encoder, const ExpertRoute& route) {
  return {encoder.contiguous(route.indices), encoder.contiguous(route.scores),
          encoder.contiguous(route.offsets)};
}

// hidden is kept in the type of x where a gradient will read it, else in f32.
ExpertsResult forward_sorted(CommandEncoder& encoder, const Tensor& x, const ExpertRoute& given,
                             const QuantizedExpertWeights& weights, DType hidden) {
  QuantizedExpertsArgs args = args_of(x, given, weights);
  args.wide_hidden = hidden == DType::kF32 ? 1 : 0;
  const std::int64_t pairs = args.tokens * args.chosen;
  ExpertsResult result{encoder.empty_like(x), encoder.empty({pairs, 2, args.inner}, hidden),
                       encoder.empty({pairs}, DType::kU32)};
  if (x.size() == 0 || args.inner == 0) {  // a sum of nothing
    result.y = encoder.zeros(x.shape(), x.dtype());
    return result;
  }
  const Tensor rows = encoder.contiguous(x);
  const ExpertRoute route = dense(encoder, given);
  const QuantizedWeight gate = dense(encoder, weights.gate), up = dense(encoder, weights.up),
                        down = dense(encoder, weights.down);
  encoder.dispatch(kOrder, DType::kU32, args, {route.indices}, {result.order});
  encoder.dispatch(kHidden, x.dtype(), args,
                   {rows, result.order, route.offsets, gate.codes, gate.scales, gate.biases,
                    up.codes, up.scales, up.biases},
                   {result.hidden});
  encoder.dispatch(kOut, x.dtype(), args,
                   {result.hidden, result.order, route.offsets, route.scores, down.codes,
                    down.scales, down.biases},
                   {result.y});
  return result;
}

struct Gradients {
  Tensor dx, dscores;
  DequantizeGradients params[3];  // of gate, up, down
};

// Its gradients: those of scales and biases without ones of the weights.
Gradients backward_sorted(CommandEncoder& encoder, const Tensor& x, const ExpertRoute& given,
                          const QuantizedExpertWeights& weights, const ExpertsResult& result,
                          const Tensor& dy, const ExpertsWanted& wanted) {
  const QuantizedExpertsArgs args = args_of(x, given, weights);
  const QuantizedWeight w[] = {dense(encoder, weights.gate), dense(encoder, weights.up),
                               dense(encoder, weights.down)};
  const auto& [gate, up, down] = w;
  const bool nothing = x.size() == 0 || args.inner == 0;
  const auto room = [&](const Tensor& like) {
    return nothing ? encoder.zeros(like.shape(), like.dtype()) : encoder.empty_like(like);
  };
  Gradients grads;
  grads.dscores = room(given.scores);
  if (wanted.x) grads.dx = room(x);
  for (std::size_t i = 0; wanted.weights && i < 3; ++i) {
    grads.params[i] = {room(w[i].scales), room(w[i].biases)};
  }
  if (nothing) return grads;
  const ExpertRoute route = dense(encoder, given);
  const Tensor rows = encoder.contiguous(x), dy_rows = encoder.contiguous(dy);
  const Tensor d_hidden = encoder.empty_like(result.hidden);
  encoder.dispatch(kHiddenBack, x.dtype(), args,
                   {dy_rows, result.hidden, result.order, route.offsets, route.scores, down.codes,
                    down.scales, down.biases},
                   {d_hidden, grads.dscores});
  if (wanted.x) {
    encoder.dispatch(kXBack, x.dtype(), args,
                     {d_hidden, result.order, route.offsets, gate.codes, gate.scales, gate.biases,
                      up.codes, up.scales, up.biases},
                     {grads.dx});
  }
  if (wanted.weights) {
    encoder.dispatch(
        kParamsBack, x.dtype(), args,
        {rows, dy_rows, result.hidden, d_hidden, result.order, route.offsets, route.scores,
         gate.codes, up.codes, down.codes},
        {grads.params[0].d_scales, grads.params[0].d_biases, grads.params[1].d_scales,
         grads.params[1].d_biases, grads.params[2].d_scales, grads.params[2].d_biases});
  }
  return grads;
}

ExpertWeights dequantized(CommandEncoder& encoder, const QuantizedExpertWeights& w, DType dtype) {
  return {dequantize(encoder, w.gate, dtype), dequantize(encoder, w.up, dtype),
          dequantize(encoder, w.down, dtype)};
}

// The same without sorting, which dequantises all weights and makes their gradients in full.
Gradients backward_dequantized(CommandEncoder& encoder, const Tensor& x, const ExpertRoute& route,
                               const QuantizedExpertWeights& weights, const ExpertsResult& result,
                               const Tensor& dy, const ExpertsWanted& wanted) {
  const ExpertsGradients grads = experts_backward(
      encoder, x, route, dequantized(encoder, weights, x.dtype()), result, dy, wanted);
  if (!wanted.weights) return {grads.dx, grads.dscores, {}};
  return {grads.dx,
          grads.dscores,
          {dequantize_backward(encoder, weights.gate, grads.dgate),
           dequantize_backward(encoder, weights.up, grads.dup),
           dequantize_backward(encoder, weights.down, grads.ddown)}};
}

}  // namespace

Check quantized_experts_check(const Tensor& x, const ExpertRoute& route,
                              const QuantizedExpertWeights& weights) {
  const Tensor& codes = weights.gate.codes;
  if (codes.rank() != 3) {
    return Error(Errc::kShape, "quantized_experts: gate codes must be [E, I, H·bits/32], got " +
                                   to_string(codes.shape()));
  }
  const std::int64_t experts = codes.dim(0), inner = codes.dim(1);
  const std::int64_t width = x.rank() == 2 ? x.dim(1) : 0;
  const auto meta = [&](const Shape& shape) {
    return Tensor::meta(shape, x.dtype(), x.backend());
  };
  const Tensor in = meta({experts, inner, width}), out = meta({experts, width, inner});
  if (const Check check = experts_check(x, route, {in, in, out})) return check;
  const Beside first{"quantized_experts", "x", x};
  const struct {
    const char* name;
    const QuantizedWeight& w;
    std::int64_t rows, length;
  } all[] = {{"gate ", weights.gate, inner, width},
             {"up ", weights.up, inner, width},
             {"down ", weights.down, width, inner}};
  for (const auto& [name, w, rows, length] : all) {
    if (const Check check = expect_quantized(first, name, w, {experts, rows}, length, x.dtype())) {
      return check;
    }
  }
  return std::nullopt;
}

Tensor quantized_experts(CommandEncoder& encoder, const Tensor& x, const ExpertRoute& route,
                         const QuantizedExpertWeights& weights) {
  require(quantized_experts_check(x, route, weights));
  const QuantizedExpertsArgs args = args_of(x, route, weights);
  const std::int64_t pairs = args.tokens * args.chosen;
  if (sorts_pairs(encoder)) {
    return forward_sorted(encoder, x, route, weights, DType::kF32).y;
  }
  if (pairs == 0 || args.width == 0 || args.inner == 0) {
    return encoder.zeros(x.shape(), x.dtype());
  }
  if (pairs > kFewPairs * args.experts) {
    return experts(encoder, x, route, dequantized(encoder, weights, x.dtype())).y;
  }
  const Tensor rows = encoder.contiguous(x), indices = encoder.contiguous(route.indices);
  const Tensor scores = encoder.contiguous(route.scores);
  const QuantizedWeight gate = dense(encoder, weights.gate), up = dense(encoder, weights.up),
                        down = dense(encoder, weights.down);
  const Tensor active = encoder.empty({pairs, args.inner}, DType::kF32);
  Tensor y = encoder.empty_like(x);
  encoder.dispatch(
      kHidden, x.dtype(), args,
      {rows, indices, gate.codes, gate.scales, gate.biases, up.codes, up.scales, up.biases},
      {active});
  encoder.dispatch(kOut, x.dtype(), args,
                   {active, indices, scores, down.codes, down.scales, down.biases}, {y});
  return y;
}

namespace {

void quantized_experts_pullback(Pullback& pullback) {
  // x, indices, scores, offsets, hidden, order; then codes, scales, biases of gate, up, down
  const Saved& saved = pullback.saved();
  CommandEncoder& encoder = pullback.encoder();
  const auto& args = saved.args<QuantizedExpertsArgs>();
  const QuantizedExpertsArgs::Form forms[] = {args.gate, args.up, args.down};
  const auto weight = [&](std::size_t i) {
    return QuantizedWeight{saved[6 + 3 * i], saved[7 + 3 * i], saved[8 + 3 * i], forms[i].bits,
                           forms[i].group};
  };
  // Inputs: x, scores, then scales and biases of gate, up, down.
  ExpertsWanted wanted{pullback.needs(0), false};
  for (std::size_t i = 2; i < 8; ++i) wanted.weights = wanted.weights || pullback.needs(i);
  const ExpertRoute route{saved[1], saved[2], saved[3]};
  const QuantizedExpertWeights weights{weight(0), weight(1), weight(2)};
  const ExpertsResult result{{}, saved[4], saved[5]};
  const bool sorted = sorts_pairs(encoder);
  const Gradients grads =
      sorted ? backward_sorted(encoder, saved[0], route, weights, result, pullback.grad(), wanted)
             : backward_dequantized(encoder, saved[0], route, weights, result, pullback.grad(),
                                    wanted);
  if (wanted.x) pullback.give(0, grads.dx);
  pullback.give(1, grads.dscores);
  for (std::size_t i = 0; i < 3; ++i) {
    if (!pullback.needs(2 + 2 * i) && !pullback.needs(3 + 2 * i)) continue;
    pullback.give(2 + 2 * i, grads.params[i].d_scales);
    pullback.give(3 + 2 * i, grads.params[i].d_biases);
  }
}

}  // namespace

Tensor quantized_experts(Tape& tape, const Tensor& x, const ExpertRoute& route,
                         const QuantizedExpertWeights& weights) {
  const auto& [gate, up, down] = weights;
  if (!tape.wants({x, route.scores, gate.scales, gate.biases, up.scales, up.biases, down.scales,
                   down.biases})) {
    return quantized_experts(tape.encoder(), x, route, weights);
  }
  require(quantized_experts_check(x, route, weights));
  CommandEncoder& encoder = tape.encoder();
  const bool sorted = sorts_pairs(encoder);
  ExpertsResult result = sorted
                             ? forward_sorted(encoder, x, route, weights, x.dtype())
                             : experts(encoder, x, route, dequantized(encoder, weights, x.dtype()));
  tape.record(
      "quantized_experts", quantized_experts_pullback,
      {x, route.scores, gate.scales, gate.biases, up.scales, up.biases, down.scales, down.biases},
      {&result.y},
      Saved({x, route.indices, route.scores, route.offsets, result.hidden, result.order, gate.codes,
             gate.scales, gate.biases, up.codes, up.scales, up.biases, down.codes, down.scales,
             down.biases},
            args_of(x, route, weights)));
  return result.y;
}

}  // namespace mlxtape::ops
