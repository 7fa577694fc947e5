#include "mlxtape/tape/functions.h"

#include <algorithm>
#include <string>
#include <utility>

#include "tape_impl.h"

namespace mlxtape {

namespace {

// The node's inputs are what fn uses of what the tape tracks, wherever it got it from: the first ones among
// its arguments' or captured. Saved are the arguments, so a change of one of them is noticed.
struct Kept {
  TapeFn fn;
  std::vector<Tensor> uses;  // in the order of the node's inputs
  std::vector<Tape::Impl::Carried> carried;
};

Tensor copy_of(CommandEncoder& encoder, const Tensor& t) {
  Tensor copy = encoder.empty_like(t);
  encoder.copy(t, copy);
  return copy;
}

void checkpoint_backward(Pullback& pullback) {
  const auto kept = std::static_pointer_cast<const Kept>(pullback.saved().object);
  std::vector<Tensor> arguments;
  for (std::size_t i = 0; i < pullback.saved().size(); ++i)
    arguments.push_back(pullback.saved()[i]);
  // What fn draws from is for its second run as it was for the first, and then again as the walk found it.
  CommandEncoder& encoder = pullback.encoder();
  std::vector<Tensor> found;
  for (const auto& [state, before] : kept->carried) {
    found.push_back(copy_of(encoder, state));
    encoder.copy(before, state);
  }
  const auto put_back = [&] {
    for (std::size_t i = 0; i < found.size(); ++i) encoder.copy(found[i], kept->carried[i].state);
  };
  Tape again(pullback.tape());
  std::vector<Tensor> results;
  try {
    results = kept->fn(again, arguments);
  } catch (...) {
    put_back();
    throw;
  }
  put_back();
  // A result may be a constant, or an argument handed through.
  std::vector<std::pair<Tensor, Tensor>> seeds;
  for (std::size_t i = 0; i < results.size(); ++i) {
    if (is_float(results[i].dtype()) && pullback.has_grad(i) && again.wants({results[i]})) {
      seeds.emplace_back(results[i], pullback.take_grad(i));
    }
  }
  if (!seeds.empty()) again.backward(seeds);
  for (std::size_t i = 0; i < kept->uses.size(); ++i) {
    const Tensor& x = kept->uses[i];
    if (again.has_row_grad(x)) {
      pullback.give_rows(i, again.row_grad(x));
    } else {
      again.has_grad(x) ? pullback.give(i, again.grad(x)) : pullback.give_none(i);
    }
  }
}

}  // namespace

std::vector<Tensor> checkpoint(Tape& tape, TapeFn fn, const std::vector<Tensor>& inputs) {
  auto kept = std::make_shared<Kept>();
  std::vector<Tensor> results;
  {
    Tape dry(tape);
    dry.impl().noting = &kept->uses;
    if (tape.impl().recording) dry.impl().carried = &kept->carried;
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

void Tape::carry(const Tensor& state) {
  for (const Impl* tape = &impl(); tape != nullptr; tape = tape->outer) {
    if (tape->carried == nullptr) continue;
    const auto same = [&](const Impl::Carried& c) {
      return c.state.buffer().storage() == state.buffer().storage() &&
             c.state.offset() == state.offset();
    };
    if (std::none_of(tape->carried->begin(), tape->carried->end(), same)) {
      tape->carried->push_back({state, copy_of(encoder(), state)});
    }
  }
}

ValueAndGrad value_and_grad(ScalarFn fn, std::vector<std::size_t> of) {
  return [fn = std::move(fn), of = std::move(of)](CommandEncoder& encoder,
                                                  const std::vector<Tensor>& inputs) {
    Tape tape(encoder);
    std::vector<Tensor> known = inputs;
    for (Tensor& x : known) x = x.detach();
    std::vector<std::size_t> numbers = of;
    for (std::size_t i = 0; of.empty() && i < inputs.size(); ++i) {
      if (is_float(inputs[i].dtype())) numbers.push_back(i);
    }
    for (const std::size_t i : numbers) {
      if (i >= inputs.size()) {
        throw Error(Errc::kArgument, "value_and_grad: it has " + std::to_string(inputs.size()) +
                                         " inputs, got number " + std::to_string(i));
      }
      known[i] = tape.watch(known[i]);
    }
    const Tensor value = fn(tape, known);
    tape.backward(value);
    std::vector<Tensor> grads;
    for (const std::size_t i : numbers) grads.push_back(tape.grad(known[i]));
    return std::pair(value.detach(), std::move(grads));
  };
}

}  // namespace mlxtape
