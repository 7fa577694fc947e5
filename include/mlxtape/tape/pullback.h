// Pullback: one node's turn in a walk back over a tape: what a backward function is given, and where it puts
// its results.
#pragma once

#include <cstddef>
#include <string>

#include "mlxtape/core/encoder.h"
#include "mlxtape/tape/rows.h"
#include "mlxtape/tape/saved.h"

namespace mlxtape {

class Tape;

class Pullback {
 public:
  CommandEncoder& encoder() const;
  const Saved& saved() const;
  Tape& tape() const { return tape_; }  // for an inner tape

  std::size_t inputs() const;
  std::size_t outputs() const;
  const Shape& input_shape(std::size_t input) const;    // of one that needs(input)
  const Shape& output_shape(std::size_t output) const;  // of a float

  // Was the output used? At least one of them was.
  bool has_grad(std::size_t output = 0) const;
  // dL/doutput, in the output's shape and type; throws kNoGradient where has_grad is false. take_grad hands
  // over the walk's own share: where it is the only one, the memory may be written (reuse()).
  const Tensor& grad(std::size_t output = 0) const;
  Tensor take_grad(std::size_t output = 0);

  // Does anybody want dL/dinput? What nobody wants need not be computed.
  bool needs(std::size_t input) const;
  // dL/dinput, in the input's shape. Each wanted one must be given exactly once, in any order.
  void give(std::size_t input, Tensor gradient);
  void give_none(std::size_t input);                    // it is zero everywhere
  void give_rows(std::size_t input, RowGrad gradient);  // but in these rows; a leaf keeps it so
  DType sum_type(std::size_t input) const;              // of the gradient of one that needs(input)

 private:
  friend class Tape;
  Tensor* flow(std::size_t output) const;  // null where nothing flows
  void mark(std::size_t input);
  std::string giving(std::size_t input) const;
  Pullback(Tape& tape, std::size_t node) : tape_(tape), node_(node) {}
  Tape& tape_;
  std::size_t node_;
};

using BackwardFn = void (*)(Pullback&);

}  // namespace mlxtape
