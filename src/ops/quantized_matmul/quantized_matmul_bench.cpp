#include "mlxtape/ops/quantized_matmul.h"

#include "cases/bench_case.h"
#include "cases/random.h"

namespace mlxtape::bench {

namespace {

using ops::QuantizedWeight;

}  // namespace

std::vector<BenchCase> quantized_matmul_bench_cases() {
  std::vector<BenchCase> cases;
  struct Size {
    std::int64_t m, n, k;
    int bits;
  };
  for (const auto& [m, n, k, bits] :
       {Size{1, 2048, 2048, 4}, Size{1, 2048, 2048, 8}, Size{1, 151936, 2048, 4},
        Size{1, 151936, 2048, 8}, Size{1, 151936, 2048, 6}, Size{8, 2048, 2048, 4},
        Size{512, 2048, 2048, 4}}) {
    const DType dtype = DType::kBF16;
    const std::int64_t codes = n * k * bits / 8, params = n * k / 64 * 2;
    const auto prepare = [=](bool back) {
      return [=](CommandEncoder& encoder) -> BenchCall {
        const Tensor x = random_tensor(encoder, {m, k}, dtype, 1);
        const QuantizedWeight w{random_codes(encoder, {n, k * bits / 32}, 2),
                                random_tensor(encoder, {n, k / 64}, dtype, 3, 0.01),
                                random_tensor(encoder, {n, k / 64}, dtype, 4, 0.1), bits};
        if (!back) {
          return [=, &encoder] {
            static_cast<void>(ops::quantized_matmul(encoder, x, w));
          };
        }
        const Tensor dy = random_tensor(encoder, {m, n}, dtype, 5);
        return [=, &encoder] {
          static_cast<void>(ops::quantized_matmul_backward(encoder, x, w, dy));
        };
      };
    };
    const std::string shape = std::to_string(m) + "x" + std::to_string(n) + "x" + std::to_string(k);
    const std::string form = std::to_string(bits) + " bits";
    const std::int64_t flops = 2 * m * n * k, x_bytes = 2 * m * k, y_bytes = 2 * m * n;
    cases.push_back({form, "fwd", shape, dtype, codes + 2 * params + x_bytes, y_bytes, 3, 1,
                     prepare(false), flops});
    if (m > 8) {
      cases.push_back({form, "bwd", shape, dtype, codes + 2 * params + x_bytes + y_bytes,
                       x_bytes + 2 * params, 5, 3, prepare(true), 2 * flops});
    }
  }
  return cases;
}

}  // namespace mlxtape::bench
