#include "mlxtape/ops/take.h"

#include <algorithm>

#include "cases/bench_case.h"
#include "cases/random.h"

namespace mlxtape::bench {

std::vector<BenchCase> take_bench_cases() {
  struct Size {
    std::int64_t rows, width, n;
  };
  std::vector<BenchCase> cases;
  for (const Size& s : {Size{32768, 2048, 8192}, Size{100000, 64, 100000},
                        Size{1 << 20, 1, 1 << 20}, Size{1 << 16, 1, 1 << 20}}) {
    for (const DType dtype : {DType::kF32, DType::kBF16}) {
      const auto size = static_cast<std::int64_t>(size_of(dtype));
      const std::string name =
          std::to_string(s.rows) + "x" + std::to_string(s.width) + "x" + std::to_string(s.n);
      const std::int64_t bytes = s.n * s.width * size;
      const std::int64_t lines = std::min(std::max(bytes, 64 * s.n), s.rows * s.width * size);
      cases.push_back(
          {"", "fwd", name, dtype, lines + 4 * s.n, bytes, 2, 1, [=](CommandEncoder& encoder) {
             const Tensor x = random_tensor(encoder, {s.rows, s.width}, dtype, 1);
             const Tensor ids = random_ids(encoder, {s.n}, s.rows);
             return [=, &encoder] {
               static_cast<void>(ops::take(encoder, x, ids, 0));
             };
           }});
      cases.push_back({"", "bwd", name, dtype, bytes + 4 * s.n, s.rows * s.width * size, 2, 1,
                       [=](CommandEncoder& encoder) {
                         const Tensor dy = random_tensor(encoder, {s.n, s.width}, dtype, 1);
                         const Tensor ids = random_ids(encoder, {s.n}, s.rows);
                         return [=, &encoder] {
                           static_cast<void>(
                               ops::take_backward(encoder, dy, ids, {s.rows, s.width}, 0));
                         };
                       }});
    }
  }
  return cases;
}

}  // namespace mlxtape::bench
