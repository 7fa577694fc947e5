#include "mlxtape/tape/functions.h"

#include <algorithm>
#include <string>
#include <utility>

#include "tape_impl.h"

namespace mlxtape {

namespace {

// The node's inputs are what fn uses of what the tape tracks, wherever it got it from: its arguments, or
// captured. Saved are the arguments, then these, so a change of one of them is noticed.
struct Kept {
  TapeFn fn;
  std::size_t arguments;
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
  for (std::size_t i = 0; i < kept->arguments; ++i) arguments.push_back(pullback.saved()[i]);
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
  for (std::size_t i = 0; i < pullback.inputs(); ++i) {
    const Tensor& x = pullback.saved()[kept->arguments + i];
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
  std::vector<Tensor> results, uses;
  {
    Tape dry(tape);
    dry.impl().noting = &uses;
    if (tape.impl().recording) dry.impl().carried = &kept->carried;
    results = fn(dry, inputs);
  }
  if (!tape.impl().recording) return results;
  for (const Tensor& y : results) {  // handed through as it is
    if (tape.impl().tracks(y)) uses.push_back(y);
  }
  std::vector<Tensor> saved = inputs;
  const auto first = static_cast<std::ptrdiff_t>(inputs.size());
  for (const Tensor& x : uses) {
    const auto same = [&](const Tensor& t) {
      return t.identity() == x.identity();
    };
    if (std::none_of(saved.begin() + first, saved.end(), same)) saved.push_back(x);
  }
  kept->fn = std::move(fn);
  kept->arguments = inputs.size();
  const std::vector<TensorRef> once(saved.begin() + first, saved.end());
  std::vector<Tensor*> outputs;
  for (Tensor& y : results) outputs.push_back(&y);
  Saved all(saved);
  all.object = kept;
  tape.impl().record("checkpoint", checkpoint_backward, once, outputs, std::move(all));
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
