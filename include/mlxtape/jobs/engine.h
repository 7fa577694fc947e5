// Engine: sequences of one model side by side, a token each at a time, chosen on the device. Prompts can be scored as well.
//
//   Engine engine(*encoder, model, {.slots = 2});
//   const std::int64_t a = engine.admit({tokenizer.encode("The river")});
//   while (engine.is_busy()) {
//     for (const Choice& choice : engine.step()) ...           // choice.slot, choice.token
//     if (enough) engine.cancel(a);
//   }
//
// Slots      A request takes a free slot until it is cancelled. The past of a slot stays there: a later request whose prompt
//            begins with it takes that slot, and only what is new is read. Where the model has delta nets, which cannot forget,
//            that is so from the end of the past or from its mark. A step of other sequences takes an idle slot's past away.
// A step     Either a chunk of the prompt that was admitted first of those not read, whose last chunk gives the first token; or
//            one token more for every running sequence: captured once, replayed after, so that the host sends nothing and gets
//            one number a sequence. While both are to be done they take turns, so that a long prompt holds up the others by one
//            chunk a token; with prompts_first all prompts come before. Nothing but the calls decides which it is. A sequence's
//            choices depend on its prompt and its settings; on other sequences beside it only as far as kernels round otherwise
//            for another number of rows.
// Scores     Request::targets asks for log-probabilities in the prompt: score i is that of targets[i] after prompt[0 .. i].
//            {prompt.begin() + 1, prompt.end()} are the prompt's own tokens. A request with generate = false ends there: it
//            reads no further than the last target, gets no token, and its slot waits for take_scores and cancel. If it fits
//            one chunk it needs no state and leaves no past; those that follow it in the order of admission and are like it
//            run side by side with it, as rows of one batch, as long as their tokens, padded to the longest, fit the chunk.
//            Positions to be scored are always read, never taken from a past. Choices do not change by scoring.
// Memory     of all slots for as many tokens as the longest has, and for twice as many whenever there is no more room. Of
//            scores the hidden states of one chunk, and the logits of score_rows positions. Each slot that has delta nets and
//            whose prompt is half read has a copy of their states while others run.
// Errors     A slot that is not taken, no free slot: kArgument; a token outside of the vocabulary: kIo. Nothing was changed then.
//            Logits without a largest finite number: NotFinite. After it, and after any error of a step, all slots are free and
//            without a past. Scores that are not finite are given as they are.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "mlxtape/jobs/sampling.h"
#include "mlxtape/models/state.h"

namespace mlxtape::jobs {

struct EngineOptions {
  std::int64_t slots = 1;
  std::int64_t context = 0;  // most tokens of a sequence; 0: as many positions as the model has
  std::int64_t first_room = 1024;  // tokens after a prompt that there is room for at first
  std::int64_t prefill_chunk = 2048;
  bool logprobs =
      false;  // of the tokens chosen, and of the most likely ones, there and beside scores
  // Read all prompts before any sequence goes on: quickest for a batch whose requests are all there at once.
  bool prompts_first = false;
  std::int64_t score_rows =
      0;  // logits of so many scored positions at a time; 0: as many as are quick
  // How much of a slot's prompt was read, of all that is to be read; called as layers are done.
  std::function<void(std::int64_t slot, std::int64_t read, std::int64_t all)> on_read = {};
  // Once, before a sequence first has more tokens than the model has positions.
  std::function<void(std::int64_t tokens, std::int64_t positions)> on_beyond = {};
  // For what scores alone do not tell, such as a comparison with another model. Called with tensors of the scored positions
  // of one step, slot by slot in the order of admission and in each by position. Neither may call the engine.
  // What the head takes, [positions, width]; the answer false leaves out their logits and scores.
  std::function<bool(const Tensor& hidden)> on_hidden = {};
  // Logits of positions [start, stop) of those, [stop − start, vocabulary]; their memory is used again afterwards.
  std::function<void(std::int64_t start, std::int64_t stop, const Tensor& logits)> on_logits = {};
};

struct Request {
  std::vector<std::int32_t> prompt;
  SamplingOptions sampling = {};
  // A later prompt is likely to begin with so many tokens of this one: a mark is left there. 0: none.
  std::int64_t mark_at = 0;
  std::vector<std::int32_t> targets =
      {};  // to be scored, at most as many as the prompt has tokens; -1: not this position
  bool generate = true;  // false: nothing is generated, there must be a target
};

struct Choice {
  std::int64_t slot = 0;
  std::int32_t token = 0;
  float logprob =
      0;  // with EngineOptions::logprobs, as the model said it: before penalties and bias
  std::vector<std::pair<std::int32_t, float>> top = {};  // the 20 most likely, likewise
};

// The log-probability of `token` after prompt[0 .. at], as the model said it.
struct Score {
  std::int64_t at = 0;
  std::int32_t token = 0;
  float logprob = 0;
  std::vector<std::pair<std::int32_t, float>> top = {};  // with EngineOptions::logprobs
};

class Engine {
 public:
  // encoder and model must outlive it.
  Engine(CommandEncoder& encoder, const models::Model& model, const EngineOptions& options);
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  bool has_free_slot() const;
  std::int64_t admit(Request request);  // the slot
  std::vector<Choice> step();           // none where nothing is to be done
  // What was scored of the prompt of the request that has the slot, or had it last, since the last call; by position.
  std::vector<Score> take_scores(std::int64_t slot);
  void cancel(std::int64_t slot);  // the sequence ends; its past stays
  void forget();                   // every sequence, every past and their memory

  bool is_busy() const;     // is there anything to be done in a step?
  bool is_reading() const;  // is any prompt not read yet?
  // Of the prompt of the request that has the slot, or had it last: tokens that were in its past already.
  std::int64_t kept(std::int64_t slot) const;
  std::int64_t held(std::int64_t slot) const;  // tokens of its past
  std::int64_t context() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace mlxtape::jobs
