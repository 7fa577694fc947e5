#include "mlxtape/ops/sample.h"

#include <cmath>
#include <functional>
#include <map>
#include <set>
#include <string>
#include <tuple>

#include "sample_oracle.h"
#include "sample_run.h"
#include "support/op_test.h"

namespace mlxtape::test {
namespace {

using ops::SampleForm;
using ops::SampleOptions;
using ops::SampleRow;
using ops::SampleRows;

constexpr DType kTypes[] = {DType::kF32, DType::kF16, DType::kBF16};
constexpr SampleOptions kEverything{true, true, true};

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

struct Outcome {
  std::vector<double> tokens, logprobs, top_ids, top_logprobs, history, lengths;
};

class Sample : public OnDevice {
 protected:
  SampleRows upload_rows(const std::vector<SampleCase>& cases, std::int64_t room) {
    const auto count = static_cast<std::int64_t>(cases.size());
    std::size_t biases = 0;
    for (const SampleCase& c : cases) biases = std::max(biases, c.bias.size());
    std::vector<float> numbers(cases.size() * 6);
    std::vector<std::int32_t> whole(cases.size() * 6);
    std::vector<double> history, lengths, ids, bias;
    for (std::size_t b = 0; b < cases.size(); ++b) {
      const SampleCase& c = cases[b];
      ops::put_sample_row(c.row, std::span<float, 6>(numbers.data() + 6 * b, 6),
                          std::span<std::int32_t, 6>(whole.data() + 6 * b, 6));
      for (std::int64_t j = 0; j < room; ++j) {
        const auto at = static_cast<std::size_t>(j);
        history.push_back(at < c.history.size() ? c.history[at] : 0);  // 0 must not count
      }
      lengths.push_back(static_cast<double>(c.history.size()));
      for (std::size_t k = 0; k < biases; ++k) {
        ids.push_back(k < c.bias.size() ? c.bias[k].first : -1);
        bias.push_back(k < c.bias.size() ? static_cast<double>(c.bias[k].second) : 7);
      }
    }
    SampleRows rows{
        encoder().empty({count, 6}, DType::kF32), encoder().empty({count, 6}, DType::kI32),
        upload(history, {count, room}, DType::kI32), upload(lengths, {count}, DType::kI32)};
    encoder().upload(numbers.data(), rows.numbers.bytes(), rows.numbers);
    encoder().upload(whole.data(), rows.whole.bytes(), rows.whole);
    if (biases != 0) {
      const Shape shape{count, static_cast<std::int64_t>(biases)};
      rows.bias_ids = upload(ids, shape, DType::kI32);
      rows.bias = upload(bias, shape, DType::kF32);
    }
    return rows;
  }
  Tensor upload_logits(const std::vector<SampleCase>& cases, DType dtype, std::int64_t offset = 0) {
    std::vector<double> logits;
    for (const SampleCase& c : cases) {
      logits.insert(logits.end(), c.logits.begin(), c.logits.end());
    }
    const auto count = static_cast<std::int64_t>(cases.size());
    return upload(logits, {count, static_cast<std::int64_t>(logits.size()) / count}, dtype, offset);
  }
  static std::int64_t room_for(const std::vector<SampleCase>& cases) {
    std::size_t most = 0;
    for (const SampleCase& c : cases) most = std::max(most, c.history.size());
    return static_cast<std::int64_t>(most) + 1;
  }

