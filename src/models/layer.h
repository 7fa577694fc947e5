// One layer of a model, with or without what came before.
#pragma once

#include "mlxtape/models/model.h"

namespace mlxtape::models {

// A layer's result is not added up yet: the norm of the next one does that as it reads both. h + more is what the
// layer gives.
struct Stream {
  Tensor more, h;  // [B, L, width]; more is not defined before the first layer
  Tensor routed =
      {};  // [experts] u32: tokens that the layer sent to each; not defined where it has none
};

// Where a layer keeps the past. Of delta nets, after is where the state goes after more than one token.
struct LayerPast {
  nn::SelfAttentionCache attention;
  nn::DeltaNetState delta;
  bool delta_is_new = false;  // nothing came before
};

nn::DeltaNetShape delta_shape(const Config& config);

// past: null in training. weights: null for the model's own.
Stream run_layer(Tape& tape, const Model& model, std::int64_t layer, const Stream& in,
                 const LayerPast* past = nullptr, const LayerWeights* weights = nullptr);

// rms_norm(h + more).
Tensor run_norm(Tape& tape, const Model& model, const Stream& in);

}  // namespace mlxtape::models
