#include "support/op_test.h"
namespace mlxtape::test { std::vector<BenchCase> reduce_bench_cases() { return {}; } }
