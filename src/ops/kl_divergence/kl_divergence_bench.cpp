#include "mlxtape/ops/kl_divergence.h"

#include "cases/bench_case.h"
#include "cases/random.h"

namespace mlxtape::bench {

std::vector<BenchCase> kl_divergence_bench_cases() {
  std::vector<BenchCase> cases;
  for (const auto& [rows, cols] : std::vector<std::pair<std::int64_t, std::int64_t>>{
           {512, 32000}, {64, 151936}, {4096, 151936}}) {
    for (const DType dtype : kFloats) {
      const std::int64_t bytes = rows * cols * static_cast<std::int64_t>(size_of(dtype));
      const Shape shape{rows, cols};
      const std::string name = std::to_string(rows) + "x" + std::to_string(cols);
      ops::KlDivergenceOptions mean;
      mean.reduction = ops::Reduction::kMean;
      cases.push_back({"", "fwd", name, dtype, 2 * bytes, 0, 2, 0, [=](CommandEncoder& encoder) {
                         const Tensor q = random_tensor(encoder, shape, dtype, 1, 2);
                         const ops::KlTeacher p(random_tensor(encoder, shape, dtype, 2, 2));
                         return [=, &encoder] {
                           ops::kl_divergence(encoder, q, p, mean);
                         };
                       }});
      cases.push_back(
          {"", "fwd+bwd", name, dtype, 2 * bytes, bytes, 2, 1, [=](CommandEncoder& encoder) {
             const Tensor q = random_tensor(encoder, shape, dtype, 1, 2);
             const ops::KlTeacher p(random_tensor(encoder, shape, dtype, 2, 2));
             const Tensor dq = encoder.empty(shape, dtype);
             return [=, &encoder] {
               ops::kl_divergence_with_gradient(encoder, q, p, mean, dq);
             };
           }});
    }
  }
  return cases;
}

}  // namespace mlxtape::bench
