// What is expected of orders, sizes and texts was made by numpy's RandomState and by mlx-lm 0.32.2: iterate_batches,
// CompletionsDataset, ChatDataset and TextDataset.
#include "mlxtape/jobs/dataset.h"

#include <gtest/gtest.h>
#include <sys/stat.h>

#include <numeric>

#include "formats/support.h"
#include "jobs/byte_tokenizer.h"
#include "jobs/permutations.h"
#include "support/op_test.h"

namespace mlxtape::test {
namespace {

using formats::put;
using formats::TempFolder;
using formats::Tokenizer;
using jobs::Batch;
using jobs::Batches;
using jobs::BatchOptions;
using jobs::Sample;
using Order = std::vector<std::int64_t>;

TEST(Permutations, AreNumpys) {
  jobs::Permutations zero(0);
  EXPECT_EQ(zero.next(10), (Order{2, 8, 4, 9, 1, 6, 7, 3, 0, 5}));
  EXPECT_EQ(zero.next(10), (Order{3, 5, 1, 2, 9, 8, 0, 6, 7, 4}));
  EXPECT_EQ(zero.next(10), (Order{2, 3, 8, 4, 5, 1, 0, 6, 9, 7}));
  jobs::Permutations largest(4294967295U);
  EXPECT_EQ(largest.next(10), (Order{6, 9, 5, 1, 8, 0, 7, 4, 2, 3}));

  jobs::Permutations seven(7);
  Order order;
  for (int i = 0; i < 3; ++i) order = seven.next(1000);
  EXPECT_EQ(Order(order.begin(), order.begin() + 8),
            (Order{589, 357, 930, 423, 429, 841, 891, 632}));
  EXPECT_EQ(Order(order.end() - 8, order.end()), (Order{368, 810, 669, 641, 431, 726, 893, 107}));
  EXPECT_EQ(seven.next(0), Order{});
  EXPECT_EQ(seven.next(1), Order{0});
}

// Token t of sample i is 1000·i + t.
std::vector<Sample> numbered() {
  std::vector<Sample> samples(23);
  for (std::size_t i = 0; i < samples.size(); ++i) {
    samples[i].tokens.resize(2 + (8 * i * i + 13 * i) % 90);
    std::iota(samples[i].tokens.begin(), samples[i].tokens.end(),
              static_cast<std::int32_t>(1000 * i));
    samples[i].prompt = static_cast<std::int64_t>(i % 5);
  }
  return samples;
}

struct Expected {
  std::int64_t length;
  std::vector<std::size_t> samples;
};

void expect_batch(const Batch& batch, const Expected& want, const std::vector<Sample>& samples,
                  const BatchOptions& options) {
  ASSERT_EQ(batch.rows, static_cast<std::int64_t>(want.samples.size()));
  ASSERT_EQ(batch.length, want.length);
  std::vector<std::int32_t> tokens, targets;
  std::int64_t counted = 0;
  for (const std::size_t s : want.samples) {
    const auto& all = samples[s].tokens;
    const std::int64_t n = std::min(static_cast<std::int64_t>(all.size()), options.max_tokens);
    for (std::int64_t t = 0; t < want.length; ++t) {
      const auto at = static_cast<std::size_t>(t);
      const bool is_there = t + 1 < n;
      const bool is_learned = is_there && (options.learn_prompt || t + 1 >= samples[s].prompt);
      tokens.push_back(is_there ? all[at] : 0);
      targets.push_back(is_learned ? all[at + 1] : -1);
      counted += is_learned ? 1 : 0;
    }
  }
  EXPECT_EQ(batch.tokens, tokens);
  EXPECT_EQ(batch.targets, targets);
  EXPECT_EQ(batch.counted, counted);
}

TEST(Batches, AreThoseOfMlxLm) {
  const std::vector<Sample> samples = numbered();
  const std::vector<Expected> of_five = {
      {96, {9, 12, 2, 19}},  {32, {0, 4, 6, 16}},   {32, {17, 15, 22, 1}}, {64, {3, 21, 10, 11}},
      {64, {7, 18, 14, 20}}, {64, {7, 18, 14, 20}}, {64, {3, 21, 10, 11}}, {96, {9, 12, 2, 19}},
      {32, {17, 15, 22, 1}}, {32, {0, 4, 6, 16}},   {32, {17, 15, 22, 1}}, {96, {9, 12, 2, 19}},
      {64, {3, 21, 10, 11}}};
  BatchOptions options{.batch_size = 4, .seed = 5};
  for (const bool learn_prompt : {true, false}) {
    options.learn_prompt = learn_prompt;
    const Batches batches(samples, options);
    EXPECT_EQ(batches.per_epoch(), 5);
    for (std::size_t i = 0; i < of_five.size(); ++i) {
      expect_batch(batches.at(static_cast<std::int64_t>(i)), of_five[i], samples, options);
    }
    expect_batch(batches.at(1), of_five[1], samples, options);  // an epoch back
  }

  const std::vector<Expected> cut = {{32, {16, 17, 15}}, {59, {21, 10, 11}}, {59, {7, 18, 14}},
                                     {32, {0, 4, 6}},    {32, {22, 1, 3}},   {59, {20, 9, 12}},
                                     {59, {2, 19, 8}},   {59, {7, 18, 14}},  {32, {0, 4, 6}}};
  options = {.batch_size = 3, .max_tokens = 60, .seed = 123};
  const Batches short_ones(samples, options);
  for (std::size_t i = 0; i < cut.size(); ++i) {
    expect_batch(short_ones.at(static_cast<std::int64_t>(i)), cut[i], samples, options);
  }
}

TEST(Batches, OfAllSamplesHaveEachOnce) {
  const std::vector<Sample> samples = numbered();
  const BatchOptions options{.batch_size = 4};
  const std::vector<Batch> batches = jobs::every_batch(samples, options);
  ASSERT_EQ(batches.size(), 6U);
  EXPECT_EQ(batches.back().rows, 3);
  std::vector<int> seen(samples.size());
  std::int64_t counted = 0, all = 0;
  for (const Batch& batch : batches) {
    counted += batch.counted;
    for (std::int64_t r = 0; r < batch.rows; ++r) {
      ++seen[static_cast<std::size_t>(batch.tokens[static_cast<std::size_t>(r * batch.length)]) /
             1000];
    }
  }
  for (const Sample& sample : samples) all += static_cast<std::int64_t>(sample.tokens.size()) - 1;
  EXPECT_EQ(counted, all);
  EXPECT_EQ(seen, std::vector<int>(samples.size(), 1));
  EXPECT_TRUE(jobs::every_batch({}, options).empty());
}

// Equal where every batch is, and nowhere else.
TEST(PickSamples, AsMlxLmPicksThem) {
  const std::vector<Sample> samples = numbered();
  const auto numbers = [](const std::vector<Sample>& of) {
    Order order;
    for (const Sample& sample : of) order.push_back(sample.tokens[0] / 1000);
    return order;
  };
  jobs::DataSet picked = jobs::pick_samples(samples, 6, 4, 123);
  const Order order = jobs::Permutations(123).next(23);
  EXPECT_EQ(numbers(picked.train), (Order{5, 19, 20, 18, 14, 8}));
  EXPECT_EQ(numbers(picked.valid), (Order{7, 11, 4, 3}));
  EXPECT_EQ(picked.train[2].prompt, samples[static_cast<std::size_t>(order[2])].prompt);
  picked = jobs::pick_samples(samples, 19, 4, 123);  // all of them, just
  EXPECT_EQ(numbers(picked.valid), Order(order.begin() + 19, order.end()));
  picked = jobs::pick_samples(samples, 20, 4, 123);  // too few: one in 8
  EXPECT_EQ(numbers(picked.train), Order(order.begin(), order.begin() + 20));
  EXPECT_EQ(numbers(picked.valid), Order(order.begin() + 20, order.begin() + 22));
  picked = jobs::pick_samples({samples[3], samples[4]}, 100, 32, 0);
  EXPECT_EQ(std::pair(picked.train.size(), picked.valid.size()), std::pair(1UL, 1UL));
  expect_error(Errc::kArgument, "at least 2 samples",
               [&] { jobs::pick_samples({samples[0]}, 1, 1, 0); });
  expect_error(Errc::kArgument, "got 0 and 1", [&] { jobs::pick_samples(samples, 0, 1, 0); });
  expect_error(Errc::kArgument, "got 1 and 0", [&] { jobs::pick_samples(samples, 1, 0, 0); });
}

TEST(Batches, InTheOrderGiven) {
  const std::vector<Sample> samples = numbered();
  const BatchOptions options{.batch_size = 4, .pad_to = 1, .by_length = false};
  const std::vector<Batch> all = jobs::every_batch(samples, options);
  std::size_t next = 0;
  for (const Batch& batch : all) {
    for (std::int64_t row = 0; row < batch.rows; ++row, ++next) {
      EXPECT_EQ(batch.tokens[static_cast<std::size_t>(row * batch.length)], 1000 * next);
    }
  }
  EXPECT_EQ(next, samples.size());
  const Batches some(samples, options);
  const Order order = jobs::Permutations(0).next(5);
  for (std::size_t i = 0; i < order.size(); ++i) {
    EXPECT_EQ(some.at(static_cast<std::int64_t>(i)).tokens,
              all[static_cast<std::size_t>(order[i])].tokens);
  }
}

TEST(Batches, FingerprintTellsThemApart) {
  const std::vector<Sample> samples = numbered();
  const BatchOptions options{.batch_size = 4, .seed = 5};
  const std::string one = Batches(samples, options).fingerprint();
  EXPECT_EQ(one.size(), 16U);
  const auto with = [&](auto change) {
    BatchOptions other = options;
    std::vector<Sample> changed = samples;
    change(other, changed);
    return Batches(changed, other).fingerprint();
  };
  EXPECT_EQ(with([](BatchOptions&, auto&) {}), one);
  EXPECT_EQ(with([](BatchOptions& o, auto&) { o.max_tokens = 4096; }), one);
  EXPECT_EQ(with([](BatchOptions&, auto& s) { s[3].prompt = 2; }), one);  // it is learned
  EXPECT_NE(with([](BatchOptions& o, auto&) { o.seed = 6; }), one);
  EXPECT_NE(with([](BatchOptions& o, auto&) { o.batch_size = 5; }), one);
  EXPECT_NE(with([](BatchOptions& o, auto&) { o.pad_to = 48; }), one);
  EXPECT_NE(with([](BatchOptions& o, auto&) { o.max_tokens = 50; }), one);
  EXPECT_NE(with([](BatchOptions& o, auto&) { o.learn_prompt = false; }), one);
  EXPECT_NE(with([](BatchOptions&, auto& s) { s[9].tokens[3] += 1; }), one);
  EXPECT_EQ(with([](BatchOptions&, auto& s) { std::swap(s[5], s[6]); }), one);  // of other lengths
  EXPECT_NE(with([](BatchOptions&, auto& s) { std::swap(s[0], s[4]); }), one);  // of the same

  const auto all = jobs::every_batch(samples, options);
  auto other = all;
  EXPECT_EQ(jobs::fingerprint(all), jobs::fingerprint(other));
  other[1].targets[0] = -1;
  EXPECT_NE(jobs::fingerprint(all), jobs::fingerprint(other));
}

// Of hundreds of MB: a batch holds what the samples hold now, as there are no others.
TEST(Batches, OfSamplesThatAreNotTheirOwn) {
  std::vector<Sample> samples = numbered();
  const BatchOptions options{.batch_size = 4, .seed = 5};
  const Batches shared = Batches::of(samples, options), owned(samples, options);
  for (std::int64_t i = 0; i < 7; ++i) EXPECT_EQ(shared.at(i).tokens, owned.at(i).tokens);
  EXPECT_EQ(shared.fingerprint(), owned.fingerprint());
  const std::int32_t before = owned.at(0).tokens[0];
  for (Sample& sample : samples) sample.tokens[0] = before + 1;
  EXPECT_EQ(shared.at(0).tokens[0], before + 1);
  EXPECT_EQ(owned.at(0).tokens[0], before);
  expect_error(Errc::kArgument, "at least batch_size = 24 samples, got 23",
               [&] { Batches::of(samples, {.batch_size = 24}); });
}

TEST(Batches, RefuseWhatCannotBeLearned) {
  const std::vector<Sample> samples = numbered();
  expect_error(Errc::kArgument, "at least batch_size = 24 samples, got 23",
               [&] { Batches(samples, {.batch_size = 24}); });
  expect_error(Errc::kArgument, "a batch's number must be at least 0, got -1",
               [&] { Batches(samples, {}).at(-1); });
  std::vector<Sample> given(4, Sample{{1, 2, 3, 4, 5}, 4});
  EXPECT_EQ(Batches(given, {.learn_prompt = false}).at(0).counted, 4);
  expect_error(Errc::kArgument, "whose first 4 tokens are all prompt",
               [&] { Batches(given, {.max_tokens = 4, .learn_prompt = false}); });
  expect_refused({
      {"rows", jobs::batch_check({.batch_size = 0}), Errc::kArgument,
       "batch_size must be at least 1"},
      {"padding", jobs::batch_check({.pad_to = 0}), Errc::kArgument, "pad_to must be at least 1"},
      {"length", jobs::batch_check({.max_tokens = 1}), Errc::kArgument,
       "max_tokens must be at least 2"},
  });
}

// ---- files ----

constexpr const char* kTemplate =
    "{% if tools %}{{ tools | length }} tools\n{% endif %}{% for m in messages %}<|im_start|>{{ "
    "m.role }}\n"
    "{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt "
    "%}<|im_start|>assistant\n{% if "
    "enable_thinking %}<think>\n{% endif %}{% endif %}";

class DataFiles : public testing::Test {
 protected:
  Tokenizer tokenizer(bool with_template, bool thinks = false) {
    std::vector<std::string> special = {"<|end|>", "<|im_start|>", "<|im_end|>"};
    if (thinks) special.insert(special.end(), {"<think>", "</think>"});
    put(folder_ / "tokenizer.json", byte_tokenizer_json(special));
    formats::Json config = formats::Json::Object{{"eos_token", formats::Json("<|end|>")}};
    if (with_template) config.set("chat_template", formats::Json(kTemplate));
    put(folder_ / "tokenizer_config.json", config.dump());
    return Tokenizer::from_directory(folder_.path.string());
  }
  std::vector<Sample> read(const std::string& lines, const Tokenizer& tokenizer,
                           const jobs::DataOptions& options = {}) {
    put(folder_ / "some.jsonl", lines);
    return jobs::read_samples(folder_ / "some.jsonl", tokenizer, options);
  }
  // What reading the lines says, beginning with the file's name and the line.
  void expect_said(const std::string& lines, const std::string& says) {
    const Tokenizer t = tokenizer(true);
    const std::string said =
        formats::message_of([&] { read(lines, t); }, Errc::kIo, folder_.path.string() + "/");
    EXPECT_EQ(said.substr(0, says.size()), says) << said;
  }
  TempFolder folder_;
};

TEST_F(DataFiles, LinesAreReadAsMlxLmReadsThem) {
  const Tokenizer t = tokenizer(true);
  const std::string lines =
      "\xEF\xBB\xBF{\"prompt\": \"2+2?\", \"completion\": \"4\"}\r\n"
      "\n  \t\n"
      R"({"prompt": "a", "completion": "b", "tools": [{"type": "function"}], "text": "t"})"
      "\n"
      R"({"messages": [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}, )"
      R"({"role": "assistant", "content": "yo"}], "text": "t"})"
      "\n"
      R"({"messages": [{"role": "user", "content": "x"}, {"role": "user", "content": "y"}]})"
      "\n"
      R"({"text": "hello"})"
      "\n"
      R"({"text": "é<|end|>"})";  // no end of line at the end of the file
  const auto samples = read(lines, t);
  struct Want {
    std::string text, prompt;
    std::size_t tokens;
  };
  const std::string to_be_brief =
      "<|im_start|>system\nbe "
      "brief<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n";
  const std::vector<Want> wants = {
      {"<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n4<|im_end|>\n",
       "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n", 26},
      {"1 tools\n<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nb<|im_end|>\n",
       "1 tools\n<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n", 31},
      {to_be_brief + "yo<|im_end|>\n", to_be_brief, 43},
      {"<|im_start|>user\nx<|im_end|>\n<|im_start|>user\ny<|im_end|>\n",
       "<|im_start|>user\nx<|im_end|>\n", 18},
      {"hello<|end|>", "", 6},
      {"é<|end|>", "", 3}};
  ASSERT_EQ(samples.size(), wants.size());
  for (std::size_t i = 0; i < wants.size(); ++i) {
    const auto& tokens = samples[i].tokens;
    EXPECT_EQ(t.decode(tokens), wants[i].text);
    EXPECT_EQ(tokens.size(), wants[i].tokens);
    const std::span given(tokens.data(), static_cast<std::size_t>(samples[i].prompt));
    EXPECT_EQ(t.decode(given), wants[i].prompt);
  }
  for (const Sample& sample : read(lines, t, {.prompts = false})) EXPECT_EQ(sample.prompt, 0);
}

// An answer's beginning that the whole does not have is no part of the prompt.
TEST_F(DataFiles, APromptIsWhatTheWholeBeginsWith) {
  const Tokenizer t = tokenizer(true, true);
  const auto samples = read(R"({"prompt": "2+2?", "completion": "4"})", t);
  const std::span given(samples[0].tokens.data(), static_cast<std::size_t>(samples[0].prompt));
  EXPECT_EQ(t.decode(given), "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n");
}

TEST_F(DataFiles, WithoutATemplate) {
  const Tokenizer t = tokenizer(false);
  const auto samples = read(R"({"prompt": "ab", "completion": "cde"})", t);
  EXPECT_EQ(t.decode(samples[0].tokens), "abcde<|end|>");
  EXPECT_EQ(samples[0].prompt, 2);
  EXPECT_EQ(read(R"({"prompt": "ab", "completion": "cde"})", t, {.max_tokens = 2})[0].tokens.size(),
            2U);
  const Tokenizer endless = Tokenizer::from_json(byte_tokenizer_json(), "bytes");
  EXPECT_EQ(endless.decode(read(R"({"text": "ab"})", endless)[0].tokens), "ab");
}

TEST_F(DataFiles, ATextIsCut) {
  const Tokenizer t = tokenizer(false);
  put(folder_ / "some.txt", "\xEF\xBB\xBFone two\nthree");
  const auto samples = jobs::read_samples(folder_ / "some.txt", t, {.max_tokens = 4});
  ASSERT_EQ(samples.size(), 3U);  // the e at the end has nothing to predict
  EXPECT_EQ(t.decode(samples[0].tokens), "one ");
  EXPECT_EQ(t.decode(samples[2].tokens), "thre");
  put(folder_ / "some.txt", "one two\nthre");
  EXPECT_EQ(jobs::read_samples(folder_ / "some.txt", t, {.max_tokens = 7}).size(), 2U);
}

TEST_F(DataFiles, BadLinesAreNamed) {
  expect_said("{\"text\": \"fine\"}\n\n{\"text\": 3}\n",
              "some.jsonl: line 3: \"text\" must be a string, got a number");
  expect_said("{\"text\": \"fine\"}\n{\"text\": \"fi", "some.jsonl: line 2 is not JSON: byte ");
  expect_said("nope\n", "some.jsonl: line 1 is not JSON: byte 0: must be null, got 'nope'");
  expect_said("{\"text\": \"fine\"}\n\xEF\xBB\xBF{\"text\": \"fine\"}\n",
              "some.jsonl: line 2 is not JSON: byte 0: must be a value, got a byte order mark");
  expect_said("{\"text\": \"a\xFF\"}\n", "some.jsonl: line 1 is not JSON: byte ");
  expect_said("{\"txt\": \"a\"}\n",
              "some.jsonl: line 1: a line must be an object with \"messages\"");
  expect_said("[1]\n", "some.jsonl: line 1: a line must be an object");
  expect_said("{\"text\": \"\"}\n", "some.jsonl: line 1: a sample must have at least 2 tokens");
  expect_said("{\"prompt\": [], \"completion\": \"a\"}\n",
              "some.jsonl: line 1: \"prompt\" must be a string, got an array");
  expect_said("{\"messages\": []}\n",
              "some.jsonl: line 1: \"messages\" must be an array of at least one");
  expect_said("{\"messages\": {}}\n", "some.jsonl: line 1: \"messages\" must be an array");
  expect_said("{\"messages\": [{\"content\": \"a\"}]}\n",
              "some.jsonl: line 1: each of \"messages\" must");
  const Tokenizer plain = tokenizer(false);
  EXPECT_EQ(
      formats::message_of(
          [&] { read("{\"messages\": [{\"role\": \"user\", \"content\": \"a\"}]}\n", plain); },
          Errc::kIo, folder_.path.string() + "/")
          .substr(0, 20),
      "some.jsonl: line 1: ");
  expect_error(Errc::kArgument, "max_tokens must be at least 2, got 1",
               [&] { read("", plain, {.max_tokens = 1}); });
}

TEST_F(DataFiles, APipeIsNotWaitedFor) {
  const Tokenizer t = tokenizer(false);
  for (const std::string name : {"pipe.jsonl", "pipe.txt"}) {
    ASSERT_EQ(mkfifo((folder_ / name).c_str(), 0600), 0);
    EXPECT_EQ(formats::message_of([&] { jobs::read_data(folder_ / name, t); }, Errc::kIo,
                                  folder_.path.string() + "/"),
              "data: " + name + " must be a file, got a pipe");
  }
}

// The lines of a file are not all in memory, nor is more room for tokens than there are.
TEST_F(DataFiles, SamplesHoldTheirTokensAlone) {
  const Tokenizer t = tokenizer(false);
  std::string lines;
  for (int i = 0; i < 1000; ++i) {
    lines += "{\"prompt\": \"" + std::string(300, 'p') + "\", \"completion\": \"c\"}\n" +
             "{\"text\": \"" + std::string(400, 't') + "\"}\n";
  }
  std::size_t tokens = 0, room = 0;
  for (const Sample& sample : read(lines, t, {.max_tokens = 50})) {
    tokens += sample.tokens.size();
    room += sample.tokens.capacity();
  }
  EXPECT_EQ(tokens, 2000U * 50);
  EXPECT_EQ(room, tokens);
}

TEST_F(DataFiles, AFolderHasThree) {
  const Tokenizer t = tokenizer(false);
  const std::string folder = folder_ / "data";
  const auto says = [&](const std::string& path) {
    return formats::message_of([&] { jobs::read_data(path, t); }, Errc::kIo,
                               folder_.path.string() + "/");
  };
  EXPECT_EQ(says(folder), "data: no such file or folder");
  std::filesystem::create_directory(folder);
  EXPECT_EQ(says(folder),
            "data: must contain train, valid or test, each .jsonl or .txt, got none of them");
  put(folder + "/valid.txt", "some words");
  jobs::DataSet data = jobs::read_data(folder, t);
  EXPECT_TRUE(data.train.empty());
  EXPECT_EQ(data.valid.size(), 1U);
  put(folder + "/train.jsonl", "\n");
  EXPECT_EQ(says(folder),
            "data/train.jsonl: must contain samples, got an empty file; add some, or delete it");
  put(folder + "/train.jsonl", "{\"text\": \"a\"}\n{\"text\": \"b\"}\n");
  put(folder + "/test.jsonl", "");
  EXPECT_EQ(says(folder),
            "data/test.jsonl: must contain samples, got an empty file; add some, or delete it");
  std::filesystem::remove(folder + "/test.jsonl");
  data = jobs::read_data(folder, t);
  EXPECT_EQ(data.train.size(), 2U);
  EXPECT_TRUE(data.test.empty());
  EXPECT_EQ(jobs::read_data(folder + "/train.jsonl", t).train.size(), 2U);
  put(folder + "/train.txt", "a text");
  EXPECT_EQ(says(folder), "data: must contain either train.jsonl or train.txt, got both");
  put(folder + "/words.csv", "a text");
  EXPECT_EQ(says(folder + "/words.csv"),
            "data/words.csv: must be a .jsonl or .txt file, or a folder with such files");
}

}  // namespace
}  // namespace mlxtape::test
