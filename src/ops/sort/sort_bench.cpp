#include "mlxtape/ops/sort.h"

#include <functional>

#include "cases/bench_case.h"
#include "cases/random.h"

namespace mlxtape::bench {

namespace {

using Run = std::function<void(CommandEncoder&, const Tensor&)>;

}  // namespace

std::vector<BenchCase> sort_bench_cases() {
  struct Form {
    const char* name;
    Shape shape;
    std::int64_t kept;  // of a row
    bool values;
    Run run;
  };
  const auto topk = [](std::int64_t k) {
    return [=](CommandEncoder& e, const Tensor& x) {
      static_cast<void>(ops::topk(e, x, k));
    };
  };
  const Run argsort = [](CommandEncoder& e, const Tensor& x) {
    static_cast<void>(ops::argsort(e, x));
  };
  const std::vector<Form> forms = {
      {"sort",
       {4096, 4096},
       4096,
       true,
       [](CommandEncoder& e, const Tensor& x) {
         static_cast<void>(ops::sort(e, x));
       }},
      {"argsort", {4096, 4096}, 4096, false, argsort},
      {"argsort", {1, 1 << 20}, 1 << 20, false, argsort},
      {"argsort", {1, 1 << 14}, 1 << 14, false, argsort},
      {"topk8", {16384, 512}, 8, true, topk(8)},
      {"topk1024", {64, 151936}, 1024, true, topk(1024)},
      {"topk1024", {512, 250000}, 1024, true, topk(1024)},
      {"argmax_rows",
       {4096, 4096},
       1,
       false,
       [](CommandEncoder& e, const Tensor& x) {
         static_cast<void>(ops::argmax(e, x, 1));
       }},
      {"argmax_columns",
       {4096, 4096},
       1,
       false,
       [](CommandEncoder& e, const Tensor& x) {
         static_cast<void>(ops::argmax(e, x, 0));
       }},
      {"argmax_all",
       {4096, 4096},
       0,
       false,
       [](CommandEncoder& e, const Tensor& x) {
         static_cast<void>(ops::argmax(e, x));
       }},
      {"argmax_rows",
       {64, 151936},
       1,
       false,
       [](CommandEncoder& e, const Tensor& x) {
         static_cast<void>(ops::argmax(e, x, 1));
       }},
      {"argpartition",
       {64, 151936},
       151936,
       false,
       [](CommandEncoder& e, const Tensor& x) {
         static_cast<void>(ops::argpartition(e, x, -1024));
       }},
  };
  std::vector<BenchCase> cases;
  for (const Form& form : forms) {
    for (const DType dtype : {DType::kF32, DType::kBF16}) {
      const auto bytes = static_cast<std::int64_t>(size_of(dtype));
      const std::int64_t rows = form.shape[0], cols = form.shape[1];
      cases.push_back({form.name, "fwd", std::to_string(rows) + "x" + std::to_string(cols), dtype,
                       rows * cols * bytes, rows * form.kept * (4 + (form.values ? bytes : 0)), 1,
                       form.values ? 2 : 1, [=](CommandEncoder& encoder) {
                         const Tensor x = random_tensor(encoder, form.shape, dtype, 1);
                         return [=, &encoder] {
                           form.run(encoder, x);
                         };
                       }});
    }
  }
  return cases;
}

}  // namespace mlxtape::bench
