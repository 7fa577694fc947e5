#include "mlxtape/ops/random.h"

#include "cases/bench_case.h"

namespace mlxtape::bench {

std::vector<BenchCase> random_bench_cases() {
  std::vector<BenchCase> cases;
  const std::int64_t n = 16 << 20;
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    const std::int64_t bytes = n * static_cast<std::int64_t>(size_of(dtype));
    const auto add = [&](const char* form, Tensor (*draw)(CommandEncoder&, const Tensor&, Shape,
                                                          DType, double, double)) {
      cases.push_back(
          {form, "fwd", "16777216", dtype, 0, bytes, 0, 1, [=](CommandEncoder& encoder) {
             const Tensor key = ops::random_key(encoder, 1);
             return [=, &encoder] {
               static_cast<void>(draw(encoder, key, {n}, dtype, 0, 1));
             };
           }});
    };
    add("uniform", ops::random_uniform);
    add("normal", ops::random_normal);
  }
  cases.push_back(
      {"bernoulli", "fwd", "16777216", DType::kBool, 0, n, 0, 1, [=](CommandEncoder& encoder) {
         const Tensor key = ops::random_key(encoder, 1);
         return [=, &encoder] {
           static_cast<void>(ops::random_bernoulli(encoder, key, {n}, 0.1));
         };
       }});
  return cases;
}

}  // namespace mlxtape::bench
