#include "mlxtape/ops/sum_rows.h"

#include "support/op_test.h"

namespace mlxtape::test {
std::vector<BenchCase> sum_rows_bench_cases() { return {}; }
}  // namespace mlxtape::test
