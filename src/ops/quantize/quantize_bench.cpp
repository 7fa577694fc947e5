#include "mlxtape/ops/quantize.h"

#include "cases/bench_case.h"
#include "cases/random.h"

namespace mlxtape::bench {

namespace {

using ops::QuantizedWeight;
using ops::QuantizeFormat;

}  // namespace

std::vector<BenchCase> quantize_bench_cases() {
  std::vector<BenchCase> cases;
  const std::int64_t rows = 4096, cols = 4096;
  const auto add = [&](DType dtype, int bits) {
    const QuantizeFormat format{bits, 64};
    const auto size = static_cast<std::int64_t>(size_of(dtype));
    const std::int64_t dense = rows * cols * size;
    const std::int64_t codes = rows * cols * bits / 8, pairs = 2 * rows * cols / 64 * size;
    const std::string shape = "4096x4096x" + std::to_string(bits);
    const auto weights = [=](CommandEncoder& encoder) {
      return random_tensor(encoder, {rows, cols}, dtype, 1);
    };
    cases.push_back({"", "fwd", shape, dtype, dense, codes + pairs, 1, 3,
                     [=](CommandEncoder& encoder) -> BenchCall {
                       const Tensor w = weights(encoder);
                       return [=, &encoder] {
                         static_cast<void>(ops::quantize(encoder, w, format));
                       };
                     }});
    cases.push_back({"back", "fwd", shape, dtype, codes + pairs, dense, 3, 1,
                     [=](CommandEncoder& encoder) -> BenchCall {
                       const QuantizedWeight q = ops::quantize(encoder, weights(encoder), format);
                       return [=, &encoder] {
                         static_cast<void>(ops::dequantize(encoder, q));
                       };
                     }});
    cases.push_back({"back", "bwd", shape, dtype, codes + dense, pairs, 2, 2,
                     [=](CommandEncoder& encoder) -> BenchCall {
                       const Tensor w = weights(encoder);
                       const QuantizedWeight q = ops::quantize(encoder, w, format);
                       return [=, &encoder] {
                         static_cast<void>(ops::dequantize_backward(encoder, q, w));
                       };
                     }});
  };
  add(DType::kF32, 4);
  for (const int bits : {3, 4, 8}) add(DType::kBF16, bits);
  return cases;
}

}  // namespace mlxtape::bench
