#include "mlxtape/ops/dampen.h"

#include "cases/bench_case.h"
#include "cases/random.h"

namespace mlxtape::bench {

std::vector<BenchCase> dampen_bench_cases() {
  const Shape shape{16384, 512};
  const std::int64_t bytes = *element_count(shape) * 4;
  return {{"", "fwd", "16384x512", DType::kF32, bytes, bytes, 1, 1, [=](CommandEncoder& encoder) {
             const Tensor x = random_tensor(encoder, shape, DType::kF32, 1);
             const Tensor gain = encoder.zeros({shape[0]}, DType::kF32);
             return [=, &encoder] {
               ops::dampen(encoder, x, gain);
             };
           }}};
}

}  // namespace mlxtape::bench
