// One answer in the making: its text, and whether it goes on. Shared by generate and chat.
#pragma once

#include <algorithm>
#include <chrono>

#include "mlxtape/jobs/generate.h"

namespace mlxtape::jobs {

inline double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

inline bool asked_to_stop(const GenerateOptions& options) { return options.stop && options.stop(); }

// The tokenizer's ends of text and the caller's; none where they are to be ignored.
inline std::vector<std::int32_t> stop_tokens(const formats::Tokenizer& tokenizer,
                                             const GenerateOptions& options) {
  if (options.ignore_ends) return {};
  std::vector<std::int32_t> stops = options.stop_tokens;
  stops.insert(stops.end(), tokenizer.eos_ids().begin(), tokenizer.eos_ids().end());
  return stops;
}

class Sequence {
 public:
  // options must outlive it.
  Sequence(const formats::Tokenizer& tokenizer, const GenerateOptions& options, std::size_t number)
      : options_(options),
        number_(number),
        stops_(stop_tokens(tokenizer, options)),
        decoder_(tokenizer),
        until_(options.stop_strings) {}

  bool goes_on() const { return goes_on_; }

  void add(const Choice& choice) {
    const std::int32_t token = choice.token;
    if (std::find(stops_.begin(), stops_.end(), token) != stops_.end()) {
      end(Finish::kStopToken);
      return;
    }
    result_.tokens.push_back(token);
    if (options_.logprobs) {
      result_.logprobs.push_back(choice.logprob);
      result_.top.push_back(choice.top);
    }
    give(until_.add(decoder_.put(token)));
    if (!goes_on_) return;
    if (until_.ended()) {
      end(Finish::kStopString);
    } else if (std::ssize(result_.tokens) >= options_.max_tokens) {
      end(Finish::kLength);
    }
  }
  void cancel() {
    if (goes_on_) end(Finish::kCancelled);
  }

  Generated take() { return std::move(result_); }

 private:
  void give(const std::string& text) {
    result_.text += text;
    if (text.empty() || !options_.on_text || options_.on_text(number_, text)) return;
    goes_on_ = false;
    result_.finish = Finish::kCancelled;
  }
  void end(Finish why) {
    give(until_.add(decoder_.end(), true));
    goes_on_ = false;
    result_.finish = why;
  }

  const GenerateOptions& options_;
  std::size_t number_;
  std::vector<std::int32_t> stops_;
  formats::StreamDecoder decoder_;
  TextUntil until_;
  Generated result_;
  bool goes_on_ = true;
};

}  // namespace mlxtape::jobs
