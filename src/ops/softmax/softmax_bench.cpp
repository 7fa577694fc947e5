#include "mlxtape/ops/softmax.h"

#include "cases/bench_case.h"
#include "cases/random.h"

namespace mlxtape::bench {

std::vector<BenchCase> softmax_bench_cases() {
  std::vector<BenchCase> cases;
  for (const auto& [rows, cols] :
       std::vector<std::pair<std::int64_t, std::int64_t>>{{16384, 512},
                                                          {8192, 512},
                                                          {16384, 4096},
                                                          {4096, 32768},
                                                          {2048, 32768},
                                                          {2048, 151936},
                                                          {64, 512},
                                                          {128, 1024},
                                                          {16384, 128},
                                                          {1000, 2047}}) {
    for (const DType dtype : kFloats) {
      const std::int64_t bytes = rows * cols * static_cast<std::int64_t>(size_of(dtype));
      const Shape shape{rows, cols};
      const std::string name = std::to_string(rows) + "x" + std::to_string(cols);
      cases.push_back({"", "fwd", name, dtype, bytes, bytes, 1, 1, [=](CommandEncoder& encoder) {
                         const Tensor x = random_tensor(encoder, shape, dtype, 1, 2);
                         return [=, &encoder] {
                           ops::softmax(encoder, x);
                         };
                       }});
      cases.push_back(
          {"", "bwd", name, dtype, 2 * bytes, bytes, 2, 1, [=](CommandEncoder& encoder) {
             const Tensor y = ops::softmax(encoder, random_tensor(encoder, shape, dtype, 1, 2));
             const Tensor dy = random_tensor(encoder, shape, dtype, 2);
             return [=, &encoder] {
               ops::softmax_backward(encoder, y, dy);
             };
           }});
    }
  }
  return cases;
}

}  // namespace mlxtape::bench
