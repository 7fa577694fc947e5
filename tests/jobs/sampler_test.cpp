#include "mlxtape/jobs/sampler.h"

#include <cmath>
#include <map>

#include "support/op_test.h"

namespace mlxtape::test {
namespace {

using jobs::Sampler;
using jobs::SamplingOptions;

std::int32_t choose(Sampler& sampler, std::vector<float> logits,
                    const std::vector<std::int32_t>& before = {}) {
  return sampler(logits, before);
}

// How often each token comes in many draws.
std::map<std::int32_t, double> shares(const SamplingOptions& options,
                                      const std::vector<float>& logits) {
  Sampler sampler(options);
  std::map<std::int32_t, double> count;
  constexpr int kDraws = 20000;
  for (int i = 0; i < kDraws; ++i) count[choose(sampler, logits)] += 1.0 / kDraws;
  return count;
}

// 20000 draws of a share p are off by more than 4 deviations once in 16000 times; the seed is fixed.
void expect_shares(const SamplingOptions& options, const std::vector<float>& logits,
                   const std::map<std::int32_t, double>& want) {
  const auto got = shares(options, logits);
  for (const auto& [token, share] : got) {
    ASSERT_TRUE(want.count(token)) << token << " was left out";
    EXPECT_NEAR(share, want.at(token), 4 * std::sqrt(0.25 / 20000)) << token;
  }
  EXPECT_EQ(got.size(), want.size());
}

// log of 0.5, 0.25, 0.125, 0.0625, 0.0625, moved by a number that must not matter.
const std::vector<float> kHalves = {3 + std::log(0.125F), 3 + std::log(0.5F), 3 + std::log(0.0625F),
                                    3 + std::log(0.25F), 3 + std::log(0.0625F)};

TEST(Sampler, GreedyTakesTheFirstOfTheLargest) {
  Sampler sampler({});
  EXPECT_EQ(choose(sampler, {1, 5, 3, 5}), 1);
  EXPECT_EQ(choose(sampler, {-7, -INFINITY, -3}), 2);
  EXPECT_EQ(choose(sampler, {NAN, -3, NAN}), 1);
}

TEST(Sampler, DrawsByTheWeights) {
  SamplingOptions options;
  options.temperature = 1;
  expect_shares(options, kHalves, {{1, 0.5}, {3, 0.25}, {0, 0.125}, {2, 0.0625}, {4, 0.0625}});
  options.temperature = 0.5;  // squares
  const double all = 0.25 + 0.0625 + 0.015625 + 2 * 0.00390625;
  expect_shares(options, kHalves,
                {{1, 0.25 / all},
                 {3, 0.0625 / all},
                 {0, 0.015625 / all},
                 {2, 0.00390625 / all},
                 {4, 0.00390625 / all}});
}

TEST(Sampler, LeavesOut) {
  SamplingOptions options;
  options.temperature = 1;
  SamplingOptions o = options;
  o.top_k = 2;
  expect_shares(o, kHalves, {{1, 2.0 / 3}, {3, 1.0 / 3}});
  o = options;
  o.top_k = 4;  // of two equal ones the lower id
  expect_shares(o, kHalves,
                {{1, 0.5 / 0.9375}, {3, 0.25 / 0.9375}, {0, 0.125 / 0.9375}, {2, 0.0625 / 0.9375}});
  o = options;
  o.top_p = 0.7;  // 0.5 is not enough, 0.75 is
  expect_shares(o, kHalves, {{1, 2.0 / 3}, {3, 1.0 / 3}});
  o.top_p = 0.4;
  expect_shares(o, kHalves, {{1, 1}});
  o = options;
  o.min_p = 0.2;  // 0.1 and more
  expect_shares(o, kHalves, {{1, 0.5 / 0.875}, {3, 0.25 / 0.875}, {0, 0.125 / 0.875}});
  o.top_p = 0.7;
  o.top_k = 1;
  expect_shares(o, kHalves, {{1, 1}});
}

TEST(Sampler, LongRowsAreSortedAsFarAsNeeded) {
  std::vector<float> logits(5000);
  for (std::size_t i = 0; i < logits.size(); ++i)
    logits[i] = static_cast<float>((i * 7919) % 5000) * 1e-4F;
  SamplingOptions options;
  options.temperature = 1;
  options.top_p = 0.5;
  Sampler sampler(options);
  // The likelier half by weight begins at the value v with (e^0.5 − e^v)/(e^0.5 − 1) = 0.5.
  const double least = std::log(std::exp(0.5) - 0.5 * (std::exp(0.5) - 1));
  for (int i = 0; i < 200; ++i) {
    EXPECT_GE(static_cast<double>(logits[static_cast<std::size_t>(choose(sampler, logits))]),
              least - 2e-4);
  }
}

TEST(Sampler, PenaltyOnTheLastTokens) {
  SamplingOptions options;
  options.repetition_penalty = 2;
  options.repetition_context = 2;
  Sampler sampler(options);
  EXPECT_EQ(choose(sampler, {4, 3}, {}), 0);
  EXPECT_EQ(choose(sampler, {4, 3}, {0}), 1);        // 4 → 2
  EXPECT_EQ(choose(sampler, {4, 3}, {0, 0}), 1);     // once, however often it came
  EXPECT_EQ(choose(sampler, {5, 2}, {0, 0}), 0);     // 2.5 beats 2: not twice
  EXPECT_EQ(choose(sampler, {4, 3}, {0, 5, 5}), 0);  // too long ago
  EXPECT_EQ(choose(sampler, {-1, -1.5F}, {0}), 1);   // −1 → −2
}

TEST(Sampler, SameSeedSameTokens) {
  SamplingOptions options;
  options.temperature = 1;
  options.seed = 7;
  const auto draw = [&](std::uint64_t sequence) {
    Sampler sampler(options, sequence);
    std::vector<std::int32_t> tokens;
    for (int i = 0; i < 50; ++i) tokens.push_back(choose(sampler, kHalves));
    return tokens;
  };
  const auto first = draw(0);
  EXPECT_EQ(first, draw(0));
  EXPECT_NE(first, draw(1));
  options.seed = 8;
  EXPECT_NE(first, draw(0));
}

TEST(Sampler, SaysWhatIsWrong) {
  const auto with = [](auto set) {
    SamplingOptions options;
    set(options);
    return jobs::sampling_check(options);
  };
  expect_refused({
      {"cold", with([](auto& o) { o.temperature = -1; }), Errc::kArgument, "temperature"},
      {"no number", with([](auto& o) { o.temperature = NAN; }), Errc::kArgument, "temperature"},
      {"too hot", with([](auto& o) { o.temperature = INFINITY; }), Errc::kArgument, "temperature"},
      {"top_p", with([](auto& o) { o.top_p = -0.1; }), Errc::kArgument, "top_p"},
      {"no top_p", with([](auto& o) { o.top_p = 0; }), Errc::kArgument, "above 0 and at most 1"},
      {"all top_p", with([](auto& o) { o.top_p = 2; }), Errc::kArgument, "above 0 and at most 1"},
      {"min_p", with([](auto& o) { o.min_p = 1.1; }), Errc::kArgument, "min_p"},
      {"top_k", with([](auto& o) { o.top_k = -1; }), Errc::kArgument, "at least 0, got -1"},
      {"penalty", with([](auto& o) { o.repetition_penalty = 0; }), Errc::kArgument, "penalty"},
      {"endless penalty", with([](auto& o) { o.repetition_penalty = INFINITY; }), Errc::kArgument,
       "penalty"},
      {"context", with([](auto& o) { o.repetition_context = -1; }), Errc::kArgument, "context"},
  });
  Sampler sampler({});
  expect_error(Errc::kArgument, "broken", [&] { choose(sampler, {NAN, NAN}); });
  expect_error(Errc::kArgument, "broken", [&] { choose(sampler, {1, INFINITY}); });
  expect_error(Errc::kArgument, "broken", [&] { choose(sampler, {}); });
}

}  // namespace
}  // namespace mlxtape::test
