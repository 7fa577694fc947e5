#include "mlxtape/ops/rope.h"

#include "cases/bench_case.h"
#include "cases/random.h"

namespace mlxtape::bench {

std::vector<BenchCase> rope_bench_cases() {
  std::vector<BenchCase> cases;
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    const Shape shape{1, 16, 2048, 128};
    const std::int64_t bytes = *element_count(shape) * static_cast<std::int64_t>(size_of(dtype));
    cases.push_back(
        {"", "fwd", "1x16x2048x128", dtype, bytes, bytes, 1, 1, [=](CommandEncoder& encoder) {
           const Tensor x = random_tensor(encoder, shape, dtype, 1);
           return [=, &encoder] {
             static_cast<void>(ops::rope(encoder, x));
           };
         }});
  }
  return cases;
}

}  // namespace mlxtape::bench
