// Engine: sequences of one model side by side, a token each at a time, chosen on the device.
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
// A step     A chunk of one prompt that was not read, in the order of admission; the last chunk gives the first token. Without
//            any, one token more for every sequence: captured once, replayed after, so that the host sends nothing and gets one
//            number a sequence. A sequence's choices depend on its prompt and its settings; on other sequences beside it only as
//            far as kernels round otherwise for another number of rows.
// Memory     of all slots for as many tokens as the longest has, and for twice as many whenever there is no more room.
// Errors     A slot that is not taken, no free slot: kArgument; a token outside of the vocabulary: kIo. Nothing was changed then.
//            Logits without a largest finite number: NotFinite. After it, and after any error of a step, all slots are free and
//            without a past.
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
  bool logprobs = false;  // of the tokens chosen, and of the most likely ones
  // How much of a slot's prompt was read, of all that is to be read; called as layers are done.
  std::function<void(std::int64_t slot, std::int64_t read, std::int64_t all)> on_read = {};
  // Once, before a sequence first has more tokens than the model has positions.
  std::function<void(std::int64_t tokens, std::int64_t positions)> on_beyond = {};
};

struct Request {
  std::vector<std::int32_t> prompt;
  SamplingOptions sampling = {};
  // A later prompt is likely to begin with so many tokens of this one: a mark is left there. 0: none.
  std::int64_t mark_at = 0;
};

struct Choice {
  std::int64_t slot = 0;
  std::int32_t token = 0;
  float logprob =
      0;  // with EngineOptions::logprobs, as the model said it: before penalties and bias
  std::vector<std::pair<std::int32_t, float>> top = {};  // the 20 most likely, likewise
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
  void cancel(std::int64_t slot);       // the sequence ends; its past stays
  void forget();                        // every sequence, every past and their memory

  bool is_busy() const;     // does any sequence go on?
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
