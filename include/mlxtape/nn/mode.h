// Mode: what a block is run for, and so what there is of the tokens before its own.
#pragma once

#include <cstdint>

namespace mlxtape::nn {

enum class Mode : std::uint8_t {
  kTrain,    // whole sequences, of which nothing came before; the only one with a gradient
  kPrefill,  // more tokens of sequences of which as many came before, a number that the host knows
  kStep,  // the next token of sequences of which any number came before, numbers that are on the device
};

}  // namespace mlxtape::nn
