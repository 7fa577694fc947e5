#include "mlxtape/jobs/generate.h"

#include <algorithm>
#include <chrono>
#include <memory>

namespace mlxtape::jobs {

namespace {

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

// One of the sequences: what it has said, and whether it goes on.
class Sequence {
 public:
  Sequence(const formats::Tokenizer& tokenizer, const std::vector<std::int32_t>& prompt,
           const GenerateOptions& options, std::size_t number)
      : options_(options),
        number_(number),
        sampler_(options.sampling, number),
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

void check(const models::Model& model, const std::vector<std::vector<std::int32_t>>& prompts,
           const GenerateOptions& options) {
  const auto wrong = [](const std::string& what) {
    throw Error(Errc::kArgument, "generate: " + what);
  };
  if (prompts.empty()) wrong("there must be a prompt");
  if (options.max_tokens < 1 || options.max_tokens > std::int64_t{1} << 31) {
    wrong("max_tokens must be at least 1 and at most 2^31, got " +
          std::to_string(options.max_tokens));
  }
  for (const std::vector<std::int32_t>& prompt : prompts) {
    if (prompt.empty()) wrong("a prompt must have at least one token");
    for (const std::int32_t token : prompt) {
      if (token < 0 || token >= model.config.vocabulary) {
        wrong("the prompt's token " + std::to_string(token) +
              " is not in the model's vocabulary of " + std::to_string(model.config.vocabulary));
      }
    }
  }
}

}  // namespace

const char* name_of(Finish finish) noexcept {
  switch (finish) {
    case Finish::kStopToken: return "stop";
    case Finish::kStopString: return "stop string";
    case Finish::kLength: return "length";
    case Finish::kCancelled: return "cancelled";
  }
  return "";
}

std::string TextUntil::add(std::string_view text, bool last) {
  if (ended_) return "";
  held_ += text;
  std::size_t end = std::string::npos;
  for (const std::string& stop : ends_) {
    if (!stop.empty()) end = std::min(end, held_.find(stop));
  }
  if (end != std::string::npos) {
    ended_ = true;
    return held_.substr(0, end);
  }
  std::size_t keep = 0;  // the longest end of what is held that a stop string begins with
  for (const std::string& stop : ends_) {
    for (std::size_t n = std::min(stop.size(), held_.size() + 1) - (stop.empty() ? 0 : 1); n > keep;
         --n) {
      if (held_.compare(held_.size() - n, n, stop, 0, n) == 0) keep = n;
    }
  }
  if (last) keep = 0;
  const std::string sure = held_.substr(0, held_.size() - keep);
  held_.erase(0, sure.size());
  return sure;
}

GenerateReport generate(CommandEncoder& encoder, const models::Model& model,
                        const formats::Tokenizer& tokenizer,
                        const std::vector<std::vector<std::int32_t>>& prompts,
                        const GenerateOptions& options) {
  check(model, prompts, options);
  MemoryPool& memory = encoder.device().memory();
  memory.reset_peak();
  std::vector<std::int32_t> stops = options.stop_tokens;
  stops.insert(stops.end(), tokenizer.eos_ids().begin(), tokenizer.eos_ids().end());
  std::size_t longest = 0;
  for (const auto& prompt : prompts) longest = std::max(longest, prompt.size());
  models::State state(model, static_cast<std::int64_t>(prompts.size()),
                      static_cast<std::int64_t>(longest) + options.max_tokens);

  GenerateReport report;
  const auto vocabulary = static_cast<std::size_t>(model.config.vocabulary);
  std::vector<float> logits(vocabulary * prompts.size());
  std::vector<Sequence> sequences;
  auto start = std::chrono::steady_clock::now();
  for (std::size_t b = 0; b < prompts.size(); ++b) {
    sequences.emplace_back(tokenizer, prompts[b], options, b);
    const Tensor last = models::prefill(encoder, model, state, static_cast<std::int64_t>(b),
                                        prompts[b], options.prefill_chunk);
    encoder.download(last, logits.data(), last.bytes());
    sequences[b].choose({logits.data(), vocabulary}, stops);
    report.prompt_tokens += static_cast<std::int64_t>(prompts[b].size());
  }
  report.prompt_seconds = seconds_since(start);

  start = std::chrono::steady_clock::now();
  models::Stepper stepper(encoder, model, state);
  std::vector<std::int32_t> tokens(sequences.size());
  const auto goes_on = [](const Sequence& s) {
    return s.goes_on();
  };
  while (std::any_of(sequences.begin(), sequences.end(), goes_on)) {
    for (std::size_t b = 0; b < sequences.size(); ++b) tokens[b] = sequences[b].last();
    const Tensor& next = stepper.step(tokens);
    encoder.download(next, logits.data(), next.bytes());
    for (std::size_t b = 0; b < sequences.size(); ++b) {
      if (sequences[b].goes_on()) {
        sequences[b].choose({logits.data() + b * vocabulary, vocabulary}, stops);
      }
    }
  }
  report.seconds = seconds_since(start);
  report.peak_bytes = memory.stats().peak;
  for (Sequence& sequence : sequences) {
    report.sequences.push_back(sequence.take());
    report.tokens += static_cast<std::int64_t>(report.sequences.back().tokens.size());
  }
  return report;
}

}  // namespace mlxtape::jobs
