#include "mlxtape/jobs/dataset.h"

#include "fuzz/targets.h"
#include "jobs/byte_tokenizer.h"
#include "support/temp_folder.h"

namespace mlxtape::fuzz {

namespace {

using formats::Json;
using formats::Tokenizer;
using jobs::Batch;
using jobs::BatchOptions;
using jobs::DataOptions;
using jobs::Sample;

Tokenizer make_tokenizer(const test::TempFolder& folder, bool with_template) {
  Json config = Json::Object{};
  config.set("eos_token", Json("<|im_end|>"));
  if (with_template) {
    config.set("chat_template",
               Json("{%- if tools %}{{ '<|im_start|>tools\\n' ~ (tools | tojson) ~ '<|im_end|>\\n' "
                    "}}{% endif %}{%- for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}"
                    "{%- if m.role == 'assistant' and enable_thinking %}{{ '<think>' }}{% endif %}"
                    "{{- m.content }}{{ '<|im_end|>\\n' }}{%- endfor %}"
                    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"));
  }
  test::put(folder / "tokenizer.json",
            test::byte_tokenizer_json({"<|im_start|>", "<|im_end|>", "<think>", "</think>"}));
  test::put(folder / "tokenizer_config.json", config.dump());
  return Tokenizer::from_directory(folder.path.string());
}

void check_samples(const std::vector<Sample>& samples, const Tokenizer& tokenizer,
                   const DataOptions& options) {
  std::int64_t to_learn = 0;
  for (const Sample& sample : samples) {
    const auto tokens = static_cast<std::int64_t>(sample.tokens.size());
    check(tokens >= 2 && tokens <= options.max_tokens, "a sample has 2 to max_tokens tokens");
    check(sample.prompt >= 0 && sample.prompt <= tokens, "a prompt is a part of its sample");
    for (const std::int32_t id : sample.tokens) {
      check(id >= 0 && id < tokenizer.vocabulary_size(), "an id is one of the vocabulary");
    }
    to_learn += tokens - 1;
  }
  BatchOptions batches;
  batches.batch_size = 3;
  batches.pad_to = 8;
  batches.max_tokens = options.max_tokens;
  std::int64_t counted = 0;
  for (const Batch& batch : jobs::every_batch(samples, batches)) counted += batch.counted;
  check(counted == to_learn, "every token but the first is learned");
  batches.learn_prompt = false;
  accepts([&] {
    const jobs::Batches some(samples, batches);
    for (std::int64_t i = 0; i < 2 * some.per_epoch(); ++i) {
      const Batch batch = some.at(i);
      const auto size = static_cast<std::size_t>(batch.rows * batch.length);
      check(batch.tokens.size() == size && batch.targets.size() == size,
            "a batch is rows by length");
    }
  });
}

}  // namespace

bool dataset(std::string_view input) {
  static const test::TempFolder folder;
  static const Tokenizer with = make_tokenizer(folder, true),
                         without = make_tokenizer(folder, false);
  static const std::string lines = folder / "input.jsonl", text = folder / "input.txt";
  const auto reads = [](const std::string& file, const Tokenizer& tokenizer,
                        std::int64_t max_tokens, bool prompts) {
    DataOptions options;
    options.max_tokens = max_tokens;
    options.prompts = prompts;
    return accepts(
        [&] { check_samples(jobs::read_samples(file, tokenizer, options), tokenizer, options); });
  };
  test::put(lines, input);
  test::put(text, input);
  const bool chats = reads(lines, with, 64, true);
  const bool plain = reads(lines, without, 16, false);
  check(reads(text, without, 16, false), "a text is always taken");
  return chats || plain;
}

}  // namespace mlxtape::fuzz
