// generate: continues one or more prompts, as one batch.
//
//   const Model model = load_model(directory, *encoder);
//   const auto tokenizer = formats::Tokenizer::from_directory(directory);
//   const auto report = generate(*encoder, model, tokenizer, {tokenizer.encode("The river")}, options);
//
// Prompts may differ in length. Each is processed in chunks, then all decode together, one token each per step (jobs/engine.h).
// Each sequence samples with a seed of its own, derived from the seed and its number.
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
  std::vector<std::int32_t> stop_tokens;  // besides the tokenizer's own end-of-text tokens
  bool ignore_ends = false;               // always generate max_tokens: to measure speed
  std::vector<std::string> stop_strings;  // the text ends before the first of them
  std::int64_t prefill_chunk = 2048;
  bool logprobs =
      false;  // also return those of every token and of the most likely ones at its position
  // New text as soon as it is final: whole characters, no possible start of a stop string. Returning false ends the sequence.
  std::function<bool(std::size_t sequence, std::string_view text)> on_text;
  // Called before each chunk of a prompt and each token: true ends all sequences, keeping what they have.
  std::function<bool()> stop;
  // Progress of all prompts, in tokens; called as layers finish.
  std::function<void(std::int64_t done, std::int64_t all)> on_read;
  // Called once, before a sequence first exceeds the model's maximum context length.
  std::function<void(std::int64_t tokens, std::int64_t positions)> on_beyond;
};

enum class Finish : std::uint8_t { kStopToken, kStopString, kLength, kCancelled };
const char* name_of(Finish finish) noexcept;  // "stop", "stop string", "length", "cancelled"

struct Generated {
  std::vector<std::int32_t> tokens;  // without the stop token
  std::string text;
  // With GenerateOptions::logprobs, for each token: its own, and those of the most likely tokens.
  std::vector<float> logprobs = {};
  std::vector<std::vector<std::pair<std::int32_t, float>>> top = {};
  Finish finish = Finish::kLength;
};

struct GenerateReport {
  std::vector<Generated> sequences;  // in the order of the prompts
  std::int64_t prompt_tokens = 0, tokens = 0;
  double prompt_seconds = 0, seconds = 0;
  std::size_t peak_bytes = 0;  // of device memory, including loaded weights
};

GenerateReport generate(CommandEncoder& encoder, const models::Model& model,
                        const formats::Tokenizer& tokenizer,
                        const std::vector<std::vector<std::int32_t>>& prompts,
                        const GenerateOptions& options = {});

// Splits streamed text at the first of some stop strings.
class TextUntil {
 public:
  explicit TextUntil(std::vector<std::string> ends) : ends_(std::move(ends)) {}
  // The text that is certain to come before a stop string; last: nothing follows.
  std::string add(std::string_view text, bool last = false);
  bool ended() const { return ended_; }

 private:
  std::vector<std::string> ends_;
  std::string held_;
  bool ended_ = false;
};

}  // namespace mlxtape::jobs
