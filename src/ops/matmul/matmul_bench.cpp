#include "mlxtape/ops/matmul.h"

#include "cases/bench_case.h"
#include "cases/random.h"

namespace mlxtape::bench {

namespace {

using ops::Activation;
using ops::MatmulOptions;

// form: "" plain, "nt" b turned (a linear layer with its weights [N, K]), "tn" a turned (their gradient),
// "silu" with bias and silu, "add" added to y.
BenchCase bench_case(const char* form, std::int64_t batch, std::int64_t m, std::int64_t k,
                     std::int64_t n, DType dtype) {
  const std::string what = form;
  const std::int64_t size = static_cast<std::int64_t>(size_of(dtype));
  const std::string name = (batch > 1 ? std::to_string(batch) + "x" : "") + std::to_string(m) +
                           "x" + std::to_string(k) + "x" + std::to_string(n);
  BenchCase out{form, "fwd", name, dtype, batch * (m * k + k * n) * size, batch * m * n * size,
                2,    1,     {}};
  out.flops = 2 * batch * m * k * n;
  if (what == "add") out.read_bytes += m * n * size;
  out.prepare = [=](CommandEncoder& encoder) -> BenchCall {
    const auto make = [&](std::int64_t rows, std::int64_t cols, bool turn, std::uint64_t seed) {
      const Shape shape = turn ? Shape{batch, cols, rows} : Shape{batch, rows, cols};
      const Tensor stored = random_tensor(encoder, shape, dtype, seed);
      const Tensor t = turn ? stored.transpose({0, 2, 1}) : stored;
      return batch == 1 ? t.select(0, 0) : t;
    };
    const Tensor a = make(m, k, what == "tn", 1), b = make(k, n, what == "nt", 2);
    MatmulOptions options;
    if (what == "silu") {
      options.bias = random_tensor(encoder, {n}, dtype, 3);
      options.activation = Activation::kSilu;
    }
    if (what == "add") {
      const Tensor y = random_tensor(encoder, {m, n}, dtype, 4);
      return [=, &encoder] {
        ops::matmul_into(encoder, a, b, y);
      };
    }
    return [=, &encoder] {
      ops::matmul(encoder, a, b, options);
    };
  };
  return out;
}

}  // namespace

std::vector<BenchCase> matmul_bench_cases() {
  std::vector<BenchCase> cases;
  for (const DType dtype : kFloats) {
    cases.push_back(bench_case("", 1, 1024, 1024, 1024, dtype));
    cases.push_back(bench_case("nt", 1, 1024, 1024, 1024, dtype));
    for (const auto& [k, n] : std::vector<std::pair<std::int64_t, std::int64_t>>{
             {768, 768}, {768, 3072}, {3072, 768}, {768, 32000}}) {
      cases.push_back(bench_case("nt", 1, 512, k, n, dtype));  // x · Wᵀ
      cases.push_back(bench_case("", 1, 512, n, k, dtype));    // dy · W
      cases.push_back(bench_case("tn", 1, n, 512, k, dtype));  // dyᵀ · x
    }
    cases.push_back(bench_case("silu", 1, 512, 768, 3072, dtype));
    cases.push_back(bench_case("add", 1, 8192, 8, 3072, dtype));  // a LoRA adapter's
    for (const char* form : {"", "nt"}) {
      cases.push_back(bench_case(form, 1, 1, 2048, 2048, dtype));
      cases.push_back(bench_case(form, 1, 8, 2048, 8192, dtype));
      cases.push_back(bench_case(form, 64, 128, 64, 128, dtype));
    }
  }
  return cases;
}

}  // namespace mlxtape::bench
