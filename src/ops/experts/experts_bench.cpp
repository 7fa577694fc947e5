#include "mlxtape/ops/experts.h"

#include "cases/bench_case.h"
#include "cases/random.h"
#include "mlxtape/ops/moe_route.h"

namespace mlxtape::bench {

namespace {

using ops::ExpertRoute;
using ops::ExpertWeights;

}  // namespace

std::vector<BenchCase> experts_bench_cases() {
  std::vector<BenchCase> cases;
  const std::int64_t chosen = 10, width = 2048, inner = 512;  // Qwen3-Next
  struct Size {
    std::int64_t tokens, experts;
  };
  for (const auto& [tokens, experts] : {Size{512, 64}, Size{16384, 512}}) {
    for (const DType dtype : {DType::kF32, DType::kBF16}) {
      const auto element = static_cast<std::int64_t>(size_of(dtype));
      const std::int64_t rows = tokens * width * element;
      const std::int64_t weights = 3 * experts * width * inner * element;
      const std::int64_t products = tokens * chosen * width * inner * 2;
      const auto prepare = [=](bool back) {
        return [=](CommandEncoder& encoder) -> BenchCall {
          const Tensor x = random_tensor(encoder, {tokens, width}, dtype, 1);
          const Tensor logits = random_tensor(encoder, {tokens, experts}, dtype, 2);
          const ops::MoeRoute r = ops::moe_route(encoder, logits, chosen);
          const ExpertRoute route{r.indices, r.scores, r.offsets};
          const ExpertWeights w{random_tensor(encoder, {experts, inner, width}, dtype, 3, 0.02),
                                random_tensor(encoder, {experts, inner, width}, dtype, 4, 0.02),
                                random_tensor(encoder, {experts, width, inner}, dtype, 5, 0.02)};
          if (!back) {
            return [=, &encoder] {
              static_cast<void>(ops::experts(encoder, x, route, w));
            };
          }
          const auto result = ops::experts(encoder, x, route, w);
          const Tensor dy = random_tensor(encoder, {tokens, width}, dtype, 6);
          return [=, &encoder] {
            static_cast<void>(ops::experts_backward(encoder, x, route, w, result, dy));
          };
        };
      };
      const std::string shape =
          std::to_string(tokens) + "x" + std::to_string(experts) + "x10x2048x512";
      cases.push_back(
          {"", "fwd", shape, dtype, rows + weights, rows, 4, 1, prepare(false), 3 * products});
      cases.push_back({"", "bwd", shape, dtype, 2 * rows + weights, rows + weights, 5, 4,
                       prepare(true), 6 * products});
    }
  }
  return cases;
}

}  // namespace mlxtape::bench
