#include "mlxtape/ops/elementwise.h"

#include "cases/bench_case.h"
#include "cases/random.h"
#include "mlxtape/tape/tape.h"

namespace mlxtape::bench {

namespace {

struct Unary {
  const char* name;
  Tensor (*run)(CommandEncoder&, Tensor);
  bool positive = false;  // takes positive numbers alone
};
const Unary kUnaries[] = {
    {"abs", ops::abs},
    {"exp", ops::exp},
    {"gelu", ops::gelu},
    {"gelu_tanh", ops::gelu_tanh},
    {"log", ops::log, true},
    {"log1p", ops::log1p, true},
    {"negative", ops::negative},
    {"rsqrt", ops::rsqrt, true},
    {"sigmoid", ops::sigmoid},
    {"silu", ops::silu},
    {"softplus", ops::softplus},
    {"sqrt", ops::sqrt, true},
    {"square", ops::square},
    {"tanh", ops::tanh},
    {"clip",
     [](CommandEncoder& encoder, Tensor x) {
       return ops::clip(encoder, std::move(x), -1.25, 0.5);
     }},
};

struct Binary {
  const char* name;
  Tensor (*run)(CommandEncoder&, Tensor, const Tensor&);
  bool positive = false;
};
const Binary kBinaries[] = {
    {"add", ops::add},           {"subtract", ops::subtract},
    {"multiply", ops::multiply}, {"divide", ops::divide, true},
    {"power", ops::power, true}, {"maximum", ops::maximum},
    {"minimum", ops::minimum},   {"swiglu", ops::swiglu},
};

// What is done most, for its forward and backward by the tape.
struct Recorded {
  const char* name;
  Tensor (*record)(Tape&, const Tensor&);
};
const Recorded kRecorded[] = {{"silu", ops::silu}, {"gelu", ops::gelu}, {"tanh", ops::tanh}};

}  // namespace

std::vector<BenchCase> elementwise_bench_cases() {
  std::vector<BenchCase> cases;
  const auto pairs = std::vector<std::int64_t>{4096, 256};
  for (const std::int64_t side : pairs) {
    for (const DType dtype : kFloats) {
      const Shape shape{side, side};
      const std::string at = std::to_string(side) + "x" + std::to_string(side);
      const std::int64_t bytes = side * side * static_cast<std::int64_t>(size_of(dtype));
      for (const Unary& op : kUnaries) {
        const auto input = [=](CommandEncoder& encoder) {
          const Tensor x = random_tensor(encoder, shape, dtype, 1);
          return op.positive ? ops::abs(encoder, x) : x;
        };
        cases.push_back(
            {op.name, "fwd", at, dtype, bytes, bytes, 1, 1, [=](CommandEncoder& encoder) {
               const Tensor x = input(encoder);
               return [=, &encoder] {
                 op.run(encoder, x);
               };
             }});
      }
      for (const Binary& op : kBinaries) {
        const auto add = [&](const std::string& form, const Shape& other, std::int64_t more) {
          cases.push_back({form, "fwd", at, dtype, bytes + more, bytes, more == bytes ? 2 : 1, 1,
                           [=](CommandEncoder& encoder) {
                             Tensor a = random_tensor(encoder, shape, dtype, 1);
                             Tensor b = random_tensor(encoder, other, dtype, 2);
                             if (op.positive) a = ops::abs(encoder, a), b = ops::abs(encoder, b);
                             return [=, &encoder] {
                               op.run(encoder, a, b);
                             };
                           }});
        };
        const std::string name = op.name;
        add(name, shape, bytes);
        if (name == "add" || name == "multiply") {
          add(name + "_row", {side}, 0);
          add(name + "_column", {side, 1}, 0);
          add(name + "_one", {1}, 0);
        }
      }
      cases.push_back(
          {"less", "fwd", at, dtype, 2 * bytes, side * side, 2, 1, [=](CommandEncoder& encoder) {
             const Tensor a = random_tensor(encoder, shape, dtype, 1);
             const Tensor b = random_tensor(encoder, shape, dtype, 2);
             return [=, &encoder] {
               ops::less(encoder, a, b);
             };
           }});
      // By the tape: dy once more, and dx.
      for (const Recorded& op : kRecorded) {
        cases.push_back({op.name, "fwd+bwd", at, dtype, 3 * bytes, 2 * bytes, 3, 2,
                         [=](CommandEncoder& encoder) {
                           const Tensor x = random_tensor(encoder, shape, dtype, 1);
                           const Tensor dy = random_tensor(encoder, shape, dtype, 2);
                           return [=, &encoder] {
                             Tape tape(encoder);
                             tape.backward(op.record(tape, tape.watch(x)), dy);
                           };
                         }});
      }
      cases.push_back({"swiglu", "fwd+bwd", at, dtype, 5 * bytes, 3 * bytes, 5, 3,
                       [=](CommandEncoder& encoder) {
                         const Tensor a = random_tensor(encoder, shape, dtype, 1);
                         const Tensor b = random_tensor(encoder, shape, dtype, 2);
                         const Tensor dy = random_tensor(encoder, shape, dtype, 3);
                         return [=, &encoder] {
                           Tape tape(encoder);
                           tape.backward(ops::swiglu(tape, tape.watch(a), tape.watch(b)), dy);
                         };
                       }});
    }
  }
  return cases;
}

}  // namespace mlxtape::bench
