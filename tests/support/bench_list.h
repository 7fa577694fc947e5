// The ops with bench cases, in the order of ops.list (generated).
#pragma once

#include "support/bench_case.h"

namespace mlxtape::test {

struct BenchOp {
  const char* name;
  std::vector<BenchCase> (*cases)();
};

const std::vector<BenchOp>& bench_ops();

}  // namespace mlxtape::test
