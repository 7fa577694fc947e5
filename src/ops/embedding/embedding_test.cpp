#include "mlxtape/ops/embedding.h"

#include "support/op_test.h"

namespace mlxtape::test {
std::vector<BenchCase> embedding_bench_cases() { return {}; }
}  // namespace mlxtape::test
