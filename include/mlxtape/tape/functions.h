// Functions of tensors: run again instead of remembered, and differentiated as a whole.
#pragma once

#include <functional>
#include <utility>
#include <vector>

#include "mlxtape/tape/tape.h"

namespace mlxtape {

// Runs fn now without keeping anything but its inputs, and again when the walk comes by: its activations
// exist only then. fn must compute the same each time: keys of random numbers that it draws by
// KeySequence::next(Tape&) are the same in both runs (Tape::carry). Tracked tensors that it captures
// get their gradients too, and like inputs must not change until then. Results have the gradients of fn's.
std::vector<Tensor> checkpoint(Tape& tape, TapeFn fn, const std::vector<Tensor>& inputs);

// fn: a scalar from inputs. Gives a function of the same inputs that returns the value and the gradients of
// the inputs numbered in of, all if it is empty.
using ScalarFn = std::function<Tensor(Tape&, const std::vector<Tensor>&)>;
using ValueAndGrad = std::function<std::pair<Tensor, std::vector<Tensor>>(
    CommandEncoder&, const std::vector<Tensor>&)>;
ValueAndGrad value_and_grad(ScalarFn fn, std::vector<std::size_t> of = {});

}  // namespace mlxtape
