#include "mlxtape/models/model.h"

#include "layer.h"
#include "mlxtape/nn/head_loss.h"
#include "mlxtape/ops/cross_entropy.h"
#include "mlxtape/ops/elementwise.h"
#include "mlxtape/ops/layout.h"
#include "mlxtape/ops/linear_loss.h"
#include "mlxtape/tape/functions.h"

namespace mlxtape::models {

namespace {

void check_tokens(const Tensor& tokens, const char* name) {
  if (tokens.rank() != 2 || tokens.dtype() != DType::kI32) {
    throw Error(Errc::kShape, std::string("model: ") + name + " must be [batch, tokens] i32, got " +
                                  to_string(tokens.shape()) + " " + name_of(tokens.dtype()));
  }
}

using WeightsOf = std::function<LayerWeights(Tape& tape, std::int64_t layer)>;

Stream run_with(Tape& tape, const Model& model, std::int64_t layer, const Stream& in,
                const WeightsOf& weights) {
  if (!weights) return run_layer(tape, model, layer, in);
  const LayerWeights own = weights(tape, layer);
  return run_layer(tape, model, layer, in, {}, &own);
}

// The layer on an inner tape: what it remembered is gone until the walk comes by.
Stream run_again_later(Tape& tape, const Model& model, std::int64_t layer, const Stream& in,
                       const WeightsOf& weights) {
  std::vector<Tensor> inputs{in.h};
  if (in.more.defined()) inputs.push_back(in.more);
  const auto out = checkpoint(
      tape,
      [&model, layer, weights](Tape& inner, const std::vector<Tensor>& x) {
        const Stream stream =
            run_with(inner, model, layer, {x.size() > 1 ? x[1] : Tensor(), x[0]}, weights);
        return std::vector<Tensor>{stream.more, stream.h};
      },
      inputs);
  return {out[0], out[1]};
}

}  // namespace

Tensor hidden(Tape& tape, const Model& model, const Tensor& tokens, const HiddenOptions& options) {
  check_tokens(tokens, "tokens");
  if (options.checkpoint && options.routed) {
    throw Error(
        Errc::kArgument,
        "model: routed must not be given together with checkpoint (activation checkpointing)");
  }
  Stream stream = run_embedding(tape, model, tokens);
  for (std::int64_t l = 0; l < model.config.plan.layer_count(); ++l) {
    stream = options.checkpoint ? run_again_later(tape, model, l, stream, options.weights)
                                : run_with(tape, model, l, stream, options.weights);
    if (options.seen) options.seen(l, ops::add(tape, stream.h, stream.more));
    if (options.routed && stream.routed.defined()) options.routed(l, stream.routed);
  }
  return run_norm(tape, model, stream);
}

Tensor logits(Tape& tape, const Model& model, const Tensor& hidden) {
  return nn::linear(tape, hidden, model.head());
}

Tensor loss(Tape& tape, const Model& model, const Tensor& tokens, const Tensor& targets,
            const HiddenOptions& options) {
  check_tokens(targets, "targets");
  if (!(targets.shape() == tokens.shape())) {
    throw Error(Errc::kShape, "model: targets must have the shape of tokens, " +
                                  to_string(tokens.shape()) + ", got " +
                                  to_string(targets.shape()));
  }
  const std::int64_t rows = tokens.size();
  const Tensor h =
      ops::reshape(tape, hidden(tape, model, tokens, options), {rows, model.config.plan.width});
  ops::CrossEntropyOptions how;
  how.reduction = ops::Reduction::kMean;
  how.ignore_index = -1;
  const Tensor flat = targets.reshape({rows});
  if (model.head().adapter.defined()) {
    return ops::cross_entropy(tape, logits(tape, model, h), flat, how);
  }
  if (model.head().is_quantized()) return nn::head_cross_entropy(tape, h, model.head(), flat, how);
  return ops::linear_cross_entropy(tape, h, model.head().plain, flat, how);
}

}  // namespace mlxtape::models
