#include "mlxtape/ops/layout.h"

#include <functional>

#include "cases/bench_case.h"
#include "cases/random.h"

namespace mlxtape::bench {

std::vector<BenchCase> layout_bench_cases() {
  std::vector<BenchCase> cases;
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    const std::int64_t n = 4096, bytes = n * n * static_cast<std::int64_t>(size_of(dtype));
    const auto with = [&](const char* form, std::int64_t written,
                          const std::function<Tensor(CommandEncoder&, const Tensor&)>& op) {
      cases.push_back(
          {form, "fwd", "4096x4096", dtype, written, written, 1, 1, [=](CommandEncoder& encoder) {
             const Tensor x = random_tensor(encoder, {n, n}, dtype, 1);
             return [=, &encoder] {
               static_cast<void>(op(encoder, x));
             };
           }});
    };
    with("transpose", bytes, [](CommandEncoder& encoder, const Tensor& x) {
      return encoder.contiguous(ops::transpose(encoder, x));
    });
    with("concatenate", 2 * bytes, [](CommandEncoder& encoder, const Tensor& x) {
      return ops::concatenate(encoder, {x, x}, 1);
    });
    with("pad", bytes, [](CommandEncoder& encoder, const Tensor& x) {
      return ops::pad(encoder, x, {{1, 1}, {1, 1}});
    });
  }
  return cases;
}

}  // namespace mlxtape::bench
