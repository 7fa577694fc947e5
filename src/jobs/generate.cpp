#include "mlxtape/jobs/generate.h"

#include <algorithm>
#include <chrono>

#include "head.h"
#include "mix.h"
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
  GenerateReport report;
  std::int64_t longest = 0;
  std::vector<std::int64_t> before;  // tokens of the prompts before each
  for (const auto& prompt : prompts) {
    before.push_back(report.prompt_tokens);
    longest = std::max(longest, std::ssize(prompt));
    report.prompt_tokens += std::ssize(prompt);
  }
  EngineOptions how;
  how.slots = std::ssize(prompts);
  how.context = longest + options.max_tokens;
  how.first_room = std::max(longest, kFirstRoom);
  how.prefill_chunk = options.prefill_chunk;
  how.logprobs = options.logprobs;
  how.prompts_first = true;
  how.on_beyond = options.on_beyond;
  how.on_read = [&](std::int64_t slot, std::int64_t read, std::int64_t) {
    if (options.on_read)
      options.on_read(before[static_cast<std::size_t>(slot)] + read, report.prompt_tokens);
  };
  Engine engine(encoder, model, how);
  std::vector<Sequence> sequences;
  for (std::size_t b = 0; b < prompts.size(); ++b) {
    sequences.emplace_back(tokenizer, options, b);
    SamplingOptions sampling = options.sampling;
    sampling.seed = mixed(mixed(sampling.seed) ^ b);
    engine.admit({prompts[b], sampling});  // slots are given in order
  }
  auto start = std::chrono::steady_clock::now();
  bool reading = true;
  while (engine.is_busy()) {
    if (asked_to_stop(options)) {
      for (Sequence& sequence : sequences) sequence.cancel();
      break;
    }
    for (const Choice& choice : engine.step()) {
      Sequence& sequence = sequences[static_cast<std::size_t>(choice.slot)];
      sequence.add(choice);
      if (!sequence.goes_on()) engine.cancel(choice.slot);
    }
    if (reading && !engine.is_reading()) {
      reading = false;
      report.prompt_seconds = seconds_since(start);
      start = std::chrono::steady_clock::now();
    }
  }
  (reading ? report.prompt_seconds : report.seconds) = seconds_since(start);
  report.peak_bytes = memory.stats().peak;
  for (Sequence& sequence : sequences) {
    report.sequences.push_back(sequence.take());
    report.tokens += std::ssize(report.sequences.back().tokens);
  }
  return report;
}

}  // namespace mlxtape::jobs
