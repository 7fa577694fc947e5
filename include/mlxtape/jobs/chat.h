// ChatSession: turns of a user and a model by its chat template. The model's past is kept: of each turn only what is new is
// processed.
//
//   ChatSession chat(*encoder, model, tokenizer, settings);
//   const Reply reply = chat.say("What is the capital of Peru?");
//   reply.answer.text;
//
// A template may write earlier turns in another way than they were said (thinking left out, spaces trimmed), and an answer's
// text may fall into other tokens than the model chose. What the model reads is always the template's text of all turns, as if
// nothing were kept: as far as that is what the past holds it is used (jobs/engine.h), and the rest is read again.
// Errors     without a chat template: kArgument. A turn that fails leaves the session as it was.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "mlxtape/jobs/generate.h"

namespace mlxtape::jobs {

struct ChatSettings {
  GenerateOptions generate;        // of each answer; on_text's sequence is 0
  std::string system;              // said before all else; empty: nothing
  formats::Json variables;         // an object for the template: {"enable_thinking": false}
  std::int64_t max_context = 0;    // tokens of all turns; 0: as many positions as the model knows
  std::int64_t first_room = 4096;  // tokens that there is room for after the first question
};

struct Reply {
  Generated answer;
  std::int64_t kept = 0, read = 0;  // of the prompt's tokens: in the state already, and read now
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
  void reset();  // nothing was said

  const formats::Json& messages() const { return messages_; }  // as the template gets them
  std::int64_t tokens() const;                                 // in the state

 private:
  std::vector<std::int32_t> encode(const formats::Json& messages, bool ask) const;
  void answer(const std::vector<std::int32_t>& prompt, std::int64_t stable,
              const GenerateOptions& options, Reply& reply);

  CommandEncoder& encoder_;
  const models::Model& model_;
  const formats::Tokenizer& tokenizer_;
  ChatSettings options_;
  formats::Json messages_;
  std::unique_ptr<Engine> engine_;  // of one slot
};

}  // namespace mlxtape::jobs
