#include "mlxtape/jobs/chat.h"

#include <algorithm>

#include "head.h"
#include "sequence.h"

namespace mlxtape::jobs {

namespace {

using formats::Json;

std::int64_t common_prefix(const std::vector<std::int32_t>& a, const std::vector<std::int32_t>& b) {
  const auto [end, other] = std::mismatch(a.begin(), a.end(), b.begin(), b.end());
  return end - a.begin();
}

Json message(const char* role, const std::string& text) {
  return Json::Object{{"role", role}, {"content", text}};
}

}  // namespace

ChatSession::ChatSession(CommandEncoder& encoder, const models::Model& model,
                         const formats::Tokenizer& tokenizer, ChatSettings options)
    : encoder_(encoder), model_(model), tokenizer_(tokenizer), options_(std::move(options)) {
  if (tokenizer.chat_template() == nullptr) {
    throw Error(Errc::kArgument, "chat: the model must have a chat template, got none");
  }
  if (options_.max_context == 0) options_.max_context = model.config.plan.max_positions;
  if (options_.generate.max_tokens < 1 || options_.max_context < 1 || options_.first_room < 1) {
    throw Error(Errc::kArgument, "chat: max_tokens, max_context and first_room must be at least 1");
  }
  require(sampling_check(options_.generate.sampling));
  EngineOptions how;
  how.context = options_.max_context;
  how.first_room = options_.first_room;
  how.prefill_chunk = options_.generate.prefill_chunk;
  how.logprobs = options_.generate.logprobs;
  how.on_beyond = options_.generate.on_beyond;
  how.on_read = [this](std::int64_t, std::int64_t read, std::int64_t all) {
    if (options_.generate.on_read) options_.generate.on_read(read, all);
  };
  engine_ = std::make_unique<Engine>(encoder_, model_, how);
  reset();
}

ChatSession::~ChatSession() = default;

void ChatSession::reset() {
  messages_ = Json::Array{};
  if (!options_.system.empty()) messages_.array().push_back(message("system", options_.system));
  engine_->forget();
}

std::int64_t ChatSession::tokens() const { return engine_->held(0); }

std::vector<std::int32_t> ChatSession::encode(const Json& messages, bool ask) const {
  formats::ChatOptions chat;
  chat.add_generation_prompt = ask;
  chat.variables = options_.variables;
  return tokenizer_.encode_chat(messages, chat);
}

Reply ChatSession::say(const std::string& text) {
  Json messages = messages_;
  messages.array().push_back(message("user", text));
  const std::vector<std::int32_t> prompt = encode(messages, true);
  check_prompt("chat", model_, prompt);
  // How the answer is asked for may go when it becomes an earlier turn: what comes before is sure to stay.
  const std::int64_t stable = common_prefix(encode(messages, false), prompt);
  const auto length = static_cast<std::int64_t>(prompt.size());
  if (length == 0) {
    throw Error(Errc::kIo, "chat: the model's chat template renders to an empty prompt");
  }
  if (length >= options_.max_context) {
    throw Error(Errc::kArgument, "chat: the whole conversation must have 1 to " +
                                     std::to_string(options_.max_context - 1) + " tokens, got " +
                                     std::to_string(length) +
                                     "; start a new chat, or raise the maximum context");
  }
  GenerateOptions options = options_.generate;
  options.max_tokens = std::min(options.max_tokens, options_.max_context - length);
  encoder_.device().memory().reset_peak();
  Reply reply;
  try {
    answer(prompt, stable, options, reply);
  } catch (...) {
    engine_->forget();  // half of a turn may be in the state
    throw;
  }
  reply.peak_bytes = encoder_.device().memory().stats().peak;
  messages.array().push_back(message("assistant", reply.answer.text));
  messages_ = std::move(messages);
  return reply;
}

void ChatSession::answer(const std::vector<std::int32_t>& prompt, std::int64_t stable,
                         const GenerateOptions& options, Reply& reply) {
  auto start = std::chrono::steady_clock::now();
  Sequence sequence(tokenizer_, options, 0);
  const std::int64_t slot = engine_->admit({prompt, options.sampling, stable});
  reply.kept = engine_->kept(slot);
  reply.read = std::ssize(prompt) - reply.kept;
  while (sequence.goes_on()) {
    if (asked_to_stop(options)) {
      sequence.cancel();
      break;
    }
    const bool reading = engine_->is_reading();
    for (const Choice& choice : engine_->step()) sequence.add(choice);
    if (reading && !engine_->is_reading()) {
      reply.read_seconds = seconds_since(start);
      start = std::chrono::steady_clock::now();
    }
  }
  engine_->cancel(slot);
  reply.answer = sequence.take();
  reply.seconds = seconds_since(start);
}

}  // namespace mlxtape::jobs
