#include "mlxtape/jobs/talk.h"

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

Talk::Talk(CommandEncoder& encoder, const models::Model& model, const formats::Tokenizer& tokenizer,
           TalkOptions options)
    : encoder_(encoder), model_(model), tokenizer_(tokenizer), options_(std::move(options)) {
  if (tokenizer.chat_template() == nullptr) {
    throw Error(Errc::kArgument, "talk: the model must have a chat template, and has none");
  }
  if (options_.max_context == 0) options_.max_context = model.config.plan.max_positions;
  if (options_.generate.max_tokens < 1 || options_.max_context < 1 || options_.first_room < 1) {
    throw Error(Errc::kArgument, "talk: max_tokens, max_context and first_room must be at least 1");
  }
  require(sampling_check(options_.generate.sampling));
  past_ =
      std::make_unique<GrowingState>(encoder_, model_, 1, options_.max_context, options_.generate);
  reset();
}

Talk::~Talk() = default;

void Talk::reset() {
  messages_ = Json::Array{};
  if (!options_.system.empty()) messages_.array().push_back(message("system", options_.system));
  forget();
}

void Talk::forget() {
  past_->drop();
  held_.clear();
  mark_ = {};
}

std::vector<std::int32_t> Talk::encode(const Json& messages, bool ask) const {
  formats::ChatOptions chat;
  chat.add_generation_prompt = ask;
  chat.variables = options_.variables;
  return tokenizer_.encode_chat(messages, chat);
}

// Leaves at most the first `common` tokens in the state; returns how many.
std::int64_t Talk::go_back(std::int64_t common) {
  if (common < tokens()) {
    if (past_->state().forgets()) {
      past_->state().trim(encoder_, 0, common);
    } else if (mark_.length <= common && mark_.length > 0) {
      past_->state().rewind(encoder_, 0, mark_);
    } else {
      past_->state().trim(encoder_, 0, 0);
      mark_ = {};
    }
  }
  held_.resize(static_cast<std::size_t>(past_->state().length(0)));
  return past_->state().length(0);
}

Reply Talk::say(const std::string& text) {
  Json messages = messages_;
  messages.array().push_back(message("user", text));
  const std::vector<std::int32_t> prompt = encode(messages, true);
  check_prompt("talk", model_, prompt);
  // How the answer is asked for may go when it becomes an earlier turn: what comes before is sure to stay.
  const std::int64_t stable = common_prefix(encode(messages, false), prompt);
  const auto length = static_cast<std::int64_t>(prompt.size());
  if (length == 0 || length >= options_.max_context) {
    throw Error(Errc::kArgument, "talk: all turns together must have 1 to " +
                                     std::to_string(options_.max_context - 1) + " tokens, got " +
                                     std::to_string(length) + ": begin anew, or allow for more");
  }
  GenerateOptions options = options_.generate;
  options.max_tokens = std::min(options.max_tokens, options_.max_context - length);
  encoder_.device().memory().reset_peak();
  Reply reply;
  try {
    past_->make_room(length, options_.first_room);
    answer(prompt, stable, options, reply);
  } catch (...) {
    forget();  // half of a turn may be in the state
    throw;
  }
  reply.peak_bytes = encoder_.device().memory().stats().peak;
  messages.array().push_back(message("assistant", reply.answer.text));
  messages_ = std::move(messages);
  ++turn_;
  return reply;
}

void Talk::answer(const std::vector<std::int32_t>& prompt, std::int64_t stable,
                  const GenerateOptions& options, Reply& reply) {
  auto start = std::chrono::steady_clock::now();
  const auto length = static_cast<std::int64_t>(prompt.size());
  // The last token is always read: the answer begins with what comes after it.
  reply.kept = go_back(std::min(common_prefix(held_, prompt), length - 1));
  reply.read = length - reply.kept;
  ReadSoFar so_far{0, reply.read};
  Sequence sequence(tokenizer_, prompt, options, 0, turn_);
  const auto read_to = [&](std::int64_t end) {
    const auto all = std::span(prompt);
    const auto from = static_cast<std::size_t>(past_->state().length(0));
    const auto last =
        read(encoder_, model_, past_->state(), 0,
             all.subspan(from, static_cast<std::size_t>(end) - from), options, so_far);
    held_.assign(prompt.begin(), prompt.begin() + past_->state().length(0));
    return last;
  };
  const std::int64_t marked = std::clamp(stable, reply.kept, length - 1);
  if (marked > reply.kept) read_to(marked);
  std::optional<Tensor> logits;
  if (past_->state().length(0) == marked) {
    mark_ = past_->state().mark(encoder_, 0);
    logits = read_to(length);
  }
  if (!logits) {
    sequence.cancel();
    reply.answer = sequence.take();
    return;
  }
  std::vector<float> row(static_cast<std::size_t>(model_.config.plan.vocabulary));
  const std::vector<std::int32_t> stops = stop_tokens(tokenizer_, options);
  encoder_.download(*logits, row.data(), logits->bytes());
  sequence.choose(row, stops);
  reply.read_seconds = seconds_since(start);
  start = std::chrono::steady_clock::now();
  while (sequence.goes_on()) {
    if (asked_to_stop(options)) {
      sequence.cancel();
      break;
    }
    const std::int32_t token = sequence.last();
    const Tensor& next = past_->step({&token, 1});
    held_.push_back(token);
    encoder_.download(next, row.data(), next.bytes());
    sequence.choose(row, stops);
  }
  reply.answer = sequence.take();
  reply.seconds = seconds_since(start);
}

}  // namespace mlxtape::jobs
