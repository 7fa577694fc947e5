// Talk: turns of a user and a model by its chat template. What the model has read stays in its state: of each turn only
// what is new is read.
//
//   Talk talk(*encoder, model, tokenizer, options);
//   const Reply reply = talk.say("What is the capital of Peru?");
//   reply.answer.text;
//
// A template may write earlier turns otherwise than they were said (thinking left out, spaces trimmed), and an answer's text
// may fall into other tokens than the model chose. What the model reads is always the template's text of all turns, as if
// nothing were kept: as far as that is what the state holds it is used, and the rest is read anew: attention forgets single
// tokens; delta nets go back to where the last question ended, or to the beginning.
// Memory     the state's, for twice as many tokens whenever there is no more room.
// Errors     without a chat template: kArgument. A turn that fails leaves the talk as it was.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "mlxtape/jobs/generate.h"

namespace mlxtape::jobs {

struct TalkOptions {
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

class GrowingState;

class Talk {
 public:
  // encoder, model and tokenizer must outlive it.
  Talk(CommandEncoder& encoder, const models::Model& model, const formats::Tokenizer& tokenizer,
       TalkOptions options);
  ~Talk();

  Reply say(const std::string& text);
  void reset();  // nothing was said

  const formats::Json& messages() const { return messages_; }  // as the template gets them
  std::int64_t tokens() const { return static_cast<std::int64_t>(held_.size()); }  // in the state

 private:
  std::vector<std::int32_t> encode(const formats::Json& messages, bool ask) const;
  void forget();  // what the state holds
  std::int64_t go_back(std::int64_t common);
  void answer(const std::vector<std::int32_t>& prompt, std::int64_t stable,
              const GenerateOptions& options, Reply& reply);

  CommandEncoder& encoder_;
  const models::Model& model_;
  const formats::Tokenizer& tokenizer_;
  TalkOptions options_;
  formats::Json messages_;
  std::unique_ptr<GrowingState> past_;
  std::vector<std::int32_t> held_;  // the tokens that the state has read
  models::State::Mark mark_;        // where the last question ended
  std::uint64_t turn_ = 0;
};

}  // namespace mlxtape::jobs
