#include "mlxtape/ops/embedding.h"

#include <cmath>

#include "cases/bench_case.h"
#include "cases/random.h"

namespace mlxtape::bench {

std::vector<BenchCase> embedding_bench_cases() {
  struct Size {
    std::int64_t rows, width, n;
  };
  std::vector<BenchCase> cases;
  for (const Size& s : {Size{151936, 2048, 16384}, Size{32000, 1024, 4096}}) {
    for (const DType dtype : {DType::kF32, DType::kBF16}) {
      const auto size = static_cast<std::int64_t>(size_of(dtype));
      const std::string name =
          std::to_string(s.rows) + "x" + std::to_string(s.width) + "x" + std::to_string(s.n);
      const std::int64_t bytes = s.n * s.width * size;
      const auto ids_of = [=](CommandEncoder& encoder) {
        Noise noise(7);
        std::vector<std::int32_t> ids;
        for (std::int64_t i = 0; i < s.n; ++i) {
          // As words are spread: a few make up much of a text, most come once.
          const double u = 0.5 + noise.next() / 2;
          ids.push_back(static_cast<std::int32_t>(std::pow(static_cast<double>(s.rows), u)) - 1);
        }
        const Tensor t = encoder.empty({s.n}, DType::kI32);
        encoder.upload(ids.data(), t.bytes(), t);
        return t;
      };
      cases.push_back({"", "fwd", name, dtype, bytes, bytes, 1, 1, [=](CommandEncoder& encoder) {
                         const Tensor w = random_tensor(encoder, {s.rows, s.width}, dtype, 1);
                         const Tensor ids = ids_of(encoder);
                         return [=, &encoder] {
                           static_cast<void>(ops::embedding(encoder, w, ids));
                         };
                       }});
      for (const bool rows : {true, false}) {
        if (!rows && s.rows > 100000) continue;
        const std::int64_t written = rows ? bytes : s.rows * s.width * size;
        cases.push_back(
            {rows ? "rows" : "dense", "bwd", name, dtype, bytes, written, 1, 1,
             [=](CommandEncoder& encoder) {
               const Tensor dy = random_tensor(encoder, {s.n, s.width}, dtype, 1);
               const Tensor ids = ids_of(encoder);
               const Shape shape{s.rows, s.width};
               return [=, &encoder] {
                 if (rows) {
                   static_cast<void>(ops::embedding_backward(encoder, dy, ids, shape, dtype));
                 } else {
                   static_cast<void>(ops::embedding_backward_dense(encoder, dy, ids, shape));
                 }
               };
             }});
      }
    }
  }
  return cases;
}

}  // namespace mlxtape::bench
