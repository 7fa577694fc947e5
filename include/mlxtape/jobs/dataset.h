// Texts to learn from: samples of tokens from files, and batches of them in an order that the seed alone decides.
//
// Files      .txt: one long text, cut into samples of max_tokens; .jsonl: an object a line, by its keys:
//              {"messages": [...]}             the chat template's text
//              {"prompt": …, "completion": …}  the same of a user's and an assistant's message; without a template both
//                                              texts after each other, and the end of text
//              {"text": …}                     the text, and the end of text
//            A folder: train, valid and test, each .jsonl or .txt; what is not there is empty. Errors are kIo and name file
//            and line.
// Order      as mlx-lm's: samples by length, batch_size neighbours a batch, what is left over at the end not used; the
//            batches of each epoch in the order of numpy's RandomState(seed).permutation, which goes on from epoch to epoch.
//            So batch i is a function of the samples, the sizes and the seed: to go on after a stop it is enough to know i.
// Layout     a batch is [rows, length]: inputs are a sample's tokens but the last, targets its tokens but the first, -1 where
//            nothing is to be learned: padding and, with learn_prompt off, the prompt.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "mlxtape/formats/tokenizer.h"

namespace mlxtape::jobs {

struct Sample {
  std::vector<std::int32_t> tokens;
  std::int64_t prompt = 0;  // so many of them are given, the rest is the answer
};

struct DataSet {
  std::vector<Sample> train, valid, test;
};

struct DataOptions {
  std::int64_t max_tokens = 2048;  // of a sample; longer ones are cut
};

// One file, or a folder's three. A single file is all train.
std::vector<Sample> read_samples(const std::string& file, const formats::Tokenizer& tokenizer,
                                 const DataOptions& options = {});
DataSet read_data(const std::string& path, const formats::Tokenizer& tokenizer,
                  const DataOptions& options = {});

struct BatchOptions {
  std::int64_t batch_size = 4;
  std::int64_t pad_to = 32;  // inputs are so long, or a multiple; never longer than max_tokens
  std::int64_t max_tokens = 2048;
  std::uint32_t seed = 0;
  bool learn_prompt = true;
};

struct Batch {
  std::int64_t rows = 0, length = 0;
  std::vector<std::int32_t> tokens, targets;  // [rows, length]
  std::int64_t counted = 0;                   // targets that are not -1
};

class Batches {
 public:
  // Throws kArgument where there are fewer samples than a batch has.
  Batches(std::vector<Sample> samples, const BatchOptions& options);
  ~Batches();
  Batches(Batches&&) noexcept;
  Batches& operator=(Batches&&) noexcept;

  std::int64_t per_epoch() const;
  Batch at(std::int64_t i) const;  // any i ≥ 0
  // Of samples, order and sizes: equal where every batch is. 16 hexadecimal digits.
  std::string fingerprint() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace mlxtape::jobs
