#include "mlxtape/ops/attention.h"

#include "cases/bench_case.h"
#include "cases/random.h"

namespace mlxtape::bench {

namespace {

using ops::AttentionOptions;

void add_bench_cases(std::vector<BenchCase>& cases, std::int64_t tokens, std::int64_t heads,
                     std::int64_t key_heads, std::int64_t dim, DType dtype) {
  const auto element = static_cast<std::int64_t>(size_of(dtype));
  const std::int64_t rows = tokens * heads * dim * element;
  const std::int64_t keys = tokens * key_heads * dim * element;
  const std::int64_t products = tokens * (tokens + 1) / 2 * heads * dim * 2;
  const auto prepare = [=](bool back) {
    return [=](CommandEncoder& encoder) -> BenchCall {
      const Tensor q = random_tensor(encoder, {1, tokens, heads, dim}, dtype, 1);
      const Tensor k = random_tensor(encoder, {1, tokens, key_heads, dim}, dtype, 2);
      const Tensor v = random_tensor(encoder, {1, tokens, key_heads, dim}, dtype, 3);
      AttentionOptions options;
      options.causal = true;
      if (!back) {
        return [=, &encoder] {
          static_cast<void>(ops::attention(encoder, q, k, v, options));
        };
      }
      const auto result = ops::attention(encoder, q, k, v, options);
      const Tensor dy = random_tensor(encoder, q.shape(), dtype, 4);
      return [=, &encoder] {
        static_cast<void>(ops::attention_backward(encoder, q, k, v, result, dy, options));
      };
    };
  };
  const std::string shape = std::to_string(tokens) + "x" + std::to_string(heads) + "x" +
                            std::to_string(key_heads) + "x" + std::to_string(dim);
  cases.push_back(
      {"", "fwd", shape, dtype, rows + 2 * keys, rows, 3, 1, prepare(false), 2 * products});
  cases.push_back({"", "bwd", shape, dtype, 3 * rows + 2 * keys, rows + 2 * keys, 5, 3,
                   prepare(true), 5 * products});
}

}  // namespace

std::vector<BenchCase> attention_bench_cases() {
  std::vector<BenchCase> cases;
  for (const std::int64_t tokens : {2048, 16384}) {
    for (const DType dtype : {DType::kF32, DType::kBF16}) {
      add_bench_cases(cases, tokens, 16, 2, 256, dtype);  // Qwen3-Next
      add_bench_cases(cases, tokens, 16, 8, 128, dtype);  // Qwen3
    }
  }
  return cases;
}

}  // namespace mlxtape::bench
