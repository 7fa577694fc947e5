// Tape: notes what was computed from what, and walks back from a result to the gradients of what was
// watched. It knows no op: a node is a name, a backward function, inputs, outputs and what was saved.
//
//   Tape tape(*encoder);
//   const Tensor w = tape.watch(weights);
//   const Tensor loss = ops::mean(tape, ops::square(tape, ops::matmul(tape, x, w)));
//   tape.backward(loss);
//   tape.grad(w);
//
// Identity   A tensor that is watched, or made from one that is, has an identity, and copies of the Tensor
//            share it. Views made by Tensor's own members and results of ops that were given an
//            encoder instead of a tape have none: to use such a view of a tracked tensor in a recorded
//            op is an error; use the op of the same name, or detach(). What a walk has freed counts as a
//            constant from then on; y itself, walked from twice, is an error.
// Types      Floats carry gradients, integers and bools never do; to watch one is an error.
// Memory     A node holds what its backward function needs and nothing else. The walk frees it as
//            it passes, and every gradient that nobody watches. Gradients are added in place.
// Errors     Whatever can be known before a walk is checked before it, and leaves the tape as it was: an op
//            without a gradient on the way, a saved tensor that was written since (by a kernel, an
//            upload or a replay: what the host writes through host() is not seen), a second walk without
//            retain, a result that is no scalar and has no gradient given. A walk that throws later has added
//            some gradients and not others: to ask for one or to walk is an error until clear_grads or reset.
// Threads    A tape is used by one thread at a time.
#pragma once

#include <cstdint>
#include <functional>
#include <initializer_list>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "mlxtape/core/encoder.h"
#include "mlxtape/tape/pullback.h"
#include "mlxtape/tape/report.h"
#include "mlxtape/tape/rows.h"
#include "mlxtape/tape/saved.h"

namespace mlxtape {

using TapeFn = std::function<std::vector<Tensor>(Tape&, const std::vector<Tensor>&)>;

struct BackwardOptions {
  bool retain = false;  // keep what was saved, to walk again
};

class Tape {
 public:
  explicit Tape(CommandEncoder& encoder);
  // Inside another, which must outlive it: what the outer one tracks is watched here.
  explicit Tape(Tape& outer);
  ~Tape();
  Tape(Tape&& other) noexcept;  // the other may only be assigned to or destroyed
  Tape& operator=(Tape&& other) noexcept;

  CommandEncoder& encoder() const;

  // ---- for users ----

  // x with an identity, if it has none yet, whose gradient is wanted. sum: the type that its gradient is
  // added up and returned in: f32 keeps many small parts of a 16-bit parameter's.
  Tensor watch(const Tensor& x);
  Tensor watch(const Tensor& x, DType sum);

  // Adds to the gradient of everything watched. y: one float, or as many as dy.
  void backward(const Tensor& y, BackwardOptions options = {});
  void backward(const Tensor& y, const Tensor& dy, BackwardOptions options = {});
  void backward(const std::vector<std::pair<Tensor, Tensor>>& seeds, BackwardOptions options = {});

  // Of something watched, after a walk: the sum over all walks since clear_grads; zeros where y did not
  // depend on it.
  Tensor grad(const Tensor& x) const;
  bool has_grad(const Tensor& x) const;  // did any walk reach it?
  // The same where every part of it came as rows; grad makes a dense one of it when asked, and keeps it.
  RowGrad row_grad(const Tensor& x) const;
  bool has_row_grad(const Tensor& x) const;
  void clear_grads();  // also after a walk that threw

  void reset();  // forgets everything, also what is watched
  std::size_t nodes() const;
  TapeReport report() const;

  // Nothing is recorded while one of these lives.
  class NoGrad {
   public:
    explicit NoGrad(Tape& tape);
    ~NoGrad();
    NoGrad(const NoGrad&) = delete;
    NoGrad& operator=(const NoGrad&) = delete;

   private:
    Tape& tape_;
    bool before_;
  };

  // ---- for ops ----

  // Would record keep a node for an op on these? Where not, nothing need be saved.
  bool wants(std::initializer_list<TensorRef> inputs) const;
  bool wants(std::span<const TensorRef> inputs) const;

  // Each output was computed from inputs; outputs that are floats get an identity. name lives as long as the
  // program. backward null: the op has no gradient, which is an error when a walk comes by.
  void record(const char* name, BackwardFn backward, std::initializer_list<TensorRef> inputs,
              std::initializer_list<Tensor*> outputs, Saved saved);
  void record(const char* name, BackwardFn backward, std::span<const TensorRef> inputs,
              std::span<Tensor* const> outputs, Saved saved);

  // state is about to be changed by a function that draws from it, a key of random numbers: a checkpoint
  // that this happens in keeps its contents, to run again from them. Elsewhere it costs nothing.
  void carry(const Tensor& state);

  struct Impl;

 private:
  friend class Pullback;
  friend std::vector<Tensor> checkpoint(Tape&, TapeFn, const std::vector<Tensor>&);
  Impl& impl() const;
  std::unique_ptr<Impl> impl_;
};

// x without its identity: no gradient flows through. The same memory.
Tensor stop_gradient(const Tensor& x);

}  // namespace mlxtape
