// One layer of a model, with or without what came before.
#pragma once

#include "mlxtape/models/cache.h"
#include "mlxtape/models/model.h"
#include "mlxtape/nn/mode.h"

namespace mlxtape::models {

// A layer's result is not added up yet: the norm of the next one does that as it reads both. h + more is what the
// layer gives.
struct Stream {
  Tensor more, h;  // [B, L, width]; more is not defined before the first layer
  Tensor routed =
      {};  // [experts] u32: tokens that the layer sent to each; not defined where it has none
};

// What a layer is run for, and the tokens before.
struct Past {
  nn::Mode mode = nn::Mode::kTrain;
  Cache cache = {};        // changed in place; of no use in training
  std::int64_t start = 0;  // prefill, of one sequence: after so many tokens
  Tensor lengths = {};     // step: [B] i32, on the device
};

// weights: null for the model's own.
Stream run_layer(Tape& tape, const Model& model, std::int64_t layer, const Stream& in,
                 const Past& past = {}, const LayerWeights* weights = nullptr);

// e·embedding[tokens].
Stream run_embedding(Tape& tape, const Model& model, const Tensor& tokens);

// l·rms_norm(h + more), which the head takes.
Tensor run_norm(Tape& tape, const Model& model, const Stream& in);

}  // namespace mlxtape::models
