// What the tests of the optimiser share.
#pragma once

#include "mlxtape/ops/optimiser.h"
#include "support/op_test.h"

namespace mlxtape::test {

using Values = std::vector<double>;

class OptimiserTest : public OnDevice {
 protected:
  Tensor number(double v) { return upload({v}, {1}, DType::kF32); }
  Tensor count(int t) { return upload({static_cast<double>(t)}, {1}, DType::kI32); }
};

}  // namespace mlxtape::test
