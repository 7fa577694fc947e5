// State: what a model remembers of B sequences: keys and values of every token, or of as many as a layer's window sees, and
// of delta nets a state of fixed size.
//
// Sequences are filled one by one (prefill), each to its own length, then decoded together (step). A step is the same work
// whatever the lengths, so that it can be captured once and replayed (Stepper).
// Memory     allocated once, with capacity for that many tokens per sequence; updated in place, also by restore, so that graphs
//            stay valid. Only grow reallocates, layer by layer: no Stepper may outlive it.
#pragma once

#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "mlxtape/models/cache.h"
#include "mlxtape/models/model.h"

namespace mlxtape::models {

struct StateOptions {
  // Layers with a window keep the keys and values of that many tokens alone. Without, those of all tokens, so that any of
  // the last ones can be forgotten.
  bool rings = true;
};

class State {
 public:
  State(const Model& model, std::int64_t batch, std::int64_t capacity,
        const StateOptions& options = {});
  // Neither copied, which would share the memory (snapshot), nor assigned, which would leave a Stepper behind (restore).
  State(State&&) = default;
  State& operator=(const State&) = delete;
  State& operator=(State&&) = delete;

  std::int64_t batch() const { return static_cast<std::int64_t>(lengths_.size()); }
  std::int64_t capacity() const { return capacity_; }
  std::int64_t length(std::int64_t sequence) const;  // tokens so far
  std::size_t bytes() const;
  // The bytes that a state would need.
  static std::size_t bytes_of(const ModelPlan& plan, DType dtype, std::int64_t batch,
                              std::int64_t capacity, const StateOptions& options = {});

  // After a step in which decode was captured: adds this many tokens to a sequence.
  void advance(std::int64_t sequence, std::int64_t tokens = 1);

  // Increases the capacity; the contents stay.
  void grow(CommandEncoder& encoder, std::int64_t capacity);

  // Can single tokens be forgotten, however many come? A delta net cannot, nor a window once it is full.
  bool forgets() const;
  // Leaves the first tokens of a sequence; where that cannot be, 0 or all of them: kArgument, with the reason.
  void trim(CommandEncoder& encoder, std::int64_t sequence, std::int64_t length);

  // Makes a copy, and copies it back into a state of the same sizes.
  State snapshot(CommandEncoder& encoder) const;
  void restore(CommandEncoder& encoder, const State& from);

  // Where to come back to in one sequence: what delta nets and windows hold there. Other keys and values are still in the
  // state, so it is small, and good as long as the sequence has not been trimmed, rewound or restored to fewer tokens meanwhile.
  struct Mark {
    std::int64_t length = 0;
    std::vector<Cache> caches;  // copies of those that later tokens overwrite
  };
  Mark mark(CommandEncoder& encoder, std::int64_t sequence) const;
  void rewind(CommandEncoder& encoder, std::int64_t sequence, const Mark& to);

  // A safetensors file of the part in use; load checks it against the model.
  void save(const std::string& path) const;
  static State load(const Model& model, const std::string& path, std::int64_t capacity,
                    const StateOptions& options = {});

 private:
  State(const State&) = default;
  friend class Reader;
  friend Tensor decode(CommandEncoder&, const Model&, State&, const Tensor&, const Tensor&);
  friend class Stepper;
  std::size_t place(std::int64_t sequence) const;  // checked
  template <class Function>
  void each(const Function& function) const;  // (name, cache, tensor)

  RingPlaces places_;
  std::vector<Cache> caches_;  // one for each layer
  std::vector<std::int64_t> lengths_;
  std::int64_t capacity_ = 0;
};

// Tokens must be in the vocabulary: prefill and step throw kArgument.

// Called with what the head takes of every token of a chunk, [tokens, width].
using TokenRows = std::function<void(const Tensor& rows)>;

// The next tokens of one sequence, chunk of them at a time; the logits [vocabulary] f32 after the last. progress is called
// after every layer with how many tokens that work amounts to so far; on a GPU the work may still be queued.
Tensor prefill(CommandEncoder& encoder, const Model& model, State& state, std::int64_t sequence,
               std::span<const std::int32_t> tokens, std::int64_t chunk = 2048,
               const std::function<void(std::int64_t tokens)>& progress = {},
               const TokenRows& rows = {});
// The same without the logits, of a prompt that goes on after them.
void read_on(CommandEncoder& encoder, const Model& model, State& state, std::int64_t sequence,
             std::span<const std::int32_t> tokens, std::int64_t chunk = 2048,
             const std::function<void(std::int64_t tokens)>& progress = {},
             const TokenRows& rows = {});

// Decodes one token for every sequence, in a step that is captured: ids and lengths [B] i32 are on the device and not checked;
// lengths, not the state, gives the number of tokens before. Returns the logits [B, vocabulary], of the model's type.
Tensor decode(CommandEncoder& encoder, const Model& model, State& state, const Tensor& ids,
              const Tensor& lengths);

// Decodes one token for every sequence per step. The first step is captured, later ones replay it.
class Stepper {
 public:
  Stepper(CommandEncoder& encoder, const Model& model, State& state);  // all must outlive it
  ~Stepper();
  // tokens: one per sequence. Returns the logits [B, vocabulary] f32, valid until the next step.
  const Tensor& step(std::span<const std::int32_t> tokens);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace mlxtape::models
