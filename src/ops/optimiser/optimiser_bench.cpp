#include "mlxtape/ops/optimiser.h"

#include "cases/bench_case.h"
#include "cases/random.h"

namespace mlxtape::bench {

namespace {

using ops::AdamWSlot;

}  // namespace

std::vector<BenchCase> optimiser_bench_cases() {
  std::vector<BenchCase> cases;
  const auto add = [&](const char* form, std::int64_t n, DType dtype, bool master) {
    const auto bytes = static_cast<std::int64_t>(size_of(dtype));
    // grad, m, v and w or the master copy; all but grad are written, and w where there is a master.
    const std::int64_t read = n * (bytes + 8 + (master ? 4 : bytes));
    const std::int64_t written = n * (8 + bytes + (master ? 4 : 0));
    cases.push_back(
        {form, "fwd", std::to_string(n), dtype, read, written, 4, master ? 4 : 3,
         [=](CommandEncoder& encoder) {
           AdamWSlot s{random_tensor(encoder, {n}, dtype, 1), random_tensor(encoder, {n}, dtype, 2),
                       encoder.zeros({n}, DType::kF32), encoder.zeros({n}, DType::kF32)};
           if (master) s.master = random_tensor(encoder, {n}, DType::kF32, 3);
           const Tensor lr = encoder.full({1}, DType::kF32, 1e-6);
           const Tensor t = encoder.full({1}, DType::kI32, 1);
           return [=, &encoder] {
             ops::adamw_step(encoder, {s}, {lr, t});
           };
         }});
  };
  for (const DType dtype :
       {DType::kF32, DType::kBF16}) {  // a step of an embedding after 8192 tokens
    const std::int64_t rows = 65536, width = 1024, n = 8192;
    const auto bytes = static_cast<std::int64_t>(size_of(dtype));
    cases.push_back({"adamw rows", "fwd", "65536x1024x8192", dtype, n * width * (2 * bytes + 8),
                     n * width * (bytes + 8), 4, 3, [=](CommandEncoder& encoder) {
                       std::vector<std::int32_t> ids;
                       for (std::int64_t i = 0; i < n; ++i) {
                         ids.push_back(static_cast<std::int32_t>(8 * i));
                       }
                       AdamWSlot s{random_tensor(encoder, {rows, width}, dtype, 1),
                                   random_tensor(encoder, {n, width}, dtype, 2),
                                   encoder.zeros({rows, width}, DType::kF32),
                                   encoder.zeros({rows, width}, DType::kF32)};
                       s.ids = encoder.empty({n}, DType::kI32);
                       encoder.upload(ids.data(), s.ids.bytes(), s.ids);
                       const Tensor lr = encoder.full({1}, DType::kF32, 1e-6);
                       const Tensor t = encoder.full({1}, DType::kI32, 1);
                       return [=, &encoder] {
                         ops::adamw_step(encoder, {s}, {lr, t});
                       };
                     }});
  }
  constexpr std::int64_t kMany = 1 << 24;
  cases.push_back({"lion", "fwd", std::to_string(kMany), DType::kF32, kMany * 12, kMany * 8, 3, 2,
                   [=](CommandEncoder& encoder) {
                     const ops::LionSlot s{random_tensor(encoder, {kMany}, DType::kF32, 1),
                                           random_tensor(encoder, {kMany}, DType::kF32, 2),
                                           encoder.zeros({kMany}, DType::kF32)};
                     const Tensor lr = encoder.full({1}, DType::kF32, 1e-6);
                     return [=, &encoder] {
                       ops::lion_step(encoder, {s}, {lr, {}});
                     };
                   }});
  add("adamw", 1 << 24, DType::kF32, false);
  add("adamw", 1 << 16, DType::kF32, false);
  add("adamw master", 1 << 24, DType::kBF16, true);
  add("adamw", 1 << 30, DType::kF32, false);
  add("adamw master", 1 << 30, DType::kBF16, true);
  return cases;
}

}  // namespace mlxtape::bench
