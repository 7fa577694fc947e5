#include "mlxtape/ops/loss_rows.h"

#include "cases/bench_case.h"
#include "cases/random.h"

namespace mlxtape::bench {

std::vector<BenchCase> loss_rows_bench_cases() {
  const std::int64_t rows = 16384;
  return {{"", "fwd", std::to_string(rows), DType::kF32, 4 * rows, 4 * rows, 1, 1,
           [=](CommandEncoder& encoder) {
             ops::LossRowsOptions options;
             options.mask = random_tensor(encoder, {rows}, DType::kF32, 1);
             options.reduction = ops::Reduction::kMean;
             return [=, &encoder] {
               ops::loss_rows(encoder, rows, options);
             };
           }}};
}

}  // namespace mlxtape::bench
