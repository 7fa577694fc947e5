#include "mlxtape/jobs/generate.h"

#include <algorithm>

#include "models/small_models.h"
#include "support/op_test.h"

namespace mlxtape::test {
namespace {

using jobs::Finish;
using jobs::GenerateOptions;

formats::Tokenizer small_tokenizer() {
  return formats::Tokenizer::from_json(small_tokenizer_json(), "small tokenizer");
}

class Generate : public OnDevice {
 protected:
  jobs::GenerateReport run(const std::vector<std::string>& prompts, const GenerateOptions& options,
                           const std::string& type = "qwen3_next") {
    const models::Model model = small_model(encoder(), type);
    std::vector<std::vector<std::int32_t>> ids;
    for (const std::string& prompt : prompts) ids.push_back(tokenizer_.encode(prompt));
    return jobs::generate(encoder(), model, tokenizer_, ids, options);
  }
  formats::Tokenizer tokenizer_ = small_tokenizer();
};

TEST_P(Generate, TheSameAloneAndInABatch) {
  const std::vector<std::string> prompts = {"HELLO", "A", "ABCABCABCABC"};
  for (const double temperature : {0.0, 1.0}) {
    for (const std::string& type : model_types()) {
      GenerateOptions options;
      options.max_tokens = 12;
      options.prefill_chunk = 4;
      options.sampling.temperature = temperature;
      const auto all = run(prompts, options, type);
      ASSERT_EQ(all.sequences.size(), 3U);
      EXPECT_EQ(all.prompt_tokens, 18);
      EXPECT_EQ(all.tokens, 36);
      EXPECT_GT(all.peak_bytes, 0U);
      for (const auto& sequence : all.sequences) {
        EXPECT_EQ(sequence.finish, Finish::kLength);
        EXPECT_EQ(sequence.text, tokenizer_.decode(sequence.tokens));
      }
      // The first of a batch has the number 0, as one alone has.
      EXPECT_EQ(run({prompts[0]}, options, type).sequences[0].tokens, all.sequences[0].tokens);
      options.prefill_chunk = 100;
      EXPECT_EQ(run(prompts, options, type).sequences[2].tokens, all.sequences[2].tokens);
    }
  }
}

TEST_P(Generate, Stops) {
  GenerateOptions options;
  options.max_tokens = 10;
  const auto whole = run({"HELLO", "123"}, options);
  const std::vector<std::int32_t>& tokens = whole.sequences[0].tokens;
  const std::string& text = whole.sequences[0].text;
  ASSERT_EQ(text.size(), 10U);

  GenerateOptions stop = options;
  stop.stop_tokens = {tokens[4]};
  const auto first =
      static_cast<std::size_t>(std::find(tokens.begin(), tokens.end(), tokens[4]) - tokens.begin());
  auto report = run({"HELLO"}, stop);
  EXPECT_EQ(report.sequences[0].finish, Finish::kStopToken);
  EXPECT_EQ(report.sequences[0].text, text.substr(0, first));
  stop.ignore_ends = true;
  EXPECT_EQ(run({"HELLO"}, stop).sequences[0].text, text);

  stop = options;
  stop.stop_strings = {"no such text", text.substr(3, 3)};
  report = run({"HELLO"}, stop);
  EXPECT_EQ(report.sequences[0].finish, Finish::kStopString);
  EXPECT_EQ(report.sequences[0].text, text.substr(0, text.find(text.substr(3, 3))));

  std::string heard;
  stop = options;
  stop.on_text = [&](std::size_t sequence, std::string_view piece) {
    if (sequence == 0) heard += piece;
    return sequence != 0 || heard.size() < 3;
  };
  report = run({"HELLO", "123"}, stop);
  EXPECT_EQ(report.sequences[0].finish, Finish::kCancelled);
  EXPECT_EQ(heard, text.substr(0, 3));
  EXPECT_EQ(report.sequences[1].text, whole.sequences[1].text);
}

// With what there is, at any moment: before a prompt, between its chunks, after some tokens.
TEST_P(Generate, StopsWhenAsked) {
  GenerateOptions options;
  options.max_tokens = 10;
  options.prefill_chunk = 3;
  const auto whole = run({"HELLO", "123"}, options);
  for (int calls = 0; calls < 12; ++calls) {
    int left = calls;
    options.stop = [&] {
      return left-- <= 0;
    };
    const auto report = run({"HELLO", "123"}, options);
    ASSERT_EQ(report.sequences.size(), 2U);
    // Two chunks of the first prompt, one of the second, then a token of each at a time.
    const std::size_t steps = calls < 3 ? 0 : static_cast<std::size_t>(calls - 3);
    const std::size_t made[] = {steps + (calls < 2 ? 0 : 1), steps + (calls < 3 ? 0 : 1)};
    for (std::size_t i = 0; i < 2; ++i) {
      const bool ended = made[i] >= 10;
      EXPECT_EQ(report.sequences[i].finish, ended ? Finish::kLength : Finish::kCancelled);
      EXPECT_EQ(report.sequences[i].tokens.size(), std::min<std::size_t>(made[i], 10)) << calls;
      EXPECT_EQ(whole.sequences[i].text.find(report.sequences[i].text), 0U);
    }
  }
}

// Of the tokens that an answer may have, memory is there for those that it has.
TEST_P(Generate, TakesRoomAsItGoesOn) {
  GenerateOptions options;
  options.max_tokens = 20;
  options.ignore_ends = true;
  const auto few = run({"HELLO"}, options);
  options.max_tokens = std::int64_t{1} << 30;
  int left = 1100;  // more than there is room for at first
  options.stop = [&] {
    return left-- <= 0;
  };
  const auto many = run({"HELLO"}, options);
  const std::vector<std::int32_t>& tokens = many.sequences[0].tokens;
  ASSERT_EQ(tokens.size(), 1100U);
  EXPECT_TRUE(
      std::equal(few.sequences[0].tokens.begin(), few.sequences[0].tokens.end(), tokens.begin()));
  EXPECT_LT(many.peak_bytes, std::size_t{64} << 20U);
}

// All of every prompt, growing, layer by layer; whatever the chunks.
TEST_P(Generate, TellsHowMuchIsRead) {
  GenerateOptions options;
  options.max_tokens = 2;
  options.prefill_chunk = 4;
  std::vector<std::int64_t> seen;
  options.on_read = [&](std::int64_t done, std::int64_t all) {
    EXPECT_EQ(all, 17);
    seen.push_back(done);
  };
  run({"HELLO", "ABCABCABCABC"}, options);
  EXPECT_TRUE(std::is_sorted(seen.begin(), seen.end()));
  ASSERT_FALSE(seen.empty());
  EXPECT_EQ(seen.back(), 17);
  const auto layers = small_config("qwen3_next").find("num_hidden_layers")->integer();
  EXPECT_EQ(seen.size(), static_cast<std::size_t>(5 * layers));  // 4 + 1 and 4 + 4 + 4 tokens
}

TEST_P(Generate, TellsOnceOfTextsBeyondThePositions) {
  const std::int64_t positions = small_model(encoder(), "qwen3_next").config.plan.max_positions;
  const auto told = [&](std::int64_t prompt, std::int64_t more) {
    GenerateOptions options;
    options.max_tokens = more;
    options.ignore_ends = true;
    std::vector<std::int64_t> numbers;
    options.on_beyond = [&](std::int64_t tokens, std::int64_t known) {
      numbers.push_back(tokens);
      EXPECT_EQ(known, positions);
    };
    run({std::string(static_cast<std::size_t>(prompt), 'A'), "B"}, options);
    return numbers;
  };
  // The last token that is generated is not read.
  EXPECT_EQ(told(positions - 4, 5), (std::vector<std::int64_t>{}));
  EXPECT_EQ(told(positions - 4, 8), (std::vector<std::int64_t>{positions + 1}));
  EXPECT_EQ(told(positions, 1), (std::vector<std::int64_t>{}));
  EXPECT_EQ(told(positions + 7, 3), (std::vector<std::int64_t>{positions + 7}));
}

TEST_P(Generate, SaysWhatIsWrong) {
  const models::Model model = small_model(encoder(), "qwen3");
  const auto refused = [&](const std::string& says,
                           const std::vector<std::vector<std::int32_t>>& prompts,
                           std::int64_t max_tokens = 3, Errc code = Errc::kArgument) {
    GenerateOptions options;
    options.max_tokens = max_tokens;
    expect_error(code, says,
                 [&] { jobs::generate(encoder(), model, tokenizer_, prompts, options); });
  };
  refused("there must be a prompt", {});
  refused("at least one token", {{1}, {}});
  refused("max_tokens must be at least 1 and at most 2^31, got 0", {{1}}, 0);
  refused("the prompt's tokens must be in the vocabulary of 80, got 80", {{1, 80}}, 3, Errc::kIo);
  refused("the prompt's tokens must be in the vocabulary of 80, got -1", {{-1}}, 3, Errc::kIo);
}

MT_ON_EVERY_BACKEND(Generate);

TEST(TextUntil, GivesOutWhatIsSure) {
  const std::string text = "one two thee three";
  for (std::size_t step = 1; step <= text.size(); ++step) {
    jobs::TextUntil until({"three", "", "thx"});
    std::string out;
    for (std::size_t at = 0; at < text.size(); at += step) {
      out += until.add(text.substr(at, step));
      EXPECT_EQ(text.compare(0, out.size(), out), 0) << out;
    }
    EXPECT_TRUE(until.ended());
    EXPECT_EQ(out, "one two thee ");
  }
  jobs::TextUntil until({"three"});
  EXPECT_EQ(until.add("a thr"), "a ");
  EXPECT_EQ(until.add("", true), "thr");
  EXPECT_FALSE(until.ended());
}

}  // namespace
}  // namespace mlxtape::test
