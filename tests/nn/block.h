// A block of a model, checked as a whole: what it computes against the same in double, written apart from the ops,
// and the gradient of everything that it is given against differences of that.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "mlxtape/tape/tape.h"
#include "support/op_test.h"

namespace mlxtape::test {

using Values = std::vector<double>;
// Every number that a block in double makes goes through this, to be blurred as a device rounds it.
using Blur = std::function<double(double)>;

struct Input {
  std::string name;
  Shape shape;
  double size = 1;    // values lie within it
  double around = 0;  // … of this
};

struct Block {
  std::string name;
  std::vector<Input> inputs;
  std::vector<Shape> outputs;
  std::function<Arrays(const Arrays&, const Blur&)> in_double;
  std::function<std::vector<Tensor>(Tape&, const std::vector<Tensor>&)> on_tape;
};

class Blocks : public OnDevice {
 protected:
  // Every number's gradient; for blocks of up to about a thousand numbers.
  void check_every_number(const Block& block);
  // The gradients along random directions of each input alone.
  void check_directions(const Block& block, DType dtype);

 private:
  void check(const Block& block, DType dtype, const std::vector<Arrays>& directions);
};

// ---- parts that blocks in double are made of ----

double sigma(double z);
// x [rows, in]·wᵀ [out, in].
Values product(const Values& x, const Values& w, std::int64_t rows, std::int64_t in,
               std::int64_t out, const Blur& blur);
// Each row of width n: x·rsqrt(mean x² + eps)·w.
Values normed(const Values& x, const Values& w, double eps, const Blur& blur);

}  // namespace mlxtape::test
