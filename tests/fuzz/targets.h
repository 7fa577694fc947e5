// What is fuzzed: each target takes the bytes of a file that users get from others. It returns whether the reader took
// them, and throws Finding, or anything but Error, where the reader did what it never may.
//
// libFuzzer runs one target a program (entry.cpp), fuzz_corpus all of them on the corpora (corpus_test.cpp).
#pragma once

#include <stdexcept>
#include <string>
#include <string_view>

#include "mlxtape/base/error.h"

namespace mlxtape::fuzz {

// A line for each in CMakeLists.txt.
// A template and, after a line of ----, what is given to it, as JSON.
bool chat_template(std::string_view input);
// config.json
bool config(std::string_view input);
// .jsonl; and as .txt, which is always taken
bool dataset(std::string_view input);
// A .gguf file: its tensors, and as a model and a tokenizer.
bool gguf(std::string_view input);
bool json(std::string_view input);
// state.safetensors, of the run that run_state.cpp describes
bool run_state(std::string_view input);
bool safetensors(std::string_view input);
// tokenizer.json
bool tokenizer(std::string_view input);
// tokenizer.model, SentencePiece's or a list of ranks; tekken.json
bool tokenizer_file(std::string_view input);
// A text, for tokenizers that are shaped as real ones.
bool tokenizer_text(std::string_view input);

struct Finding : std::logic_error {
  using std::logic_error::logic_error;
};

// `about`: what it was broken by. Views, because a check that holds must cost nothing: there are several for each token.
inline void check(bool holds, std::string_view rule, std::string_view about = "") {
  if (holds) return;
  throw Finding("broken: " + std::string(rule) + (about.empty() ? "" : ": ") + std::string(about));
}

// What is refused must be refused with one line that people can read.
void check_refusal(const Error& error);

// false: refused with an Error, the one way there is.
template <class Fn>
bool accepts(Fn&& fn) {
  try {
    fn();
    return true;
  } catch (const Error& error) {
    check_refusal(error);
    return false;
  }
}

}  // namespace mlxtape::fuzz
