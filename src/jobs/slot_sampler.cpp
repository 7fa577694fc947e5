#include "slot_sampler.h"

#include <array>
#include <tuple>

#include "mlxtape/jobs/not_finite.h"

namespace mlxtape::jobs {

std::vector<std::pair<std::int32_t, float>> top_of(const std::vector<std::int32_t>& ids,
                                                   const std::vector<float>& logprobs,
                                                   std::size_t row) {
  std::vector<std::pair<std::int32_t, float>> top;
  if (ids.empty()) return top;
  for (std::size_t i = row * ops::kSampleTop; i < (row + 1) * ops::kSampleTop; ++i) {
    if (ids[i] >= 0) top.emplace_back(ids[i], logprobs[i]);
  }
  return top;
}

SlotSampler::SlotSampler(CommandEncoder& encoder, std::int64_t slots, bool logprobs)
    : encoder_(encoder), slots_(slots), how_{logprobs, logprobs, true} {
  rows_.numbers = encoder.zeros({slots, ops::kSampleNumbers}, DType::kF32);
  rows_.whole = encoder.zeros({slots, ops::kSampleWhole}, DType::kI32);
  rows_.lengths = encoder.full({slots}, DType::kI32, 1);
  ids_ = encoder.zeros({slots}, DType::kI32);
}

void SlotSampler::make_room(std::int64_t tokens) {
  const Tensor history = encoder_.zeros({slots_, tokens}, DType::kI32);
  if (rows_.history.defined()) {
    encoder_.copy(rows_.history, history.slice(1, 0, rows_.history.dim(1)));
  }
  rows_.history = history;
}

ops::SampleRows SlotSampler::row_of(std::int64_t slot) const {
  const auto row = [&](const Tensor& t) {
    return t.defined() ? t.slice(0, slot, slot + 1) : t;
  };
  return {row(rows_.numbers), row(rows_.whole),    row(rows_.history),
          row(rows_.lengths), row(rows_.bias_ids), row(rows_.bias)};
}

bool SlotSampler::put(std::int64_t slot, const std::vector<std::int32_t>& prompt,
                      const SamplingOptions& sampling) {
  const auto put = [&](const auto& values, const Tensor& to) {
    encoder_.upload(values.data(), to.bytes(), to);
  };
  std::array<float, ops::kSampleNumbers> numbers{};
  std::array<std::int32_t, ops::kSampleWhole> whole{};
  ops::SampleRow settings = static_cast<const ops::SampleRow&>(sampling);
  settings.start = std::ssize(prompt);
  ops::put_sample_row(settings, numbers, whole);
  ops::SampleRows own = row_of(slot);
  put(numbers, own.numbers);
  put(whole, own.whole);
  put(prompt, own.history.slice(1, 0, std::ssize(prompt)).reshape({std::ssize(prompt)}));
  set_length(slot, std::ssize(prompt));

  const auto wanted = std::ssize(sampling.logit_bias);
  const bool grows = wanted > biases_;
  if (grows) {  // for all slots; the earlier ones use none of the new room
    const auto wider = [&](const Tensor& from, const Tensor& to) {
      if (from.defined()) encoder_.copy(from, to.slice(1, 0, from.dim(1)));
      return to;
    };
    rows_.bias_ids = wider(rows_.bias_ids, encoder_.full({slots_, wanted}, DType::kI32, -1));
    rows_.bias = wider(rows_.bias, encoder_.zeros({slots_, wanted}, DType::kF32));
    biases_ = wanted;
  }
  if (biases_ == 0) return false;
  std::vector<std::int32_t> tokens_of(static_cast<std::size_t>(biases_), -1);
  std::vector<float> bias_of(static_cast<std::size_t>(biases_));
  for (std::size_t i = 0; i < sampling.logit_bias.size(); ++i) {
    std::tie(tokens_of[i], bias_of[i]) = sampling.logit_bias[i];
  }
  own = row_of(slot);
  put(tokens_of, own.bias_ids);
  put(bias_of, own.bias);
  return grows;
}

void SlotSampler::set_length(std::int64_t slot, std::int64_t tokens) {
  const auto length = static_cast<std::int32_t>(tokens);
  encoder_.upload(&length, sizeof length, rows_.lengths.slice(0, slot, slot + 1));
}

void SlotSampler::sample_one(std::int64_t slot, const Tensor& logits) {
  const ops::Sampled first =
      ops::sample(encoder_, logits.reshape({1, logits.size()}), row_of(slot), how_);
  encoder_.copy(first.tokens, ids_.slice(0, slot, slot + 1));
  fetch(first);
}

void SlotSampler::sample_all(const Tensor& logits) {
  sampled_ = ops::sample(encoder_, logits, rows_, how_);
  encoder_.copy(sampled_.tokens, ids_);
}

void SlotSampler::fetch(const ops::Sampled& from) {
  Fetched<std::int32_t> tokens(encoder_, from.tokens), top_ids(encoder_, from.top_ids);
  Fetched<float> logprobs(encoder_, from.logprobs), top_logprobs(encoder_, from.top_logprobs);
  tokens_ = tokens.wait();
  logprobs_ = logprobs.wait();
  top_ids_ = top_ids.wait();
  top_logprobs_ = top_logprobs.wait();
}

Choice SlotSampler::choice(std::int64_t slot, std::size_t row) const {
  Choice choice{slot, tokens_[row]};
  if (choice.token < 0) {
    throw NotFinite(
        "sampling: the logits have no largest finite number: the model's weights or its input are "
        "broken");
  }
  if (how_.logprobs) choice.logprob = logprobs_[row];
  choice.top = top_of(top_ids_, top_logprobs_, row);
  return choice;
}

}  // namespace mlxtape::jobs
