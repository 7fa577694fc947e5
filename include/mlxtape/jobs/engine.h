// Engine: generates several sequences of one model side by side, one token each at a time, sampled on the device; and scores
// prompts.
//
//   Engine engine(*encoder, model, {.slots = 2});
//   const std::int64_t a = engine.admit({tokenizer.encode("The river")});
//   while (engine.is_busy()) {
//     for (const Choice& choice : engine.step()) ...           // choice.slot, choice.token
//     if (enough) engine.cancel(a);
//   }
//
// Slots      A request takes a free slot until it is cancelled. The past of a slot stays there: a later request whose prompt
//            begins with it takes that slot, and only what is new is read. Delta nets cannot forget, so a model that has them
//            continues only from the end of the past or from its mark. A step of other sequences discards an idle slot's past.
// A step     Either one chunk of the prompt that was admitted first among those not read yet; its last chunk gives the first
//            token. Or one token for every running sequence: captured once, then replayed, so that the host sends nothing and
//            gets one number per sequence. While there is work of both kinds they take turns, so a long prompt delays others by
//            one chunk per token; with prompts_first all prompts are read before. Timing plays no part. A sequence's tokens
//            depend on its prompt and settings; on other sequences only as far as kernels round differently for another number
//            of rows.
// Scores     Request::targets asks for log-probabilities within the prompt: targets[i] is scored after prompt[0 .. i], so that
//            {prompt.begin() + 1, prompt.end()} scores the prompt itself. With generate = false the request is then done: it is
//            read no further than the last target, gets no token, and keeps its slot for take_scores until it is cancelled. If
//            it fits in one chunk it uses no state and leaves no past, and runs side by side with the next requests of its kind
//            in the order of admission, as long as all of them, padded to the longest, fit in the chunk. A position that is to
//            be scored is read even if the past holds it. Scores do not change what is generated.
// Memory     All slots have room for as many tokens as the longest needs; the room doubles when it is used up. Scores take the
//            hidden states of one chunk and the logits of score_rows positions. While others run, a half-read prompt of a model
//            with delta nets has a second copy of their states.
// Errors     kArgument: a slot that is not taken, no free slot, settings out of range. kIo: a token outside the vocabulary.
//            Nothing has changed then. NotFinite: logits without a largest finite number. After it, and after any error of a
//            step, all slots are free and without a past. Scores that are not finite are returned as they are.
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
  std::int64_t context = 0;  // maximum tokens per sequence; 0: the model's maximum context length
  std::int64_t first_room = 1024;  // initial capacity after a prompt, in tokens
  std::int64_t prefill_chunk = 2048;
  bool logprobs = false;  // of chosen tokens; and the most likely ones, there and beside scores
  bool prompts_first = false;   // quickest for a batch whose requests are all there at once
  std::int64_t score_rows = 0;  // positions whose logits exist at a time; 0: as many as are quick
  // How much of a slot's prompt was read, of all that is to be read; called as layers are done.
  std::function<void(std::int64_t slot, std::int64_t read, std::int64_t all)> on_read = {};
  // Called once, before a sequence first exceeds the model's maximum context length.
  std::function<void(std::int64_t tokens, std::int64_t positions)> on_beyond = {};
  // For more than scores, such as a comparison with another model. Called with the scored positions of one step, slot by slot
  // in the order of admission, then by position. They must not call this engine. on_hidden: the head's input, [positions,
  // width]; false: no logits and no scores of them.
  std::function<bool(const Tensor& hidden)> on_hidden = {};
  // Positions [start, stop) of those, [stop − start, vocabulary]; the memory is used again afterwards.
  std::function<void(std::int64_t start, std::int64_t stop, const Tensor& logits)> on_logits = {};
};

struct Request {
  std::vector<std::int32_t> prompt;
  SamplingOptions sampling = {};
  // A later prompt is likely to begin with this many tokens of this one: a mark is made there. 0: none.
  std::int64_t mark_at = 0;
  std::vector<std::int32_t> targets = {};  // at most one per prompt token; -1: none here
  bool generate = true;                    // false: only score; needs a target
};

struct Choice {
  std::int64_t slot = 0;
  std::int32_t token = 0;
  float logprob = 0;  // with EngineOptions::logprobs: the model's own, before penalties and bias
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
  // Scores of the slot's request, or its last one, that came since the previous call; by position.
  std::vector<Score> take_scores(std::int64_t slot);
  void cancel(std::int64_t slot);  // the sequence ends; its past stays
  void forget();                   // every sequence, every past and their memory

  bool is_busy() const;     // is there anything to be done in a step?
  bool is_reading() const;  // is any prompt not read yet?
  // Of the prompt of the request that has the slot, or had it last: tokens that were in its past already.
  std::int64_t kept(std::int64_t slot) const;
  std::int64_t held(std::int64_t slot) const;  // tokens in its cache
  std::int64_t context() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace mlxtape::jobs
