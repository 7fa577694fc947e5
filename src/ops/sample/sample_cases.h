// What the tests of sample share: rows with any settings, and a batch of them run by each form of the kernels.
#pragma once

#include <string>
#include <vector>

#include "sample_oracle.h"
#include "sample_run.h"
#include "support/op_test.h"

namespace mlxtape::test {

using ops::SampleForm;
using ops::SampleOptions;
using ops::SampleRow;
using ops::SampleRows;

constexpr DType kTypes[] = {DType::kF32, DType::kF16, DType::kBF16};
constexpr SampleOptions kEverything{true, true, true};

struct Outcome {
  std::vector<double> tokens, logprobs, top_ids, top_logprobs, history, lengths;
};

class SampleRun : public OnDevice {
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
      if (form == SampleForm::kPortable && GetParam() == Backend::kCpu) continue;
      const Outcome got = run(cases, dtype, form, offset);
      const std::string at = what + ", " + name_of(dtype) + ", " +
                             std::to_string(cases.front().logits.size()) + " tokens, form " +
                             std::to_string(static_cast<int>(form));
      Refs logprobs, top_logprobs;
      std::vector<double> top_ids;
      for (std::size_t b = 0; b < cases.size(); ++b) {
        ASSERT_EQ(got.tokens[b], want[b].token) << at << ", row " << b;
        logprobs.push_back(want[b].logprob);
        top_ids.insert(top_ids.end(), want[b].top_ids.begin(), want[b].top_ids.end());
        top_logprobs.insert(top_logprobs.end(), want[b].top_logprobs.begin(),
                            want[b].top_logprobs.end());
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

// Any settings that are allowed, often several filters and penalties at once.
inline SampleCase any_case(Noise& noise, std::int64_t tokens, double deviation) {
  const auto one_of = [&](std::initializer_list<double> values) {
    return *(values.begin() + noise.below(static_cast<std::int64_t>(values.size())));
  };
  SampleCase c;
  for (std::int64_t i = 0; i < tokens; ++i) c.logits.push_back(deviation * noise.normal());
  c.row.temperature = one_of({0, 1, 1, 0.7, 1.5, 3});
  c.row.top_p = one_of({1, 1, 0.9, 0.5, 0.95, 0.01});
  c.row.min_p = one_of({0, 0, 0.05, 0.3});
  c.row.top_k = static_cast<std::int64_t>(
      one_of({0, 0, 1, 5, 50, static_cast<double>(tokens), static_cast<double>(tokens + 5)}));
  c.row.seed = static_cast<std::uint64_t>(noise.below(1LL << 40));
  if (noise.below(2) == 0) return c;
  c.row.repetition_penalty = one_of({1, 1.1, 1.5, 0.8});
  c.row.presence_penalty = one_of({0, 0.5, -0.5});
  c.row.frequency_penalty = one_of({0, 0.25, 1});
  c.row.repetition_context = static_cast<std::int64_t>(one_of({-1, 0, 3, 20}));
  c.row.penalty_context = static_cast<std::int64_t>(one_of({-1, 0, 4, 20}));
  c.row.start = noise.below(10);
  const std::int64_t length = noise.below(40);
  for (std::int64_t j = 0; j < length; ++j) {
    c.history.push_back(static_cast<std::int32_t>(noise.below(std::min<std::int64_t>(tokens, 9)) -
                                                  (noise.below(9) == 0 ? 3 : 0)));
  }
  const std::int64_t biases = noise.below(4);
  for (std::int64_t k = 0; k < biases; ++k) {
    c.bias.emplace_back(static_cast<std::int32_t>(noise.below(tokens + 2) - 1),
                        static_cast<float>(3 * noise.next()));
  }
  return c;
}

}  // namespace mlxtape::test
