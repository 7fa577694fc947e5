// Texts to learn from: samples of tokens from files, and batches of them in an order that the seed alone decides.
//
// Files      .txt: one long text, cut into samples of max_tokens; .jsonl: an object a line, by its keys, the first that fits:
//              {"prompt": …, "completion": …}  as a user's and an assistant's message by the chat template; without a template
//                                              the tokens of both after each other, and the end of text
//              {"messages": [...]}             by the chat template; the prompt is all but the last message, and
//                                              the beginning of an answer, as far as the whole begins so
//              {"text": …}                     the text, and the end of text where it does not end so
//            "tools" beside the first two go to the template, with enable_thinking where the tokenizer has <think>. A tokenizer
//            that knows no end of text adds none. Blank lines and a byte order mark are skipped.
//            A folder: train, valid and test, each .jsonl or .txt; what is not there is empty. Errors are kIo and name file
//            and line.
// Order      as mlx-lm's: samples by length, batch_size neighbours a batch, what is left over at the end not used; the
//            batches of each epoch in the order of numpy's RandomState(seed).permutation, which goes on from epoch to epoch.
//            So batch i is a function of the samples, the sizes and the seed: to go on after a stop it is enough to know i.
// Layout     a batch is [rows, length]: inputs are a sample's tokens but the last, targets its tokens but the first, -1 where
//            nothing is to be learned: padding and, with learn_prompt off, the prompt. length: the tokens of the longest
//            sample rounded up to pad_to, at most max_tokens − 1. Padding is token 0.
// mlx-lm     0.32 also counts the first token of the padding as one to predict (0 after the end), and its lora command takes a
//            line's number of keys for a sample's length, that is, leaves samples in the order of the file. Neither is done
//            here. It asks for a chat template where there are a prompt and a completion, takes a prompt that the whole does not
//            begin with for as long as it is alone, and has no .txt.
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
  std::int64_t prompt = 0;           // so many of them are given, the rest is the answer
};

struct DataSet {
  std::vector<Sample> train, valid, test;
};

struct DataOptions {
  std::int64_t max_tokens = 2048;  // of a sample; longer ones are cut
  // Find out where prompts end, for learn_prompt off: the template must be able to write the messages before the last alone.
  // Without, and where there is one message alone, Sample::prompt is 0.
  bool prompts = true;
};

// One file, or a folder's three. A single file is all train. Train, where it is there, must not be empty.
std::vector<Sample> read_samples(const std::string& file, const formats::Tokenizer& tokenizer,
                                 const DataOptions& options = {});
DataSet read_data(const std::string& path, const formats::Tokenizer& tokenizer,
                  const DataOptions& options = {});

// So many of the samples to learn from and of the rest to validate by, in numpy's order for the seed, as mlx-lm's dwq picks
// them. Where there are fewer, of every 8 one is for the validation, at most as many as asked for, and at least one.
DataSet pick_samples(const std::vector<Sample>& samples, std::int64_t train, std::int64_t valid,
                     std::uint32_t seed);

struct BatchOptions {
  std::int64_t batch_size = 4;
  std::int64_t pad_to = 32;
  std::int64_t max_tokens = 2048;  // of a sample; longer ones are cut
  std::uint32_t seed = 0;
  bool learn_prompt = true;
  bool by_length = true;  // off: samples stay in the order they come in, a batch has any lengths
};
Check batch_check(const BatchOptions& options);

struct Batch {
  std::int64_t rows = 0, length = 0;
  std::vector<std::int32_t> tokens, targets;  // [rows, length]
  std::int64_t counted = 0;                   // targets that are not -1
};

class Batches {
 public:
  // Throws kArgument where there are fewer samples than a batch has, or nothing in them is to be learned.
  Batches(std::vector<Sample> samples, const BatchOptions& options);
  ~Batches();
  Batches(Batches&&) noexcept;
  Batches& operator=(Batches&&) noexcept;

  std::int64_t per_epoch() const;
  Batch at(std::int64_t i) const;  // any i ≥ 0; from one thread at a time
  // Of samples, order and sizes: equal where every batch is. 16 hexadecimal digits.
  std::string fingerprint() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// Every sample once, by length; the last batch may have fewer rows. For an exact mean over all of them.
std::vector<Batch> every_batch(const std::vector<Sample>& samples, const BatchOptions& options);
// The same for them.
std::string fingerprint(const std::vector<Batch>& batches);

}  // namespace mlxtape::jobs
