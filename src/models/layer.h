// One layer of a model, with or without what came before.
#pragma once

#include "mlxtape/models/cache.h"
#include "mlxtape/models/model.h"

namespace mlxtape::models {

// A layer's result is not added up yet: the norm of the next one does that as it reads both. h + more is what the
// layer gives.
struct Stream {
  Tensor more, h;  // [B, L, width]; more is not defined before the first layer
  Tensor routed =
      {};  // [experts] u32: tokens that the layer sent to each; not defined where it has none
};

// The tokens before, and how many there are.
struct Past {
  enum class Mode : std::uint8_t {
    kPrefill,  // some tokens of one sequence, after `start` of them
    kStep,     // one token of each sequence, after `lengths`
  };
  Mode mode = Mode::kPrefill;
  Cache cache = {};  // changed in place
  std::int64_t start = 0;
  Tensor lengths = {};  // [B] i32, on the device
};

// past: null in training. weights: null for the model's own.
Stream run_layer(Tape& tape, const Model& model, std::int64_t layer, const Stream& in,
                 const Past* past = nullptr, const LayerWeights* weights = nullptr);

// rms_norm(h + more).
Tensor run_norm(Tape& tape, const Model& model, const Stream& in);

}  // namespace mlxtape::models
