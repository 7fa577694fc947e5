#include "mlxtape/ops/gated_delta_rule.h"

#include <cmath>

#include "cases/bench_case.h"
#include "cases/random.h"

namespace mlxtape::bench {

namespace {

using ops::GatedDeltaRuleInputs;
using ops::GatedDeltaRuleOptions;

// log g as a model has it, or β.
Tensor random_gates(CommandEncoder& encoder, const Shape& shape, bool decay) {
  const Tensor t = encoder.empty(shape, DType::kF32);
  std::vector<float> values(static_cast<std::size_t>(t.size()));
  Noise noise(decay ? 4 : 5);
  for (float& v : values) {
    const double normal = noise.normal();
    v = static_cast<float>(decay ? -std::abs(0.1 * normal) : 1 / (1 + std::exp(-normal)));
  }
  encoder.upload(values.data(), values.size() * sizeof(float), t);
  return t;
}

}  // namespace

std::vector<BenchCase> gated_delta_rule_bench_cases() {
  std::vector<BenchCase> cases;
  const std::int64_t key_heads = 16, heads = 32, width = 128;  // Qwen3-Next
  for (const std::int64_t tokens : {2048, 16384}) {
    for (const DType dtype : {DType::kF32, DType::kBF16}) {
      const auto element = static_cast<std::int64_t>(size_of(dtype));
      const std::int64_t keys = tokens * key_heads * width * element;
      const std::int64_t values = tokens * heads * width * element, gates = tokens * heads * 4;
      const std::int64_t products = tokens * heads * width * width * 2;
      const auto prepare = [=](bool back) {
        return [=](CommandEncoder& encoder) -> BenchCall {
          GatedDeltaRuleInputs in{random_tensor(encoder, {1, tokens, key_heads, width}, dtype, 1),
                                  random_tensor(encoder, {1, tokens, key_heads, width}, dtype, 2),
                                  random_tensor(encoder, {1, tokens, heads, width}, dtype, 3),
                                  random_gates(encoder, {1, tokens, heads}, true),
                                  random_gates(encoder, {1, tokens, heads}, false)};
          const Tensor dy = random_tensor(encoder, in.v.shape(), dtype, 6);
          GatedDeltaRuleOptions options;
          options.normalise = true;
          if (!back) {
            return [=, &encoder] {
              static_cast<void>(ops::gated_delta_rule(encoder, in, options));
            };
          }
          return [=, &encoder] {
            static_cast<void>(ops::gated_delta_rule_backward(encoder, in, dy, options));
          };
        };
      };
      const std::string shape = std::to_string(tokens) + "x16x32x128";
      cases.push_back({"", "fwd", shape, dtype, 2 * keys + values + 2 * gates, values, 5, 1,
                       prepare(false), 3 * products});
      cases.push_back({"", "bwd", shape, dtype, 2 * keys + 2 * values + 2 * gates,
                       2 * keys + values + 2 * gates, 6, 5, prepare(true), 13 * products});
    }
  }
  return cases;
}

}  // namespace mlxtape::bench
