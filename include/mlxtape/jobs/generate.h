// generate: text that a model goes on with after each of some prompts, side by side.
//
//   const Model model = load_model(directory, *encoder);
//   const auto tokenizer = formats::Tokenizer::from_directory(directory);
//   const auto report = generate(*encoder, model, tokenizer, {tokenizer.encode("The river")}, options);
//
// Prompts may differ in length. Each is read in chunks, then all go on together, a token each at a time (jobs/engine.h). Each
// sequence draws with a seed of its own, made from the seed and its number.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "mlxtape/formats/tokenizer.h"
#include "mlxtape/jobs/engine.h"

namespace mlxtape::jobs {

struct GenerateOptions {
  SamplingOptions sampling;
  std::int64_t max_tokens = 256;
  std::vector<std::int32_t> stop_tokens;  // beside the tokenizer's own ends of text
  bool ignore_ends = false;               // max_tokens whatever they are: to measure speed
  std::vector<std::string> stop_strings;  // neither they nor what follows is in the text
  std::int64_t prefill_chunk = 2048;
  bool logprobs = false;  // of every token, and of the most likely ones in its place
  // Text as soon as it cannot change any more: whole characters, no beginning of a stop string. False ends that sequence.
  std::function<bool(std::size_t sequence, std::string_view text)> on_text;
  // Asked before each chunk of a prompt and each token: true ends all sequences, with what they have.
  std::function<bool()> stop;
  // How much of all prompts has been read, in tokens; called as layers are done.
  std::function<void(std::int64_t done, std::int64_t all)> on_read;
  // Once, before a sequence first has more tokens than the model has positions.
  std::function<void(std::int64_t tokens, std::int64_t positions)> on_beyond;
};

enum class Finish : std::uint8_t { kStopToken, kStopString, kLength, kCancelled };
const char* name_of(Finish finish) noexcept;  // "stop", "stop string", "length", "cancelled"

struct Generated {
  std::vector<std::int32_t> tokens;  // the stop token not among them
  std::string text;
  // With GenerateOptions::logprobs, for each token: its own, and the most likely ones with theirs.
  std::vector<float> logprobs = {};
  std::vector<std::vector<std::pair<std::int32_t, float>>> top = {};
  Finish finish = Finish::kLength;
};

struct GenerateReport {
  std::vector<Generated> sequences;  // as the prompts
  std::int64_t prompt_tokens = 0, tokens = 0;
  double prompt_seconds = 0, seconds = 0;
  std::size_t peak_bytes =
      0;  // of the device's memory, the weights that were loaded to it among it
};

GenerateReport generate(CommandEncoder& encoder, const models::Model& model,
                        const formats::Tokenizer& tokenizer,
                        const std::vector<std::vector<std::int32_t>>& prompts,
                        const GenerateOptions& options = {});

// Text up to the first of some strings, given out in pieces.
class TextUntil {
 public:
  explicit TextUntil(std::vector<std::string> ends) : ends_(std::move(ends)) {}
  // What is certain to come before the end; last: nothing follows.
  std::string add(std::string_view text, bool last = false);
  bool ended() const { return ended_; }

 private:
  std::vector<std::string> ends_;
  std::string held_;
  bool ended_ = false;
};

}  // namespace mlxtape::jobs
