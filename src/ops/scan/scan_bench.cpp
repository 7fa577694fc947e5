#include "mlxtape/ops/scan.h"

#include "cases/bench_case.h"
#include "cases/random.h"

namespace mlxtape::bench {

std::vector<BenchCase> scan_bench_cases() {
  std::vector<BenchCase> cases;
  struct Row {
    const char* form;
    const char* name;
    Shape shape;
    std::int64_t axis;
    bool reverse;
  };
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    for (const Row& row : {Row{"", "16384x1024", {16384, 1024}, 1, false},
                           Row{"reverse", "16384x1024", {16384, 1024}, 1, true},
                           Row{"", "1x16777216", {1, 16777216}, 1, false},
                           Row{"columns", "4096x4096", {4096, 4096}, 0, false},
                           Row{"columns", "524288x32", {524288, 32}, 0, false},
                           Row{"", "262144x64", {262144, 64}, 1, false}}) {
      const std::int64_t bytes =
          *element_count(row.shape) * static_cast<std::int64_t>(size_of(dtype));
      cases.push_back(
          {row.form, "fwd", row.name, dtype, bytes, bytes, 1, 1, [=](CommandEncoder& encoder) {
             const Tensor x = random_tensor(encoder, row.shape, dtype, 1);
             return [=, &encoder] {
               static_cast<void>(ops::cumsum(encoder, x, row.axis, row.reverse));
             };
           }});
    }
  }
  return cases;
}

}  // namespace mlxtape::bench
