#include "mlxtape/ops/sum_rows.h"

#include "cases/bench_case.h"

namespace mlxtape::bench {

std::vector<BenchCase> sum_rows_bench_cases() { return {}; }

}  // namespace mlxtape::bench
