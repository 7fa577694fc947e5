#include "mlxtape/ops/take.h"

#include "support/op_test.h"

namespace mlxtape::test {
std::vector<BenchCase> take_bench_cases() { return {}; }
}  // namespace mlxtape::test
