#include "mlxtape/ops/scatter.h"

#include "support/op_test.h"

namespace mlxtape::test {
std::vector<BenchCase> scatter_bench_cases() { return {}; }
}  // namespace mlxtape::test