  Outcome run(const std::vector<SampleCase>& cases, DType dtype, SampleForm form,
              std::int64_t offset = 0) {
    const SampleRows rows = upload_rows(cases, room_for(cases));
    const ops::Sampled s =
        ops::run_sample(encoder(), upload_logits(cases, dtype, offset), rows, kEverything, form);
    return {download(s.tokens),       download(s.logprobs),   download(s.top_ids),
            download(s.top_logprobs), download(rows.history), download(rows.lengths)};
  }
  // What logits are stored as is what the oracle is given.
  void check(const std::string& what, std::vector<SampleCase> cases, DType dtype,
             std::int64_t offset = 0) {
    for (SampleCase& c : cases) {
      for (double& v : c.logits) v = round_to(dtype, v);
    }
    const auto room = static_cast<std::size_t>(room_for(cases));
    std::vector<Chosen> want;
    for (const SampleCase& c : cases) want.push_back(choose(c));
    for (const SampleForm form : {SampleForm::kQuickest, SampleForm::kPortable}) {
      if (form == SampleForm::kPortable && GetParam() != Backend::kCuda) continue;
      const Outcome got = run(cases, dtype, form, offset);
      const std::string at = what + ", " + name_of(dtype) + ", " +
                             std::to_string(cases.front().logits.size()) + " tokens, form " +
                             std::to_string(static_cast<int>(form));
      Refs logprobs, top_logprobs;
      std::vector<double> top_ids;
      for (std::size_t b = 0; b < cases.size(); ++b) {
        ASSERT_EQ(got.tokens[b], want[b].token) << at << ", row " << b;
        logprobs.push_back({want[b].logprob.value, want[b].logprob.scale});
        top_ids.insert(top_ids.end(), want[b].top_ids.begin(), want[b].top_ids.end());
        for (const Sized& s : want[b].top_logprobs) top_logprobs.push_back({s.value, s.scale});
        const std::size_t length = cases[b].history.size();
        const bool chosen = want[b].token >= 0;
        EXPECT_EQ(got.lengths[b], static_cast<double>(length + (chosen ? 1 : 0))) << at;
        for (std::size_t j = 0; j < room; ++j) {
          const double before = j < length ? cases[b].history[j] : 0;
          const double now = j == length && chosen ? want[b].token : before;
          EXPECT_EQ(got.history[b * room + j], now) << at << ", row " << b << ", " << j;
        }
      }
      // Sums are exact: 64 stands for the roundings of a weight.
      EXPECT_EQ(count_wrong(got.logprobs, logprobs, DType::kF32, 64), 0) << at;
      EXPECT_EQ(got.top_ids, top_ids) << at;
      EXPECT_EQ(count_wrong(got.top_logprobs, top_logprobs, DType::kF32, 64), 0) << at;
    }
  }
  std::vector<double> tokens(const std::vector<SampleCase>& cases, DType dtype = DType::kF32) {
    return run(cases, dtype, SampleForm::kQuickest).tokens;
  }
};

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
      for (const std::int64_t rows : {std::int64_t{1}, std::int64_t{2}, scaled(8), scaled(33)})
        check("any", batch(rows, tokens), dtype);
    }
    check("odd", batch(3, 8193), dtype, 3);
    check("long", batch(scaled(3), 151936), dtype);
  }
  check("shorter than a cluster's", batch(3, 4096), DType::kBF16);
  check("as short", batch(3, 4097), DType::kF32, 1);
  check("too long for shared memory", batch(1, scaled(450000)), DType::kF16);
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
                                                {"one zero above the others",
                                                 [](std::int64_t i) {
                                                   return i == 57 ? 0.0 : -0.0;
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
    for (const std::int64_t tokens : {std::int64_t{100}, 4 * scaled(1250)}) {
      std::vector<double> logits;
      for (std::int64_t i = 0; i < tokens; ++i) logits.push_back(kind(i));
      check(name, each_filter(logits), DType::kF32);
      check(name, each_filter(logits), DType::kBF16);
    }
  }
  std::vector<double> logits(static_cast<std::size_t>(scaled(151936)), 1.5);  // all tie
  check("equal", {each_filter(logits)[10], each_filter(logits)[14]}, DType::kF32);
}

