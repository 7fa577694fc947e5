#include "run_experts.h"

#include <array>

#include "mlxtape/ops/elementwise.h"
#include "mlxtape/ops/layout.h"
#include "mlxtape/ops/matmul.h"
#include "mlxtape/ops/quantized_experts.h"
#include "mlxtape/ops/scan.h"
#include "mlxtape/ops/take.h"

namespace mlxtape::nn {

namespace {

constexpr std::size_t kWeights = 3;  // gate, up, down

// What a weight's tensors do not say of it.
struct Forms {
  struct Form {
    int bits, group;  // 0: not quantised
    float scale;
  };
  Form of[kWeights];
};

// The tensors of a weight, in the order in which they are saved and get their gradients.
enum Part : std::uint8_t { kA, kB, kNumbers, kBiases, kCodes, kParts };
constexpr std::size_t kWithGradient = kCodes;  // the parts before it
using Parts = std::array<Tensor, kParts>;

Parts parts_of(const Weight& w) {
  if (!w.is_quantized()) return {w.adapter.a, w.adapter.b, w.plain, {}, {}};
  return {w.adapter.a, w.adapter.b, w.quantized.scales, w.quantized.biases, w.quantized.codes};
}

ops::QuantizedWeight quantized_of(const Parts& w, const Forms::Form& form) {
  return {w[kCodes], w[kNumbers], w[kBiases], form.bits, form.group};
}

// w + scale·b·a, one expert after the other.
Tensor effective(CommandEncoder& encoder, const Parts& w, const Forms::Form& form, DType dtype) {
  const Tensor numbers =
      form.bits == 0 ? w[kNumbers] : ops::dequantize(encoder, quantized_of(w, form), dtype);
  if (!w[kA].defined()) return numbers;
  ops::MatmulOptions options;
  options.residual = numbers;
  return ops::matmul(encoder, ops::multiply(encoder, w[kB], form.scale), w[kA], options);
}

using All = std::array<Parts, kWeights>;

ops::ExpertWeights effective(CommandEncoder& encoder, const All& w, const Forms& forms,
                             DType dtype) {
  return {effective(encoder, w[0], forms.of[0], dtype),
          effective(encoder, w[1], forms.of[1], dtype),
          effective(encoder, w[2], forms.of[2], dtype)};
}

// Each pair as an expert of its own, whose weights are those of the one that was chosen.
Tensor chosen_alone(CommandEncoder& encoder, const Tensor& x, const ops::ExpertRoute& route,
                    const All& w, const Forms& forms) {
  const std::int64_t pairs = route.indices.size();
  const Tensor chosen = encoder.contiguous(route.indices).reshape({pairs});
  All taken = w;
  for (Parts& parts : taken) {
    for (Tensor& t : parts) {
      if (t.defined()) t = ops::take(encoder, t, chosen, 0);
    }
  }
  const Tensor ones = encoder.full({pairs + 1}, DType::kU32, 1);
  const Tensor numbers = ops::cumsum(encoder, ones, 0, false, false);  // 0 … pairs
  const ops::ExpertRoute own{numbers.slice(0, 0, pairs).reshape(route.indices.shape()),
                             route.scores, numbers};
  return ops::experts(encoder, x, own, effective(encoder, taken, forms, x.dtype())).y;
}

// Of one weight, from dw: da = scale·bᵀ·dw, db = scale·dw·aᵀ, and what the weight itself asks for.
void give_gradients(Pullback& pullback, std::size_t first, const Parts& w, const Forms::Form& form,
                    const Tensor& dw) {
  CommandEncoder& encoder = pullback.encoder();
  const auto turned = [&](const Tensor& t) {
    return ops::transpose(encoder, t, {0, 2, 1});
  };
  if (pullback.needs(first + kA)) {
    pullback.give(first + kA,
                  ops::matmul(encoder, turned(ops::multiply(encoder, w[kB], form.scale)), dw));
  }
  if (pullback.needs(first + kB)) {
    pullback.give(first + kB,
                  ops::matmul(encoder, dw, turned(ops::multiply(encoder, w[kA], form.scale))));
  }
  const bool numbers = pullback.needs(first + kNumbers), biases = pullback.needs(first + kBiases);
  if (!numbers && !biases) return;
  if (form.bits == 0) {
    pullback.give(first + kNumbers, dw);
    return;
  }
  const auto sums = ops::dequantize_backward(encoder, quantized_of(w, form), dw);
  if (numbers) pullback.give(first + kNumbers, sums.d_scales);
  if (biases) pullback.give(first + kBiases, sums.d_biases);
}

// Saved: x, the route, hidden, order, then the parts of gate, up and down.
constexpr std::size_t kSavedBefore = 6;

void adapted_experts_pullback(Pullback& pullback) {
  const Saved& saved = pullback.saved();
  const auto& forms = saved.args<Forms>();
  All w;
  ops::ExpertsWanted wanted{pullback.needs(0), false};
  for (std::size_t i = 0; i < kWeights; ++i) {
    for (std::size_t p = 0; p < kParts; ++p) w[i][p] = saved[kSavedBefore + kParts * i + p];
    for (std::size_t p = 0; p < kWithGradient; ++p) {
      wanted.weights = wanted.weights || pullback.needs(2 + kWithGradient * i + p);
    }
  }
  const ops::ExpertsGradients grads =
      ops::experts_backward(pullback.encoder(), saved[0], {saved[1], saved[2], saved[3]},
                            effective(pullback.encoder(), w, forms, saved[0].dtype()),
                            {{}, saved[4], saved[5]}, pullback.grad(), wanted);
  if (wanted.x) pullback.give(0, grads.dx);
  if (pullback.needs(1)) pullback.give(1, grads.dscores);
  if (!wanted.weights) return;
  const Tensor dw[] = {grads.dgate, grads.dup, grads.ddown};
  for (std::size_t i = 0; i < kWeights; ++i) {
    give_gradients(pullback, 2 + kWithGradient * i, w[i], forms.of[i], dw[i]);
  }
}

Tensor adapted_experts(Tape& tape, const Tensor& x, const ops::ExpertRoute& route,
                       const SwigluWeights& weights) {
  CommandEncoder& encoder = tape.encoder();
  All w;
  Forms forms{};
  std::vector<TensorRef> inputs{x, route.scores};
  std::size_t at = 0;
  for (const Weight* weight : {&weights.gate, &weights.up, &weights.down}) {
    w[at] = parts_of(*weight);
    for (const Part part : {kA, kB}) {
      if (w[at][part].defined()) w[at][part] = ops::cast(tape, w[at][part], x.dtype());
    }
    for (std::size_t p = 0; p < kWithGradient; ++p) inputs.emplace_back(w[at][p]);
    const bool quantized = weight->is_quantized();
    forms.of[at++] = {quantized ? weight->quantized.format.bits : 0,
                      quantized ? weight->quantized.format.group_size : 0, weight->adapter.scale};
  }
  if (!tape.wants(inputs)) {
    const std::int64_t experts = weights.gate.shape()[0];
    if (route.indices.size() < experts) return chosen_alone(encoder, x, route, w, forms);
    return ops::experts(encoder, x, route, effective(encoder, w, forms, x.dtype())).y;
  }
  ops::ExpertsResult result =
      ops::experts(encoder, x, route, effective(encoder, w, forms, x.dtype()));
  std::vector<Tensor> saved{x,           route.indices, route.scores, route.offsets, result.hidden,
                            result.order};
  for (const Parts& parts : w) saved.insert(saved.end(), parts.begin(), parts.end());
  Tensor* const outputs[] = {&result.y};
  tape.record("adapted_experts", adapted_experts_pullback, inputs, outputs, Saved(saved, forms));
  return result.y;
}

}  // namespace

Tensor run_experts(Tape& tape, const Tensor& x, const ops::ExpertRoute& route,
                   const SwigluWeights& w) {
  if (w.gate.adapter.defined() || w.up.adapter.defined() || w.down.adapter.defined()) {
    return adapted_experts(tape, x, route, w);
  }
  if (w.gate.is_quantized() && w.up.is_quantized() && w.down.is_quantized()) {
    return ops::quantized_experts(tape, x, route,
                                  {w.gate.quantized, w.up.quantized, w.down.quantized});
  }
  return ops::experts(
      tape, x, route,
      {dequantized(tape, w.gate), dequantized(tape, w.up), dequantized(tape, w.down)});
}

}  // namespace mlxtape::nn
