#include "mlxtape/ops/cross_entropy.h"

#include "cases/bench_case.h"
#include "cases/random.h"

namespace mlxtape::bench {

std::vector<BenchCase> cross_entropy_bench_cases() {
  std::vector<BenchCase> cases;
  for (const auto& [rows, cols] : std::vector<std::pair<std::int64_t, std::int64_t>>{
           {512, 32000}, {64, 151936}, {4096, 151936}, {16384, 32000}}) {
    for (const DType dtype : kFloats) {
      const std::int64_t bytes = rows * cols * static_cast<std::int64_t>(size_of(dtype));
      const Shape shape{rows, cols};
      const std::string name = std::to_string(rows) + "x" + std::to_string(cols);
      const auto targets_of = [rows = rows, cols = cols](CommandEncoder& encoder) {
        return random_ids(encoder, {rows}, cols);
      };
      ops::CrossEntropyOptions mean;
      mean.reduction = ops::Reduction::kMean;
      cases.push_back({"", "fwd", name, dtype, bytes, 0, 1, 0, [=](CommandEncoder& encoder) {
                         const Tensor z = random_tensor(encoder, shape, dtype, 1, 2);
                         const Tensor t = targets_of(encoder);
                         return [=, &encoder] {
                           ops::cross_entropy(encoder, z, t, mean);
                         };
                       }});
      cases.push_back({"", "bwd", name, dtype, bytes, bytes, 1, 1, [=](CommandEncoder& encoder) {
                         const Tensor z = random_tensor(encoder, shape, dtype, 1, 2);
                         const auto parts =
                             ops::cross_entropy_parts(encoder, z, targets_of(encoder), mean);
                         const Tensor dloss = encoder.full({}, DType::kF32, 1);
                         return [=, &encoder] {
                           ops::cross_entropy_backward(encoder, z, parts, dloss, 0);
                         };
                       }});
      cases.push_back(
          {"", "fwd+bwd", name, dtype, bytes, bytes, 1, 1, [=](CommandEncoder& encoder) {
             const Tensor z = random_tensor(encoder, shape, dtype, 1, 2);
             const Tensor t = targets_of(encoder);
             const Tensor dz = encoder.empty(shape, dtype);
             return [=, &encoder] {
               ops::cross_entropy_with_gradient(encoder, z, t, mean, dz);
             };
           }});
    }
  }
  return cases;
}

}  // namespace mlxtape::bench
