// How the CPU kernels of the family walk their operands: in pieces of the result, for each of which every
// operand is a run of neighbours or one number. Compiled once, whatever the formula and the type.
#pragma once

#include <cstddef>
#include <cstdint>

#include "elementwise_args.h"
#include "mlxtape/base/dtype.h"
#include "mlxtape/base/function_ref.h"
#include "mlxtape/core/registry.h"

namespace mlxtape::ops {

struct Piece {
  const void* in[4];    // the operands' first elements
  std::size_t step[4];  // 1, or 0: the same kRepeats elements again and again
  std::int64_t at;      // where in the result it begins
  std::size_t n;
};

inline constexpr std::size_t kRepeats =
    64;  // at least two vectors of any type that is computed with

struct Walk {
  int operands;
  std::size_t bytes[4];  // of an element of each operand
  DType numbers;         // the type that operands which are numbers have
  bool plain = false;    // every step 1: numbers are written out for the whole piece
  bool streams = false;  // pieces are written past the cache
};

// Calls body for pieces that cover the result, from several threads. How it is cut depends on the shape
// alone.
void for_pieces(const KernelCall& call, const Walk& walk, FunctionRef<void(const Piece&)> body);

}  // namespace mlxtape::ops
