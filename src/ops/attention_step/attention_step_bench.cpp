#include "mlxtape/ops/attention_step.h"

#include "cases/bench_case.h"
#include "cases/random.h"

namespace mlxtape::bench {

namespace {

using ops::AttentionCache;

}  // namespace

std::vector<BenchCase> attention_step_bench_cases() {
  std::vector<BenchCase> cases;
  const std::int64_t heads = 16, key_heads = 2, dim = 256;  // Qwen3-Next
  const auto add = [&](std::int64_t batch, std::int64_t keys, std::int64_t capacity, DType dtype) {
    const auto element = static_cast<std::int64_t>(size_of(dtype));
    const std::int64_t row = key_heads * dim * element, queries = batch * heads * dim * element;
    const auto prepare = [=](CommandEncoder& encoder) -> BenchCall {
      const Tensor q = random_tensor(encoder, {batch, 1, heads, dim}, dtype, 1);
      const Tensor k = random_tensor(encoder, {batch, 1, key_heads, dim}, dtype, 2);
      const Tensor v = random_tensor(encoder, {batch, 1, key_heads, dim}, dtype, 3);
      const Shape shape{batch, capacity, key_heads, dim};
      const AttentionCache cache{random_tensor(encoder, shape, dtype, 4),
                                 random_tensor(encoder, shape, dtype, 5),
                                 encoder.full({batch}, DType::kI32, static_cast<double>(keys - 1))};
      return [=, &encoder] {
        static_cast<void>(ops::attention_step(encoder, q, k, v, cache));
      };
    };
    const std::string shape = std::to_string(batch) + "x" + std::to_string(keys) + "of" +
                              std::to_string(capacity) + "x16x2x256";
    cases.push_back({"", "fwd", shape, dtype, 2 * batch * keys * row + queries,
                     2 * batch * row + queries, 2, 1, prepare, 4 * batch * keys * heads * dim});
  };
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    add(1, 1024, 1024, dtype);
    add(1, 1024, 32768, dtype);
    add(1, 8192, 8192, dtype);
    add(1, 32768, 32768, dtype);
    add(16, 2048, 2048, dtype);
  }
  return cases;
}

}  // namespace mlxtape::bench
