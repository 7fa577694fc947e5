// SlotSampler: the engine's side of ops::sample. It keeps one row of settings and history per slot on the device, chooses
// tokens there, and brings what was chosen to the host.
#pragma once

#include <optional>
#include <vector>

#include "mlxtape/jobs/engine.h"

namespace mlxtape::jobs {

class SlotSampler {
 public:
  // logprobs: also compute the log-probabilities of the chosen and of the most likely tokens.
  SlotSampler(CommandEncoder& encoder, std::int64_t slots, bool logprobs);

  // Room for this many tokens per slot; existing history is kept. Graphs of before are stale.
  void make_room(std::int64_t tokens);
  // A slot's settings, and the prompt as its history. True: a tensor grew, so graphs of before are stale.
  bool put(std::int64_t slot, const std::vector<std::int32_t>& prompt,
           const SamplingOptions& sampling);
  // How many tokens a slot is said to have, the one not read yet included.
  void set_length(std::int64_t slot, std::int64_t tokens);

  const Tensor& ids() const { return ids_; }               // [slots] i32: the tokens chosen last
  const Tensor& lengths() const { return rows_.lengths; }  // [slots] i32

  // One token for one slot; logits: [V]. Fetched when this returns, as row 0.
  void sample_one(std::int64_t slot, const Tensor& logits);
  // One for each slot, logits: [slots, V]; may be captured. fetch brings the latest to the host, one row per slot.
  void sample_all(const Tensor& logits);
  void fetch() { fetch(sampled_); }

  // What was fetched in a row. Throws NotFinite if the logits had no largest finite number.
  Choice choice(std::int64_t slot, std::size_t row) const;

 private:
  ops::SampleRows row_of(std::int64_t slot) const;
  void fetch(const ops::Sampled& from);

  CommandEncoder& encoder_;
  std::int64_t slots_, biases_ = 0;
  ops::SampleOptions how_;
  ops::SampleRows rows_;
  Tensor ids_;
  ops::Sampled sampled_;

  // On the host.
  std::vector<std::int32_t> tokens_, top_ids_;
  std::vector<float> logprobs_, top_logprobs_;
};

// Row `row` of the most likely tokens as ops::sample gives them, without the empty places at the end.
std::vector<std::pair<std::int32_t, float>> top_of(const std::vector<std::int32_t>& ids,
                                                   const std::vector<float>& logprobs,
                                                   std::size_t row);

// The contents of a tensor once the device has them; empty if it is not defined.
template <class T>
class Fetched {
 public:
  Fetched(CommandEncoder& encoder, const Tensor& t)
      : size_(t.defined() ? t.size() : 0),
        pending_(t.defined() ? encoder.begin_download(t) : nullptr) {}
  std::vector<T> wait() {
    if (!pending_) return {};
    const T* first = static_cast<const T*>(pending_->wait());
    return {first, first + size_};
  }

 private:
  std::int64_t size_;
  std::unique_ptr<PendingDownload> pending_;
};

}  // namespace mlxtape::jobs
