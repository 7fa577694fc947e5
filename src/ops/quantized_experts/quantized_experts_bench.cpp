#include "mlxtape/ops/quantized_experts.h"

#include <algorithm>

#include "cases/bench_case.h"
#include "cases/random.h"
#include "mlxtape/ops/moe_route.h"

namespace mlxtape::bench {

namespace {

using ops::ExpertRoute;
using ops::QuantizedExpertWeights;
using ops::QuantizedWeight;

}  // namespace

std::vector<BenchCase> quantized_experts_bench_cases() {
  std::vector<BenchCase> cases;
  const std::int64_t experts = 512, chosen = 10, width = 2048, inner = 512;  // Qwen3-Next
  for (const std::int64_t tokens : {1, 8, 512}) {
    for (const int bits : {4, 8}) {
      const DType dtype = DType::kBF16;
      const std::int64_t used = std::min(experts, tokens * chosen), rows = 2 * tokens * width;
      const std::int64_t weights = 3 * used * width * inner * bits / 8,
                         params = 3 * used * width * inner / 64 * 4;
      const auto prepare = [=](CommandEncoder& encoder) -> BenchCall {
        const auto weight = [&](std::int64_t n, std::int64_t k, std::uint64_t seed) {
          return QuantizedWeight{
              random_codes(encoder, {experts, n, k * bits / 32}, seed),
              random_tensor(encoder, {experts, n, k / 64}, dtype, seed + 1, 0.002),
              random_tensor(encoder, {experts, n, k / 64}, dtype, seed + 2, 0.02), bits};
        };
        const Tensor x = random_tensor(encoder, {tokens, width}, dtype, 1);
        const ops::MoeRoute r =
            ops::moe_route(encoder, random_tensor(encoder, {tokens, experts}, dtype, 2), chosen);
        const ExpertRoute route{r.indices, r.scores, r.offsets};
        const QuantizedExpertWeights w{weight(inner, width, 3), weight(inner, width, 6),
                                       weight(width, inner, 9)};
        return [=, &encoder] {
          static_cast<void>(ops::quantized_experts(encoder, x, route, w));
        };
      };
      cases.push_back({std::to_string(bits) + " bits", "fwd",
                       std::to_string(tokens) + "x512x10x2048x512", dtype, rows + weights + params,
                       rows, 4, 1, prepare, 6 * tokens * chosen * width * inner});
    }
  }
  return cases;
}

}  // namespace mlxtape::bench
