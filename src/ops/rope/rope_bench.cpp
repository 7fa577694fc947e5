#include "mlxtape/ops/rope.h"

#include "cases/bench_case.h"
#include "cases/random.h"

namespace mlxtape::bench {

std::vector<BenchCase> rope_bench_cases() {
  std::vector<BenchCase> cases;
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    // by_tokens: as a projection leaves its heads.
    const auto add = [&](const Shape& shape, const char* name, bool by_tokens) {
      const std::int64_t bytes = *element_count(shape) * static_cast<std::int64_t>(size_of(dtype));
      cases.push_back({"", "fwd", name, dtype, bytes, bytes, 1, 1, [=](CommandEncoder& encoder) {
                         Tensor x = random_tensor(encoder, shape, dtype, 1);
                         if (by_tokens) x = x.transpose({0, 2, 1, 3});
                         return [=, &encoder] {
                           static_cast<void>(ops::rope(encoder, x));
                         };
                       }});
    };
    add({1, 16, 2048, 128}, "1x16x2048x128", false);
    add({4, 2048, 16, 128}, "4x2048x16x128 by tokens", true);
  }
  return cases;
}

}  // namespace mlxtape::bench
