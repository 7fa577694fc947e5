#include "mlxtape/ops/delta_gates.h"

#include "cases/bench_case.h"
#include "cases/random.h"

namespace mlxtape::bench {

namespace {

using ops::DeltaGatesInputs;

}  // namespace

std::vector<BenchCase> delta_gates_bench_cases() {
  std::vector<BenchCase> cases;
  const std::int64_t tokens = 16384, heads = 32;  // Qwen3-Next
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    const std::int64_t in = tokens * heads * static_cast<std::int64_t>(size_of(dtype));
    const std::int64_t out = tokens * heads * 4;
    const auto prepare = [=](bool back) {
      return [=](CommandEncoder& encoder) -> BenchCall {
        const DeltaGatesInputs at{random_tensor(encoder, {tokens, heads}, dtype, 1),
                                  random_tensor(encoder, {tokens, heads}, dtype, 2),
                                  random_tensor(encoder, {heads}, DType::kF32, 3),
                                  random_tensor(encoder, {heads}, DType::kF32, 4)};
        if (!back)
          return [=, &encoder] {
            static_cast<void>(ops::delta_gates(encoder, at));
          };
        const Tensor dd = random_tensor(encoder, {tokens, heads}, DType::kF32, 5);
        return [=, &encoder] {
          static_cast<void>(ops::delta_gates_backward(encoder, at, dd, dd));
        };
      };
    };
    cases.push_back({"", "fwd", "16384x32", dtype, 2 * in, 2 * out, 2, 2, prepare(false)});
    cases.push_back({"", "bwd", "16384x32", dtype, 2 * in + 2 * out, 2 * in, 4, 2, prepare(true)});
  }
  return cases;
}

}  // namespace mlxtape::bench
