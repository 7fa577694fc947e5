#include "mlxtape/ops/reduce.h"

#include <functional>

#include "cases/bench_case.h"
#include "cases/random.h"

namespace mlxtape::bench {

namespace {

using Run = std::function<Tensor(CommandEncoder&, const Tensor&, const ops::Axes&)>;

}  // namespace

std::vector<BenchCase> reduce_bench_cases() {
  const std::vector<std::pair<std::string, Run>> runs = {
      {"sum",
       [](CommandEncoder& e, const Tensor& x, const ops::Axes& a) {
         return ops::sum(e, x, a);
       }},
      {"max",
       [](CommandEncoder& e, const Tensor& x, const ops::Axes& a) {
         return ops::max(e, x, a);
       }},
      {"logsumexp",
       [](CommandEncoder& e, const Tensor& x, const ops::Axes& a) {
         return ops::logsumexp(e, x, a);
       }},
      {"var",
       [](CommandEncoder& e, const Tensor& x, const ops::Axes& a) {
         return ops::var(e, x, a);
       }},
  };
  std::vector<BenchCase> cases;
  for (const std::int64_t side : {4096, 256}) {
    for (const DType dtype : kFloats) {
      const Shape shape{side, side};
      const std::string at = std::to_string(side) + "x" + std::to_string(side);
      const std::int64_t bytes = side * side * static_cast<std::int64_t>(size_of(dtype));
      for (const auto& [name, run] : runs) {
        for (const auto& [form, axes] : std::vector<std::pair<std::string, ops::Axes>>{
                 {name + "_rows", 1}, {name + "_columns", 0}, {name + "_all", {}}}) {
          cases.push_back({form, "fwd", at, dtype, bytes, 0, 1, 0,
                           [=, run = run, axes = axes](CommandEncoder& encoder) {
                             const Tensor x = random_tensor(encoder, shape, dtype, 1);
                             return [=, &encoder] {
                               run(encoder, x, axes);
                             };
                           }});
        }
      }
    }
  }
  return cases;
}

}  // namespace mlxtape::bench
