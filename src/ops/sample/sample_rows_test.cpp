// What one row's settings do, by hand; and that nothing but its settings does it.
#include <cmath>
#include <functional>
#include <map>
#include <set>

#include "sample_cases.h"

namespace mlxtape::test {
namespace {

class SampleRowByRow : public SampleRun {};

TEST_P(SampleRowByRow, GreedyTakesTheFirstOfTheLargest) {
  std::vector<SampleCase> cases(3);
  cases[0].logits = {1, 5, 3, 5};
  cases[1].logits = {-7, -INFINITY, -3, -3};
  cases[2].logits = {-0.0, 0, -0.0, -1};
  EXPECT_EQ(tokens(cases), (std::vector<double>{1, 2, 0}));
}

TEST_P(SampleRowByRow, PenaltiesByHand) {
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

TEST_P(SampleRowByRow, LongHistories) {
  Noise noise(8);
  for (const std::int64_t tokens : {50, 20000}) {
    std::vector<SampleCase> cases;
    for (int b = 0; b < 3; ++b) {
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
TEST_P(SampleRowByRow, FullHistory) {
  for (const SampleForm form : {SampleForm::kQuickest, SampleForm::kPortable}) {
    std::vector<SampleCase> cases(4, {{1, 3, 2, 2.9}, {}, {1, 2, 1}});
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
    EXPECT_EQ(download(rows.history), (std::vector<double>{1, 2, 1, 1, 2, 1, 1, 2, 1, 1, 2, 1}));
  }
}

TEST_P(SampleRowByRow, RowsDoNotDependOnTheirBatch) {
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
TEST_P(SampleRowByRow, DrawsFollowTheProbabilities) {
  constexpr int kRows = 500, kDraws = 20000;
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

TEST_P(SampleRowByRow, SeedAndPositionChooseTheNumber) {
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

TEST_P(SampleRowByRow, ACapturedStepSeesNewSettings) {
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

TEST_P(SampleRowByRow, StridedInputs) {
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

TEST_P(SampleRowByRow, SameBitsOnEveryRun) {
  Noise noise(41);
  for (const auto& [rows, count] : {std::pair<int, std::int64_t>{2, 60000}, {18, 700}}) {
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

MT_ON_EVERY_BACKEND(SampleRowByRow);

}  // namespace
}  // namespace mlxtape::test
