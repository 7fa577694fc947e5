#include <algorithm>
#include <utility>

#include "mlxtape/tape/tape.h"
#include "tape_impl.h"

namespace mlxtape {

namespace {

// The node's inputs are what fn uses of what the tape tracks, wherever it got it from: the first ones among
// its arguments' or captured. Saved are the arguments, so a change of one of them is noticed.
struct Kept {
  TapeFn fn;
  std::vector<Tensor> uses;  // in the order of the node's inputs
};

void checkpoint_backward(Pullback& pullback) {
  const auto kept = std::static_pointer_cast<const Kept>(pullback.saved().object);
  std::vector<Tensor> arguments;
  for (std::size_t i = 0; i < pullback.saved().size(); ++i)
    arguments.push_back(pullback.saved()[i]);
  Tape again(pullback.tape());
  const std::vector<Tensor> results = kept->fn(again, arguments);
  std::vector<std::pair<Tensor, Tensor>> seeds;
  for (std::size_t i = 0; i < results.size(); ++i) {
    if (is_float(results[i].dtype()) && pullback.has_grad(i)) {
      seeds.emplace_back(results[i], pullback.take_grad(i));
    }
  }
  again.backward(seeds);
  for (std::size_t i = 0; i < kept->uses.size(); ++i) {
    again.has_grad(kept->uses[i]) ? pullback.give(i, again.grad(kept->uses[i]))
                                  : pullback.give_none(i);
  }
}

}  // namespace

std::vector<Tensor> checkpoint(Tape& tape, TapeFn fn, const std::vector<Tensor>& inputs) {
  auto kept = std::make_shared<Kept>();
  std::vector<Tensor> results;
  {
    Tape dry(tape);
    dry.impl().noting = &kept->uses;
    results = fn(dry, inputs);
  }
  if (!tape.impl().recording) return results;
  for (const Tensor& y : results) {  // handed through as it is
    if (tape.impl().tracks(y)) kept->uses.push_back(y);
  }
  std::vector<Tensor> once;
  for (const Tensor& x : kept->uses) {
    const auto same = [&](const Tensor& t) {
      return t.identity() == x.identity();
    };
    if (std::find_if(once.begin(), once.end(), same) == once.end()) once.push_back(x);
  }
  kept->uses = std::move(once);
  kept->fn = std::move(fn);
  std::vector<TensorRef> uses(kept->uses.begin(), kept->uses.end());
  std::vector<Tensor*> outputs;
  for (Tensor& y : results) outputs.push_back(&y);
  Saved saved(inputs);
  saved.object = kept;
  tape.impl().record("checkpoint", checkpoint_backward, uses, outputs, std::move(saved));
  return results;
}

}  // namespace mlxtape