// top_p and the numbers beside it, of two tokens just where one alone is enough: a weight that is off by its last bit
// changes every third of these choices. Both are equally likely to be drawn.
TEST_P(Sample, TopPAtItsEdge) {
  std::vector<SampleCase> cases;
  for (int i = 1; i <= 1200; ++i) {
    const float d = static_cast<float>(i) * 0.0123F;
    const double first = 0x1p40, both = first + static_cast<double>(weight_of(d, 1.44269504F));
    const auto edge = static_cast<float>(first / both);
    const float towards = i % 3 == 0 ? 0.0F : i % 3 == 1 ? edge : 1.0F;
    SampleCase c{{0, -static_cast<double>(d)}};
    c.row.temperature = 1e30;
    c.row.top_p = static_cast<double>(std::nextafter(edge, towards));
    c.row.seed = static_cast<std::uint64_t>(i);
    cases.push_back(c);
  }
  check("at the edge", cases, DType::kF32);
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

TEST_P(Sample, GreedyTakesTheFirstOfTheLargest) {
  std::vector<SampleCase> cases(3);
  cases[0].logits = {1, 5, 3, 5};
  cases[1].logits = {-7, -INFINITY, -3, -3};
  cases[2].logits = {-0.0, 0, -0.0, -1};
  EXPECT_EQ(tokens(cases), (std::vector<double>{1, 2, 0}));
}

TEST_P(Sample, PenaltiesByHand) {
  const auto greedy = [&](const std::vector<double>& logits, std::vector<std::int32_t> history,
                          const std::function<void(SampleCase&)>& set) {
    SampleCase c{logits, {}, std::move(history)};
    set(c);
    return tokens({c}).front();
  };
  const auto repeat = [](SampleCase& c) {
    c.row.repetition_penalty = 2;
    c.row.repetition_context = 2;
  };
  EXPECT_EQ(greedy({4, 3}, {}, repeat), 0);
  EXPECT_EQ(greedy({4, 3}, {0}, repeat), 1);        // 4 → 2
  EXPECT_EQ(greedy({4, 3}, {0, 0}, repeat), 1);     // once, however often it came
  EXPECT_EQ(greedy({5, 2}, {0, 0}, repeat), 0);     // 2.5 beats 2: not twice
  EXPECT_EQ(greedy({4, 3}, {0, 5, 5}, repeat), 0);  // too long ago
  EXPECT_EQ(greedy({-1, -1.5}, {0}, repeat), 1);    // −1 → −2
  const auto answer = [](SampleCase& c) {
    c.row.presence_penalty = 1;
    c.row.frequency_penalty = 0.5;
    c.row.start = 2;
  };
  EXPECT_EQ(greedy({4, 3}, {0, 0}, answer), 0);       // the prompt does not count
  EXPECT_EQ(greedy({4, 2.6}, {0, 0, 0}, answer), 1);  // 4 → 2.5
  EXPECT_EQ(greedy({4, 2.4}, {0, 0, 0}, answer), 0);
  EXPECT_EQ(greedy({4, 2.1}, {0, 0, 0, 0}, answer), 1);  // 4 → 2
  const auto recent = [](SampleCase& c) {
    c.row.frequency_penalty = 1;
    c.row.penalty_context = 2;
  };
  EXPECT_EQ(greedy({4, 1.5}, {0, 0, 0}, recent), 0);  // 4 → 2, of three the last two
  EXPECT_EQ(greedy({4, 2.5}, {0, 0, 0}, recent), 1);
  const auto bias = [](SampleCase& c) {
    c.bias = {{1, 2}, {9, 50}, {1, -50}, {-1, 50}};
  };
  EXPECT_EQ(greedy({4, 3}, {}, bias), 1);
  EXPECT_EQ(greedy({4, 1}, {}, bias), 0);
}

TEST_P(Sample, LongHistories) {
  Noise noise(8);
  for (const std::int64_t tokens : {50, 20000}) {
    std::vector<SampleCase> cases;
    for (std::int64_t b = 0; b < 3; ++b) {
      SampleCase c = any_case(noise, tokens, 2);
      c.history.clear();
      for (int j = 0; j < 7000; ++j) {
        c.history.push_back(static_cast<std::int32_t>(noise.below(tokens)));
      }
      c.row.repetition_penalty = 1.3;
      c.row.repetition_context = b == 0 ? -1 : 4500;
      c.row.frequency_penalty = 0.1;
      c.row.penalty_context = b == 1 ? -1 : 5000;
      c.row.start = 2500 * b;
      cases.push_back(c);
    }
    check("long histories", cases, DType::kF32);
  }
}

// History that is full, and lengths that no history has: nothing is written outside.
TEST_P(Sample, FullHistory) {
  for (const SampleForm form : {SampleForm::kQuickest, SampleForm::kPortable}) {
    std::vector<SampleCase> cases(4, {{1, 3, 2, 2.9}, {}, {1, 2, 1}});
    cases[3].history = {3, 3, 1};  // what the third row would see behind its own: 2.9 → 2.4
    for (SampleCase& c : cases) {
      c.row.repetition_penalty = 1.2;  // 3 → 2.5, 2 → 1.67
      c.row.repetition_context = 3;
    }
    const SampleRows rows = upload_rows(cases, 3);
    const std::vector<std::int32_t> lengths{3, 4, 5, -2};
    encoder().upload(lengths.data(), 16, rows.lengths);
    const Tensor logits = upload_logits(cases, DType::kF32);
    const ops::Sampled s = ops::run_sample(encoder(), logits, rows, {false, false, true}, form);
    EXPECT_EQ(download(s.tokens), (std::vector<double>{3, 3, 3, 1}));
    EXPECT_FALSE(s.logprobs.defined());
    EXPECT_EQ(download(rows.lengths), (std::vector<double>{4, 5, 6, -1}));
    EXPECT_EQ(download(rows.history), (std::vector<double>{1, 2, 1, 1, 2, 1, 1, 2, 1, 3, 3, 1}));
  }
}

TEST_P(Sample, RowsDoNotDependOnTheirBatch) {
  Noise noise(11);
  for (const std::int64_t count : {300, 9000}) {
    std::vector<SampleCase> cases;
    for (int b = 0; b < 19; ++b) cases.push_back(any_case(noise, count, 1));
    const auto together = tokens(cases);
    for (std::size_t b = 0; b < cases.size(); b += 3) {
      EXPECT_EQ(tokens({cases[b]}).front(), together[b]) << b;
    }
    std::reverse(cases.begin(), cases.end());
    auto turned = tokens(cases);
    std::reverse(turned.begin(), turned.end());
    EXPECT_EQ(turned, together);
  }
}

// The draws of one row at many positions: as often as their probabilities say. The seed is fixed.
TEST_P(Sample, DrawsFollowTheProbabilities) {
  constexpr int kRows = 500;
  const int kDraws = is_emulated(encoder().device()) ? 3000 : 20000;
  const auto chi_square = [&](double temperature, const std::function<void(SampleRow&)>& filter,
                              const std::set<std::int32_t>& kept) {
    SampleCase c{{0.3, -1, 2, 1.1, 0, 0.9, -0.4, 1.7}};
    c.row.temperature = temperature;
    filter(c.row);
    std::vector<SampleCase> cases(kRows, c);
    for (std::size_t b = 0; b < cases.size(); ++b) cases[b].row.seed = b;
    std::map<std::int32_t, double> seen;
    const SampleRows rows = upload_rows(cases, 0);
    const Tensor logits = upload_logits(cases, DType::kF32);
    for (int i = 0; i < kDraws / kRows; ++i) {  // append moves the positions on
      const auto got = download(ops::sample(encoder(), logits, rows, {false, false, true}).tokens);
      for (const double token : got) seen[static_cast<std::int32_t>(token)] += 1;
    }
    double all = 0, sum = 0;
    for (const std::int32_t token : kept) {
      all += std::exp(c.logits[static_cast<std::size_t>(token)] / temperature);
    }
    for (const auto& [token, n] : seen) {
      EXPECT_TRUE(kept.count(token)) << token;
      const double p = std::exp(c.logits[static_cast<std::size_t>(token)] / temperature) / all;
      sum += (n - p * kDraws) * (n - p * kDraws) / (p * kDraws);
    }
    EXPECT_EQ(seen.size(), kept.size());
    EXPECT_LT(sum, 26.1);  // 7 degrees of freedom or fewer: once in 2000 times
  };
  const auto none = [](SampleRow&) {
  };
  chi_square(1, none, {0, 1, 2, 3, 4, 5, 6, 7});
  chi_square(0.5, none, {0, 1, 2, 3, 4, 5, 6, 7});
  chi_square(2, [](SampleRow& r) { r.top_k = 3; }, {2, 7, 3});
  // p: 0.341 0.252 0.138 0.113 …
  chi_square(1, [](SampleRow& r) { r.top_p = 0.7; }, {2, 7, 3});
  chi_square(1, [](SampleRow& r) { r.min_p = 0.3; }, {2, 7, 3, 5});
}

TEST_P(Sample, SeedAndPositionChooseTheNumber) {
  SampleCase c{std::vector<double>(1000, 0.0)};
  c.row.temperature = 1;
  std::set<double> seen;
  for (int i = 0; i < 12; ++i) {
    c.row.seed = i < 4 ? 5ULL + (static_cast<std::uint64_t>(i) << 32U) : static_cast<unsigned>(i);
    c.history.assign(static_cast<std::size_t>(i < 8 ? 0 : i), 0);
    seen.insert(tokens({c}).front());
  }
  EXPECT_GE(seen.size(), 10U);  // of 1000 tokens; equal words would be equal tokens
}

TEST_P(Sample, ACapturedStepSeesNewSettings) {
  Noise noise(21);
  std::vector<SampleCase> cases;
  for (int b = 0; b < 3; ++b) cases.push_back(any_case(noise, 6000, 1));
  const std::int64_t room = room_for(cases) + 4;
  SampleRows rows = upload_rows(cases, room);
  const Tensor logits = upload_logits(cases, DType::kF32);
  encoder().begin_capture();
  const ops::Sampled s = ops::sample(encoder(), logits, rows, kEverything);
  const auto graph = encoder().end_capture();
  for (SampleCase& c : cases) {
    for (double& v : c.logits) v = round_to(DType::kF32, v);
  }
  for (int step = 0; step < 4; ++step) {
    for (SampleCase& c : cases) {
      c.row.temperature = step == 2 ? 0 : 1 + 0.1 * step;
      c.row.seed += 1;
    }
    const SampleRows now = upload_rows(cases, room);
    encoder().copy(now.numbers, rows.numbers);
    encoder().copy(now.whole, rows.whole);
    encoder().replay(*graph);
    const auto got = download(s.tokens);
    for (std::size_t b = 0; b < cases.size(); ++b) {
      EXPECT_EQ(got[b], choose(cases[b]).token) << step << ", row " << b;
      cases[b].history.push_back(static_cast<std::int32_t>(got[b]));
    }
  }
}

TEST_P(Sample, StridedInputs) {
  Noise noise(31);
  std::vector<SampleCase> cases;
  std::vector<double> logits;
  for (int b = 0; b < 4; ++b) {
    cases.push_back(any_case(noise, 77, 1));
    for (double& v : cases.back().logits) {
      v = round_to(DType::kBF16, v);
      logits.push_back(v);
    }
  }
  const SampleRows rows = upload_rows(cases, room_for(cases));
  const Tensor x = upload_strided(logits, {4, 77}, DType::kBF16);
  const auto got = download(ops::sample(encoder(), x, rows).tokens);
  for (std::size_t b = 0; b < 4; ++b) EXPECT_EQ(got[b], choose(cases[b]).token) << b;
}

TEST_P(Sample, SameBitsOnEveryRun) {
  Noise noise(41);
  for (const auto& [rows, count] : {std::pair<int, std::int64_t>{2, scaled(60000)}, {18, 700}}) {
    std::vector<SampleCase> cases;
    for (int b = 0; b < rows; ++b) cases.push_back(any_case(noise, count, 1));
    const SampleRows at = upload_rows(cases, room_for(cases));
    const Tensor logits = upload_logits(cases, DType::kF16);
    expect_repeatable(encoder(), [&] {
      const ops::Sampled s = ops::sample(encoder(), logits, at, {true, true, false});
      return std::vector<Tensor>{s.tokens, s.logprobs, s.top_ids, s.top_logprobs};
    });
  }
}

MT_ON_EVERY_BACKEND(Sample);

}  // namespace
}  // namespace mlxtape::test
