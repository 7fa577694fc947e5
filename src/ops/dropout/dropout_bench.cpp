#include "mlxtape/ops/dropout.h"

#include "cases/bench_case.h"
#include "cases/random.h"
#include "mlxtape/ops/random.h"

namespace mlxtape::bench {

std::vector<BenchCase> dropout_bench_cases() {
  std::vector<BenchCase> cases;
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    const Shape shape{8192, 2048};
    const std::int64_t bytes = *element_count(shape) * static_cast<std::int64_t>(size_of(dtype));
    cases.push_back(
        {"", "fwd", "8192x2048", dtype, bytes, bytes, 1, 1, [=](CommandEncoder& encoder) {
           const Tensor x = random_tensor(encoder, shape, dtype, 1);
           const Tensor key = ops::random_key(encoder, 1);
           return [=, &encoder] {
             static_cast<void>(ops::dropout(encoder, x, 0.1, key));
           };
         }});
  }
  return cases;
}

}  // namespace mlxtape::bench
