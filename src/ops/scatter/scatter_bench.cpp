#include "mlxtape/ops/scatter.h"

#include "cases/bench_case.h"
#include "cases/random.h"

namespace mlxtape::bench {

std::vector<BenchCase> scatter_bench_cases() {
  std::vector<BenchCase> cases;
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    const auto size = static_cast<std::int64_t>(size_of(dtype));
    const std::int64_t rows = 16384, width = 1024, n = 8192;
    cases.push_back({"rows", "fwd", "16384x1024x8192", dtype, (rows + n) * width * size,
                     rows * width * size, 2, 1, [=](CommandEncoder& encoder) {
                       const Tensor x = random_tensor(encoder, {rows, width}, dtype, 1);
                       const Tensor v = random_tensor(encoder, {n, width}, dtype, 2);
                       const Tensor ids = random_ids(encoder, {n}, rows);
                       return [=, &encoder] {
                         static_cast<void>(ops::scatter_add(encoder, x, ids, v));
                       };
                     }});
    const std::int64_t r = 4096, c = 1024, k = 256;
    const std::int64_t read = r * (c + k) * size + r * k * 4;
    const auto along = [=](const char* form, bool adds) {
      return BenchCase{form,
                       "fwd",
                       "4096x1024x256",
                       dtype,
                       read,
                       r * c * size,
                       3,
                       1,
                       [=](CommandEncoder& encoder) {
                         const Tensor x = random_tensor(encoder, {r, c}, dtype, 1);
                         const Tensor v = random_tensor(encoder, {r, k}, dtype, 2);
                         const Tensor ids = random_ids(encoder, {r, k}, c);
                         return [=, &encoder] {
                           static_cast<void>(adds ? ops::scatter_add_axis(encoder, x, ids, v, 1)
                                                  : ops::put_along_axis(encoder, x, ids, v, 1));
                         };
                       }};
    };
    cases.push_back(along("put", false));
    cases.push_back(along("add axis", true));
  }
  return cases;
}

}  // namespace mlxtape::bench
