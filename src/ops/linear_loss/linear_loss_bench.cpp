#include "mlxtape/ops/linear_loss.h"

#include "cases/bench_case.h"
#include "cases/random.h"

namespace mlxtape::bench {

namespace {

using ops::CrossEntropyOptions;
using ops::Reduction;

}  // namespace

std::vector<BenchCase> linear_loss_bench_cases() {
  std::vector<BenchCase> cases;
  struct Size {
    std::int64_t rows, width, classes;
  };
  for (const Size& s : {Size{128, 512, 32000}, Size{16384, 2048, 151936}}) {
    for (const DType dtype : {DType::kF32, DType::kBF16}) {
      const auto bytes = static_cast<std::int64_t>(size_of(dtype));
      const std::int64_t read = (s.rows + s.classes) * s.width * bytes;
      const std::string name =
          std::to_string(s.rows) + "x" + std::to_string(s.width) + "x" + std::to_string(s.classes);
      BenchCase bench{"", "fwd+bwd", name, dtype, read, read, 2, 2, [=](CommandEncoder& encoder) {
                        const Tensor h = random_tensor(encoder, {s.rows, s.width}, dtype, 1);
                        const Tensor w =
                            random_tensor(encoder, {s.classes, s.width}, dtype, 2, 0.05);
                        const Tensor t = random_ids(encoder, {s.rows}, s.classes);
                        CrossEntropyOptions mean;
                        mean.reduction = Reduction::kMean;
                        return [=, &encoder] {
                          ops::linear_cross_entropy_with_gradient(encoder, h, w, t, mean);
                        };
                      }};
      bench.flops = 6 * s.rows * s.width * s.classes;
      cases.push_back(bench);
    }
  }
  return cases;
}

}  // namespace mlxtape::bench
