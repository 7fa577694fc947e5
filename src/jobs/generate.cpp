#include "mlxtape/jobs/generate.h"

#include <algorithm>
#include <chrono>
#include <memory>

#include "head.h"
#include "sequence.h"

namespace mlxtape::jobs {

namespace {

constexpr std::int64_t kFirstRoom = 1024;  // tokens of an answer that there is room for at first

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
    check_prompt("generate", model, prompt);
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
  const std::vector<std::int32_t> stops = stop_tokens(tokenizer, options);
  std::size_t longest = 0;
  ReadSoFar so_far;
  for (const auto& prompt : prompts) {
    longest = std::max(longest, prompt.size());
    so_far.all += static_cast<std::int64_t>(prompt.size());
  }
  const auto read_tokens = static_cast<std::int64_t>(longest);
  GrowingState past(encoder, model, static_cast<std::int64_t>(prompts.size()),
                    read_tokens + options.max_tokens, options);
  past.make_room(read_tokens, std::max(read_tokens, kFirstRoom));

  GenerateReport report;
  const auto vocabulary = static_cast<std::size_t>(model.config.plan.vocabulary);
  std::vector<float> logits(vocabulary * prompts.size());
  std::vector<Sequence> sequences;
  auto start = std::chrono::steady_clock::now();
  for (std::size_t b = 0; b < prompts.size(); ++b) {
    sequences.emplace_back(tokenizer, prompts[b], options, b, b);
    const std::optional<Tensor> last = read(
        encoder, model, past.state(), static_cast<std::int64_t>(b), prompts[b], options, so_far);
    if (!last) {
      sequences[b].cancel();
      continue;
    }
    encoder.download(*last, logits.data(), last->bytes());
    sequences[b].choose({logits.data(), vocabulary}, stops);
    report.prompt_tokens += static_cast<std::int64_t>(prompts[b].size());
  }
  report.prompt_seconds = seconds_since(start);

  start = std::chrono::steady_clock::now();
  std::vector<std::int32_t> tokens(sequences.size());
  const auto goes_on = [](const Sequence& s) {
    return s.goes_on();
  };
  while (std::any_of(sequences.begin(), sequences.end(), goes_on)) {
    if (asked_to_stop(options)) {
      for (Sequence& sequence : sequences) sequence.cancel();
      break;
    }
    for (std::size_t b = 0; b < sequences.size(); ++b) tokens[b] = sequences[b].last();
    const Tensor& next = past.step(tokens);
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
