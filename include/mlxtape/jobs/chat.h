// ChatSession: a conversation between a user and a model, formatted by its chat template. The cache is kept between turns:
// each turn processes only the new tokens.
//
//   ChatSession chat(*encoder, model, tokenizer, settings);
//   const Reply reply = chat.say("What is the capital of Peru?");
//   reply.answer.text;
//
// A template may render earlier turns differently from how they were generated (thinking dropped, spaces trimmed), and an
// answer's text may be tokenised differently from how the model generated it. The model always sees the tokens of the rendered
// conversation, as if nothing were cached: the longest prefix that the cache holds is reused (jobs/engine.h), the rest is
// processed again.
// Errors     no chat template: kArgument. A turn that fails leaves the session unchanged.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "mlxtape/jobs/generate.h"

namespace mlxtape::jobs {

struct ChatSettings {
  GenerateOptions generate;        // of each answer; on_text's sequence is 0
  std::string system;              // system prompt; empty: none
  formats::Json variables;         // extra template variables: {"enable_thinking": false}
  std::int64_t max_context = 0;    // tokens of all turns; 0: the model's maximum context length
  std::int64_t first_room = 4096;  // initial capacity after the first question, in tokens
};

struct Reply {
  Generated answer;
  std::int64_t kept = 0, read = 0;  // tokens of the prompt: already cached, and processed now
  double read_seconds = 0, seconds = 0;
  std::size_t peak_bytes = 0;  // of the device's memory, since this turn began
};

class ChatSession {
 public:
  // encoder, model and tokenizer must outlive it.
  ChatSession(CommandEncoder& encoder, const models::Model& model,
              const formats::Tokenizer& tokenizer, ChatSettings options);
  ~ChatSession();

  Reply say(const std::string& text);
  void reset();  // starts a new conversation

  const formats::Json& messages() const { return messages_; }  // as passed to the template
  std::int64_t tokens() const;                                 // in the cache

 private:
  std::vector<std::int32_t> encode(const formats::Json& messages, bool ask) const;
  void answer(const std::vector<std::int32_t>& prompt, std::int64_t stable,
              const GenerateOptions& options, Reply& reply);

  CommandEncoder& encoder_;
  const models::Model& model_;
  const formats::Tokenizer& tokenizer_;
  ChatSettings options_;
  formats::Json messages_;
  std::unique_ptr<Engine> engine_;  // with one slot
};

}  // namespace mlxtape::jobs
