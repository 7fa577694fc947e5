#include "mlxtape/ops/moe_route.h"

#include "cases/bench_case.h"
#include "cases/random.h"

namespace mlxtape::bench {

std::vector<BenchCase> moe_route_bench_cases() {
  struct Problem {
    std::int64_t rows, experts, k;
    bool full;
  };
  std::vector<BenchCase> cases;
  const auto add = [&](const Problem& p, DType dtype) {
    const auto size = static_cast<std::int64_t>(size_of(dtype));
    const std::int64_t all = p.rows * p.experts * size;
    const std::int64_t chosen = p.rows * p.k;
    const std::string name =
        std::to_string(p.rows) + "x" + std::to_string(p.experts) + "x" + std::to_string(p.k);
    const std::string form = p.full ? "full" : "";
    const ops::MoeRouteOptions options{.renormalise = !p.full};
    const Shape shape{p.rows, p.experts};
    cases.push_back(
        {form, "fwd", name, dtype, all, chosen * (4 + size), 1, 2, [=](CommandEncoder& encoder) {
           const Tensor x = random_tensor(encoder, shape, dtype, 1);
           return [=, &encoder] {
             ops::moe_route(encoder, x, p.k, options);
           };
         }});
    const std::int64_t read = chosen * (4 + 2 * size) + (p.full ? all : 0);
    cases.push_back(
        {form, "bwd", name, dtype, read, all, p.full ? 4 : 3, 1, [=](CommandEncoder& encoder) {
           const Tensor x = random_tensor(encoder, shape, dtype, 1);
           const auto r = ops::moe_route(encoder, x, p.k, options);
           const ops::MoeRouteSaved saved{x, r.indices, r.scores, r.lse};
           const Tensor ds = random_tensor(encoder, {p.rows, p.k}, dtype, 2);
           return [=, &encoder] {
             ops::moe_route_backward(encoder, saved, ds);
           };
         }});
  };
  for (const DType dtype : kFloats) {
    add({16384, 512, 10, false}, dtype);
    add({8192, 512, 10, false}, dtype);
    add({64, 512, 10, false}, dtype);
    add({16384, 128, 8, false}, dtype);
    add({1000, 511, 7, false}, dtype);
    add({16384, 512, 10, true}, dtype);
  }
  return cases;
}

}  // namespace mlxtape::bench
