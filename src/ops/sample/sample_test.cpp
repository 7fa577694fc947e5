#include "mlxtape/ops/sample.h"

#include <cmath>
#include <functional>
#include <tuple>

#include "sample_cases.h"

namespace mlxtape::test {
namespace {

TEST(SampleOracle, WordsAreThoseOfThreefry) {  // the authors' known answers
  using Words = std::pair<std::uint32_t, std::uint32_t>;
  EXPECT_EQ(threefry(0, 0, 0, 0), Words(0x6b200159, 0x99ba4efe));
  EXPECT_EQ(threefry(~0U, ~0U, ~0U, ~0U), Words(0x1cb996fc, 0xbb002be7));
  EXPECT_EQ(threefry(0x13198a2e, 0x03707344, 0x243f6a88, 0x85a308d3),
            Words(0xc4923a9c, 0x483df7a0));
}

TEST(SampleOracle, WeightsAreExponentials) {
  EXPECT_EQ(weight_of(0, 1), std::uint64_t{1} << 40U);
  EXPECT_EQ(weight_of(INFINITY, 1e-38F), 0U);
  EXPECT_EQ(weight_of(41, 1), 0U);
  for (int i = 0; i < 100000; ++i) {
    const float d = static_cast<float>(i) * 0.00028F;
    const double want = std::exp2(40 - static_cast<double>(d) * 1.4426950408889634);
    EXPECT_NEAR(static_cast<double>(weight_of(d, 1.44269504F)), want, want * 0x1p-18 + 1) << d;
  }
}

// Tensors without memory that pass the check, but for what a row of the table spoils.
struct Given {
  Tensor logits = Tensor::meta({4, 9});
  SampleRows rows{Tensor::meta({4, 6}),
                  Tensor::meta({4, 6}, DType::kI32),
                  Tensor::meta({4, 5}, DType::kI32),
                  Tensor::meta({4}, DType::kI32),
                  Tensor::meta({4, 2}, DType::kI32),
                  Tensor::meta({4, 2})};
  SampleOptions options = {};
};
Check with(const std::function<void(Given&)>& spoil) {
  Given given;
  spoil(given);
  return ops::sample_check(given.logits, given.rows, given.options);
}

TEST(SampleCheck, SaysWhatIsWrong) {
  const auto strided = [](Shape shape) {
    shape.push_back(2);
    return Device::cpu().empty(shape, DType::kI32).select(-1, 0);
  };
  expect_refused({
      {"rank 1", with([](auto& g) { g.logits = Tensor::meta({4}); }), Errc::kShape,
       "logits must be [B, V], got [4]"},
      {"integers", with([](auto& g) { g.logits = Tensor::meta({4, 9}, DType::kI32); }),
       Errc::kDType, "f32, f16 or bf16, got i32"},
      {"no token", with([](auto& g) { g.logits = Tensor::meta({4, 0}); }), Errc::kShape,
       "less than 2^24, got 0"},
      {"too many tokens", with([](auto& g) { g.logits = Tensor::meta({4, 1 << 24}); }),
       Errc::kShape, "less than 2^24, got 16777216"},
      {"numbers", with([](auto& g) { g.rows.numbers = Tensor::meta({4, 5}); }), Errc::kShape,
       "numbers must be [4, 6], got [4, 5]"},
      {"whole", with([](auto& g) { g.rows.whole = Tensor::meta({4, 6}); }), Errc::kDType,
       "whole must be i32, got f32"},
      {"history of rank 1", with([](auto& g) { g.rows.history = g.rows.lengths; }), Errc::kShape,
       "history must be [B, H] with H at most 2^30, got [4]"},
      {"history of others",
       with([](auto& g) { g.rows.history = Tensor::meta({3, 5}, DType::kI32); }), Errc::kShape,
       "history must be [4, 5], got [3, 5]"},
      {"lengths",
       with([](auto& g) { g.rows.lengths = Tensor::meta({4}, DType::kI32, Backend::kMetal); }),
       Errc::kDevice, "lengths must be where logits is (cpu), got metal"},
      {"bias alone", with([](auto& g) { g.rows.bias_ids = {}; }), Errc::kArgument,
       "must come together, got bias alone"},
      {"too many biases",
       with([](auto& g) { g.rows.bias_ids = Tensor::meta({4, 1025}, DType::kI32); }), Errc::kShape,
       "K at most 1024, got [4, 1025]"},
      {"biases of others",
       with([](auto& g) { g.rows.bias_ids = Tensor::meta({2, 2}, DType::kI32); }), Errc::kShape,
       "bias_ids must be [4, 2], got [2, 2]"},
      {"bias", with([](auto& g) { g.rows.bias = Tensor::meta({4, 1}); }), Errc::kShape,
       "bias must be [4, 2], got [4, 1]"},
      {"top alone", with([](auto& g) { g.options.top = true; }), Errc::kArgument,
       "top must come with logprobs"},
      {"history that is no row", with([&](auto& g) {
         g.options.append = true;
         g.rows.history = strided({4, 5});
       }),
       Errc::kArgument, "must be contiguous"},
      {"lengths apart", with([&](auto& g) {
         g.options.append = true;
         g.rows.lengths = strided({4});
       }),
       Errc::kArgument, "must be contiguous"},
  });
  EXPECT_FALSE(with([](auto&) {}));
  EXPECT_FALSE(with([](auto& g) { g.rows.bias_ids = g.rows.bias = {}; }));
}

TEST(SampleCheck, SaysWhatIsWrongWithARow) {
  const auto row = [](auto set) {
    SampleRow r;
    set(r);
    return ops::sample_row_check(r);
  };
  const auto code = Errc::kArgument;
  expect_refused({
      {"cold", row([](auto& r) { r.temperature = -1; }), code, "at least 0, got -1"},
      {"hot", row([](auto& r) { r.temperature = 1e39; }), code, "temperature must be a finite"},
      {"no top_p", row([](auto& r) { r.top_p = 0; }), code, "above 0 and at most 1, got 0"},
      {"min_p", row([](auto& r) { r.min_p = 1.5; }), code, "min_p must be from 0 to 1, got 1.5"},
      {"top_k", row([](auto& r) { r.top_k = -1; }), code, "top_k must be at least 0, got -1"},
      {"penalty", row([](auto& r) { r.repetition_penalty = 0; }), code, "above 0, got 0"},
      {"no number", row([](auto& r) { r.frequency_penalty = NAN; }), code, "0.000000 and nan"},
      {"start", row([](auto& r) { r.start = -2; }), code, "start must be at least 0, got -2"},
  });
  EXPECT_FALSE(row([](auto&) {}));
}

class Sample : public SampleRun {};

TEST_P(Sample, MatchesOracleForEveryShape) {
  Noise noise(1);
  const auto batch = [&](std::int64_t rows, std::int64_t tokens) {
    std::vector<SampleCase> cases;
    for (std::int64_t b = 0; b < rows; ++b) {
      cases.push_back(any_case(noise, tokens, b % 3 == 0 ? 0.3 : 3));
    }
    return cases;
  };
  for (const DType dtype : kTypes) {
    for (const std::int64_t tokens : {1, 2, 31, 32, 33, 255, 256, 257, 1000}) {
      for (const std::int64_t rows : {1, 2, 8, 33}) check("any", batch(rows, tokens), dtype);
    }
    check("odd", batch(3, 8193), dtype, 3);
    check("long", batch(3, 151936), dtype);
  }
  check("shorter than a cluster's", batch(3, 4096), DType::kBF16);
  check("as short", batch(3, 4097), DType::kF32, 1);
  check("too long for shared memory", batch(1, 450000), DType::kF16);
}

TEST_P(Sample, NoRows) {
  const SampleRows rows{encoder().empty({0, 6}, DType::kF32), encoder().empty({0, 6}, DType::kI32),
                        encoder().empty({0, 3}, DType::kI32), encoder().empty({0}, DType::kI32)};
  const auto s = ops::sample(encoder(), encoder().empty({0, 5}, DType::kF32), rows, kEverything);
  EXPECT_EQ(s.tokens.shape(), Shape{0});
  EXPECT_EQ(s.top_ids.shape(), (Shape{0, 20}));
}

// One row of these logits for each kind of settings.
std::vector<SampleCase> each_filter(const std::vector<double>& logits) {
  std::vector<SampleCase> cases;
  for (const double temperature : {0.0, 1.0, 0.6, 1e30, 1e-30, 1e-60}) {
    for (const auto& [top_p, top_k, min_p] :
         std::vector<std::tuple<double, std::int64_t, double>>{{1, 0, 0},
                                                               {0.9, 0, 0},
                                                               {1 - 1e-6, 0, 0},
                                                               {1e-30, 0, 0},
                                                               {1, 1, 0},
                                                               {1, 50, 0},
                                                               {1, 1LL << 40, 0},
                                                               {1, 0, 1},
                                                               {0.5, 30, 0.01}}) {
      SampleCase c{logits};
      c.row.temperature = temperature;
      c.row.top_p = top_p;
      c.row.top_k = top_k;
      c.row.min_p = min_p;
      c.row.seed = cases.size() * 7919;
      cases.push_back(c);
    }
  }
  return cases;
}

TEST_P(Sample, LogitsOfEveryKind) {
  const double inf = INFINITY, nan = std::nan("");
  Noise noise(3);
  using Kind = std::function<double(std::int64_t)>;
  const std::pair<const char*, Kind> kinds[] = {{"flat",
                                                 [&](std::int64_t) {
                                                   return 0.01 * noise.normal();
                                                 }},
                                                {"equal",
                                                 [](std::int64_t) {
                                                   return -2.5;
                                                 }},
                                                {"equal zeros of both signs",
                                                 [](std::int64_t i) {
                                                   return i % 2 == 0 ? -0.0 : 0.0;
                                                 }},
                                                {"few values",
                                                 [](std::int64_t i) {
                                                   return static_cast<double>(i % 7);
                                                 }},
                                                {"one-hot",
                                                 [&](std::int64_t i) {
                                                   return i == 77 ? 9 : -inf;
                                                 }},
                                                {"masked",
                                                 [&](std::int64_t i) {
                                                   return i % 3 == 1 ? noise.normal() : -inf;
                                                 }},
                                                {"with NaN",
                                                 [&](std::int64_t i) {
                                                   return i % 5 == 0 ? nan : noise.normal();
                                                 }},
                                                {"far apart",
                                                 [&](std::int64_t) {
                                                   return 200 * noise.normal();
                                                 }},
                                                {"peaked",
                                                 [&](std::int64_t i) {
                                                   return i == 90 ? 12.0 : noise.normal();
                                                 }},
                                                {"large",
                                                 [&](std::int64_t) {
                                                   return 6e4 * noise.next();
                                                 }},
                                                {"rising", [](std::int64_t i) {
                                                   return static_cast<double>(i) * 0.01;
                                                 }}};
  for (const auto& [name, kind] : kinds) {
    for (const std::int64_t tokens : {100, 5000}) {
      std::vector<double> logits;
      for (std::int64_t i = 0; i < tokens; ++i) logits.push_back(kind(i));
      check(name, each_filter(logits), DType::kF32);
      check(name, each_filter(logits), DType::kBF16);
    }
  }
  std::vector<double> logits(151936, 1.5);  // all tie
  check("equal", {each_filter(logits)[10], each_filter(logits)[14]}, DType::kF32);
}

TEST_P(Sample, RowsWithNothingToChoose) {
  const double inf = INFINITY, nan = std::nan("");
  std::vector<SampleCase> cases(7);
  for (SampleCase& c : cases) c.logits = {nan, -inf, -inf};
  cases[1].logits = {nan, nan, nan};
  cases[2].logits = {1, inf, 2};
  cases[3].logits = {nan, -3, nan};  // this one has something
  cases[4] = {{1, 2, 3}, {}, {}, {{1, static_cast<float>(inf)}}};
  cases[5] = {{1, 2, -inf}, {}, {}, {{0, -static_cast<float>(inf)}, {1, -static_cast<float>(inf)}}};
  cases[6] = {{1, 2, inf}, {}, {}, {{2, -static_cast<float>(inf)}}};
  for (const double temperature : {0.0, 1.0}) {
    for (SampleCase& c : cases) c.row.temperature = temperature;
    EXPECT_EQ(tokens(cases), (std::vector<double>{-1, -1, -1, 1, -1, -1, -1}));
    for (const DType dtype : kTypes) check("bad", cases, dtype);
  }
}

MT_ON_EVERY_BACKEND(Sample);

}  // namespace
}  // namespace mlxtape::test
