#include "mlxtape/ops/take_along_axis.h"

#include <algorithm>
#include <numeric>

#include "cases/bench_case.h"
#include "cases/random.h"

namespace mlxtape::bench {

namespace {

// k different columns of each row, in no order.
Tensor random_choice(CommandEncoder& encoder, std::int64_t rows, std::int64_t cols,
                     std::int64_t k) {
  Noise noise(7);
  std::vector<std::uint32_t> all(static_cast<std::size_t>(cols));
  std::iota(all.begin(), all.end(), 0U);
  std::vector<std::uint32_t> chosen;
  for (std::int64_t r = 0; r < rows; ++r) {
    for (std::int64_t j = 0; j < k; ++j) {
      std::swap(all[static_cast<std::size_t>(j)],
                all[static_cast<std::size_t>(j + noise.below(cols - j))]);
      chosen.push_back(all[static_cast<std::size_t>(j)]);
    }
  }
  const Tensor t = encoder.empty({rows, k}, DType::kU32);
  encoder.upload(chosen.data(), t.bytes(), t);
  return t;
}

}  // namespace

std::vector<BenchCase> take_along_axis_bench_cases() {
  struct Size {
    std::int64_t rows, cols, k;
  };
  std::vector<BenchCase> cases;
  for (const Size& s : {Size{16384, 512, 10}, Size{8192, 512, 10}, Size{256, 512, 10},
                        Size{4096, 4096, 64}, Size{256, 151936, 64}, Size{1000, 2047, 7}}) {
    for (const DType dtype : kFloats) {
      const auto size = static_cast<std::int64_t>(size_of(dtype));
      const std::int64_t index_bytes = s.rows * s.k * 4, y_bytes = s.rows * s.k * size;
      const std::int64_t x_bytes = s.rows * s.cols * size;
      const std::int64_t lines = std::min(64 * s.rows * s.k, x_bytes);
      const std::string name =
          std::to_string(s.rows) + "x" + std::to_string(s.cols) + "x" + std::to_string(s.k);
      cases.push_back({"", "fwd", name, dtype, index_bytes + lines, y_bytes, 2, 1,
                       [=](CommandEncoder& encoder) {
                         const Tensor x = random_tensor(encoder, {s.rows, s.cols}, dtype, 1);
                         const Tensor at = random_choice(encoder, s.rows, s.cols, s.k);
                         return [=, &encoder] {
                           ops::take_along_axis(encoder, x, at, 1);
                         };
                       }});
      cases.push_back({"", "bwd", name, dtype, index_bytes + y_bytes, x_bytes, 2, 1,
                       [=](CommandEncoder& encoder) {
                         const Tensor dy = random_tensor(encoder, {s.rows, s.k}, dtype, 1);
                         const Tensor at = random_choice(encoder, s.rows, s.cols, s.k);
                         const Shape shape{s.rows, s.cols};
                         return [=, &encoder] {
                           ops::take_along_axis_backward(encoder, dy, at, shape, 1);
                         };
                       }});
    }
  }
  return cases;
}

}  // namespace mlxtape::bench
