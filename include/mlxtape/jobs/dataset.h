// Training data: samples of tokens from files, and batches of them in an order that depends on the seed alone.
//
// Files      .txt: one long text, cut into samples of max_tokens; .jsonl: one object per line, read by the first keys that fit:
//              {"prompt": …, "completion": …}  rendered as a user's and an assistant's message by the chat template; without
//                                              a template the tokens of both in sequence, then the end-of-text token
//              {"messages": [...]}             rendered by the chat template; the prompt is all but the last message plus the
//                                              beginning of an answer, as far as it is a prefix of the whole
//              {"text": …}                     the text, with an end-of-text token added unless it ends with one
//            "tools" next to the first two is passed to the template, with enable_thinking if the tokenizer has <think>. A
//            tokenizer without an end-of-text token adds none. Blank lines and a byte order mark are skipped.
//            A folder: train, valid and test, each .jsonl or .txt; missing ones are empty. Errors are kIo and name file and
//            line.
// Order      as in mlx-lm: samples sorted by length, batch_size neighbours per batch, a remainder at the end is dropped; the
//            batches of each epoch in the order of numpy's RandomState(seed).permutation, which continues from epoch to epoch.
//            So batch i is a function of the samples, the sizes and the seed: to resume a run, i is all that is needed.
// Layout     a batch is [rows, length]: inputs are a sample's tokens except the last, targets its tokens except the first, -1
//            for tokens that the loss ignores: padding and, with learn_prompt off, the prompt. length: the tokens of the
//            longest sample rounded up to pad_to, at most max_tokens − 1. Padding is token 0.
// mlx-lm     0.32 also counts the first padding token as a target (0 after the end), and its lora command takes a line's number
//            of keys for a sample's length, so it leaves samples in the order of the file. Neither is done here. It requires a
//            chat template for prompt and completion, takes the length of the prompt alone if the whole does not begin with it,
//            and has no .txt.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "mlxtape/base/error.h"
#include "mlxtape/formats/tokenizer.h"

namespace mlxtape::jobs {

struct Sample {
  std::vector<std::int32_t> tokens;  // at least 2
  std::int64_t prompt = 0;           // the first so many are the prompt, the rest is the completion
};

struct DataSet {
  std::vector<Sample> train, valid, test;
};

struct DataOptions {
  std::int64_t max_tokens = 2048;  // per sample; longer ones are cut
  // Find where prompts end, for learn_prompt off: the template must be able to render the messages before the last by
  // themselves. If off, and for a single message, Sample::prompt is 0.
  bool prompts = true;
};

// One file, or the three of a folder. A single file is used for training only. A file that exists must not be empty.
std::vector<Sample> read_samples(const std::string& file, const formats::Tokenizer& tokenizer,
                                 const DataOptions& options = {});
DataSet read_data(const std::string& path, const formats::Tokenizer& tokenizer,
                  const DataOptions& options = {});

// Picks so many samples for training, and of the rest so many for validation, in numpy's order for the seed, as mlx-lm's dwq
// does. If there are too few, one in 8 is for validation: at most as many as asked for, and at least one.
DataSet pick_samples(const std::vector<Sample>& samples, std::int64_t train, std::int64_t valid,
                     std::uint32_t seed);

struct BatchOptions {
  std::int64_t batch_size = 4;
  std::int64_t pad_to = 32;
  std::int64_t max_tokens = 2048;  // per sample; longer ones are cut
  std::uint32_t seed = 0;
  bool learn_prompt = true;
  bool by_length = true;  // off: samples keep their order, and a batch mixes lengths
};
Check batch_check(const BatchOptions& options);

struct Batch {
  std::int64_t rows = 0, length = 0;
  std::vector<std::int32_t> tokens, targets;  // [rows, length]
  std::int64_t counted = 0;                   // targets that are not -1
};

class Batches {
 public:
  // Throws kArgument if there are fewer samples than batch_size, or no token that the loss counts.
  Batches(std::vector<Sample> samples, const BatchOptions& options);
  // Of samples that outlive them: training data is not held twice.
  static Batches of(const std::vector<Sample>& samples, const BatchOptions& options);
  ~Batches();
  Batches(Batches&&) noexcept;
  Batches& operator=(Batches&&) noexcept;

  std::int64_t per_epoch() const;
  Batch at(std::int64_t i) const;  // any i ≥ 0; from one thread at a time
  // Of samples, order and sizes: equal if every batch is equal. 16 hexadecimal digits.
  std::string fingerprint() const;

 private:
  struct Impl;
  explicit Batches(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

// Every sample once, sorted by length; the last batch may have fewer rows. For an exact mean over all samples.
std::vector<Batch> every_batch(const std::vector<Sample>& samples, const BatchOptions& options);
// The same for a list of batches.
std::string fingerprint(const std::vector<Batch>& batches);

}  // namespace mlxtape::jobs
