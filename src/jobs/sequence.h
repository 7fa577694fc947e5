// One text in the making: what it has said, and whether it goes on. Shared by generate and talk.
#pragma once

#include <algorithm>
#include <chrono>
#include <memory>
#include <optional>

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

// How much is to be read in all, and how much of that was read before.
struct ReadSoFar {
  std::int64_t done = 0, all = 0;
};

// prefill, with a look at stop after each chunk: nothing where it said so.
inline std::optional<Tensor> read(CommandEncoder& encoder, const models::Model& model,
                                  models::State& state, std::int64_t sequence,
                                  std::span<const std::int32_t> tokens,
                                  const GenerateOptions& options, ReadSoFar& so_far) {
  const auto chunk = static_cast<std::size_t>(std::max<std::int64_t>(options.prefill_chunk, 1));
  std::optional<Tensor> last;
  for (std::size_t at = 0; at < tokens.size(); at += chunk) {
    if (asked_to_stop(options)) return std::nullopt;
    const auto part = tokens.subspan(at, std::min(chunk, tokens.size() - at));
    last = models::prefill(encoder, model, state, sequence, part, options.prefill_chunk,
                           [&](std::int64_t done) {
                             if (options.on_read) options.on_read(so_far.done + done, so_far.all);
                           });
    so_far.done += static_cast<std::int64_t>(part.size());
  }
  return last;
}

// A state and what steps it: with room for what was read and a little more, and for twice as much whenever that is used
// up. An answer may be much shorter than it is allowed to be.
class GrowingState {
 public:
  // most: tokens that a sequence may have in all; of options on_beyond is used. All must outlive it.
  GrowingState(CommandEncoder& encoder, const models::Model& model, std::int64_t batch,
               std::int64_t most, const GenerateOptions& options)
      : encoder_(encoder), model_(model), batch_(batch), most_(most), options_(options) {}

  models::State& state() { return *state_; }
  void drop() {
    stepper_.reset();
    state_.reset();
  }

  // For so many tokens in all, and for some more as long as that is within most.
  void make_room(std::int64_t tokens, std::int64_t more) {
    if (!beyond_ && tokens > model_.config.plan.max_positions) {
      beyond_ = true;
      if (options_.on_beyond) options_.on_beyond(tokens, model_.config.plan.max_positions);
    }
    if (state_ == nullptr) {
      state_ = std::make_unique<models::State>(model_, batch_,
                                               std::max(tokens, std::min(most_, tokens + more)));
    } else if (state_->capacity() < tokens) {
      stepper_.reset();
      state_->grow(encoder_, std::max(tokens, std::min(most_, 2 * state_->capacity())));
    }
  }

  const Tensor& step(std::span<const std::int32_t> tokens) {
    std::int64_t longest = 0;
    for (std::int64_t b = 0; b < batch_; ++b) longest = std::max(longest, state_->length(b));
    make_room(longest + 1, 0);
    if (stepper_ == nullptr) {
      stepper_ = std::make_unique<models::Stepper>(encoder_, model_, *state_);
    }
    return stepper_->step(tokens);
  }

 private:
  CommandEncoder& encoder_;
  const models::Model& model_;
  std::int64_t batch_, most_;
  const GenerateOptions& options_;
  bool beyond_ = false;  // the model's positions
  std::unique_ptr<models::State> state_;
  std::unique_ptr<models::Stepper> stepper_;
};

class Sequence {
 public:
  // options must outlive it.
  Sequence(const formats::Tokenizer& tokenizer, const std::vector<std::int32_t>& prompt,
           const GenerateOptions& options, std::size_t number, std::uint64_t draw)
      : options_(options),
        number_(number),
        sampler_(options.sampling, draw),
        decoder_(tokenizer),
        until_(options.stop_strings),
        tokens_(prompt) {}

  bool goes_on() const { return goes_on_; }
  std::int32_t last() const { return tokens_.back(); }

  void choose(std::span<float> logits, const std::vector<std::int32_t>& stops) {
    const std::int32_t token = sampler_(logits, tokens_);
    tokens_.push_back(token);
    if (std::find(stops.begin(), stops.end(), token) != stops.end()) {
      end(Finish::kStopToken);
      return;
    }
    result_.tokens.push_back(token);
    give(until_.add(decoder_.put(token)));
    if (!goes_on_) return;
    if (until_.ended()) {
      end(Finish::kStopString);
    } else if (static_cast<std::int64_t>(result_.tokens.size()) >= options_.max_tokens) {
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
  Sampler sampler_;
  formats::StreamDecoder decoder_;
  TextUntil until_;
  std::vector<std::int32_t> tokens_;  // the prompt's and its own
  Generated result_;
  bool goes_on_ = true;
};

}  // namespace mlxtape::jobs
