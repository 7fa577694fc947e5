#include "mlxtape/jobs/engine.h"

#include <algorithm>
#include <array>
#include <optional>
#include <span>
#include <string>
#include <tuple>

#include "head.h"
#include "mlxtape/jobs/not_finite.h"
#include "mlxtape/ops/elementwise.h"

namespace mlxtape::jobs {

namespace {

enum class Phase : std::uint8_t { kFree, kReading, kRunning };

struct Slot {
  Phase phase = Phase::kFree;
  Request request;
  std::uint64_t order = 0;         // of admission
  std::vector<std::int32_t> past;  // the tokens that the state has read
  models::State::Mark mark;        // none where its length is 0
  std::int64_t kept = 0;
  std::int32_t last = 0;  // chosen, and not read yet
};

std::int64_t common_prefix(const std::vector<std::int32_t>& a, const std::vector<std::int32_t>& b) {
  return std::mismatch(a.begin(), a.end(), b.begin(), b.end()).first - a.begin();
}

Error wrong(const std::string& what) { return {Errc::kArgument, "engine: " + what}; }

}  // namespace

struct Engine::Impl {
  Impl(CommandEncoder& e, const models::Model& m, const EngineOptions& o)
      : encoder(e), model(m), options(o) {
    if (options.slots < 1) throw wrong("slots must be at least 1, got " + std::to_string(o.slots));
    if (options.prefill_chunk < 1) options.prefill_chunk = 1;
    if (options.context == 0) options.context = model.config.plan.max_positions;
    slots.resize(static_cast<std::size_t>(options.slots));
  }

  Slot& at(std::int64_t slot) {
    if (slot < 0 || slot >= options.slots) {
      throw wrong("a slot must be from 0 to " + std::to_string(options.slots - 1) + ", got " +
                  std::to_string(slot));
    }
    return slots[static_cast<std::size_t>(slot)];
  }

  // How much of a prompt needs not be read again in this slot. Its last token always is: the answer begins with what comes
  // after it.
  std::int64_t usable(const Slot& slot, const std::vector<std::int32_t>& prompt) const {
    const std::int64_t most = std::ssize(prompt) - 1;
    const std::int64_t common = std::min(common_prefix(slot.past, prompt), most);
    if (common == std::ssize(slot.past) || (state && state->forgets())) return common;
    return slot.mark.length <= common ? slot.mark.length : 0;
  }

  std::int64_t admit(Request request);
  void go_back(std::int64_t index, std::int64_t kept);
  void make_room(std::int64_t tokens, std::int64_t more);
  void put_settings(std::int64_t index);
  std::vector<Choice> step();
  std::vector<Choice> read(std::int64_t index);
  std::vector<Choice> run();
  void capture_step();
  Choice chosen(std::int64_t index, std::size_t row);
  void fetch(const ops::Sampled& sampled);
  void forget();

  CommandEncoder& encoder;
  const models::Model& model;
  EngineOptions options;
  std::vector<Slot> slots;
  std::uint64_t admitted = 0;
  bool beyond = false;  // the model's positions

  std::optional<models::State> state;
  ops::SampleRows rows;  // of all slots
  Tensor ids;            // [slots] i32: what the next step reads
  std::unique_ptr<Graph> graph;
  ops::Sampled sampled;  // by the graph
  std::int64_t biases = 0;

  // What the host fetched last.
  std::vector<std::int32_t> tokens, top_ids;
  std::vector<float> logprobs, top_logprobs;
};

std::int64_t Engine::Impl::admit(Request request) {
  check_prompt("engine", model, request.prompt);
  require(sampling_check(request.sampling));
  const std::int64_t length = std::ssize(request.prompt);
  if (length < 1 || length >= options.context) {
    throw wrong("a prompt must have 1 to " + std::to_string(options.context - 1) + " tokens, got " +
                std::to_string(length));
  }
  std::int64_t best = -1, most = -1;
  for (std::int64_t s = 0; s < options.slots; ++s) {
    const Slot& slot = slots[static_cast<std::size_t>(s)];
    if (slot.phase != Phase::kFree) continue;
    const std::int64_t fits = usable(slot, request.prompt);
    if (fits > most) {
      best = s;
      most = fits;
    }
  }
  if (best < 0) throw wrong("all " + std::to_string(options.slots) + " slots are taken");
  Slot& slot = at(best);
  go_back(best, most);
  slot.request = std::move(request);
  slot.phase = Phase::kReading;
  slot.order = admitted++;
  slot.kept = most;
  return best;
}

// Leaves the first `kept` tokens of a slot's past.
void Engine::Impl::go_back(std::int64_t index, std::int64_t kept) {
  Slot& slot = at(index);
  if (kept < std::ssize(slot.past)) {
    if (state->forgets()) {
      state->trim(encoder, index, kept);
    } else if (kept > 0) {
      state->rewind(encoder, index, slot.mark);
    } else {
      state->trim(encoder, index, 0);
    }
    slot.past.resize(static_cast<std::size_t>(kept));
  }
  if (slot.mark.length > kept) slot.mark = {};
}

// For so many tokens of a sequence, and for some more as long as that is within the context.
void Engine::Impl::make_room(std::int64_t needed, std::int64_t more) {
  const std::int64_t positions = model.config.plan.max_positions;
  if (!beyond && needed > positions) {
    beyond = true;
    if (options.on_beyond) options.on_beyond(needed, positions);
  }
  const std::int64_t most = std::max(options.context, needed);
  const std::int64_t before = state ? state->capacity() : 0;
  if (before >= needed) return;
  graph.reset();
  if (!state) {
    state.emplace(model, options.slots, std::max(needed, std::min(most, needed + more)));
    rows.numbers = encoder.zeros({options.slots, ops::kSampleNumbers}, DType::kF32);
    rows.whole = encoder.zeros({options.slots, ops::kSampleWhole}, DType::kI32);
    rows.lengths = encoder.full({options.slots}, DType::kI32, 1);
    ids = encoder.zeros({options.slots}, DType::kI32);
  } else {
    state->grow(encoder, std::max(needed, std::min(most, 2 * before)));
  }
  // One more than the state: the last token is chosen, but not read.
  const Tensor history = encoder.zeros({options.slots, state->capacity() + 1}, DType::kI32);
  if (rows.history.defined()) {
    encoder.copy(rows.history, history.slice(1, 0, rows.history.dim(1)));
  }
  rows.history = history;
}

// A slot's row of what the sampling op reads.
void Engine::Impl::put_settings(std::int64_t index) {
  const Slot& slot = at(index);
  const std::vector<std::int32_t>& prompt = slot.request.prompt;
  const SamplingOptions& sampling = slot.request.sampling;
  const auto row = [&](const Tensor& t) {
    return t.slice(0, index, index + 1);
  };
  const auto put = [&](const auto& values, const Tensor& to) {
    encoder.upload(values.data(), to.bytes(), to);
  };
  std::array<float, ops::kSampleNumbers> numbers{};
  std::array<std::int32_t, ops::kSampleWhole> whole{};
  ops::SampleRow settings = sampling;
  settings.start = std::ssize(prompt);
  ops::put_sample_row(settings, numbers, whole);
  put(numbers, row(rows.numbers));
  put(whole, row(rows.whole));
  put(prompt, row(rows.history).slice(1, 0, std::ssize(prompt)).reshape({std::ssize(prompt)}));
  put(std::array{static_cast<std::int32_t>(prompt.size())}, row(rows.lengths));

  const auto wanted = std::ssize(sampling.logit_bias);
  if (wanted > biases) {  // room for all slots; those before have none there
    const auto wider = [&](const Tensor& from, const Tensor& to) {
      if (from.defined()) encoder.copy(from, to.slice(1, 0, from.dim(1)));
      return to;
    };
    rows.bias_ids = wider(rows.bias_ids, encoder.full({options.slots, wanted}, DType::kI32, -1));
    rows.bias = wider(rows.bias, encoder.zeros({options.slots, wanted}, DType::kF32));
    biases = wanted;
    graph.reset();
  }
  if (biases == 0) return;
  std::vector<std::int32_t> tokens_of(static_cast<std::size_t>(biases), -1);
  std::vector<float> bias_of(static_cast<std::size_t>(biases));
  for (std::size_t i = 0; i < sampling.logit_bias.size(); ++i) {
    std::tie(tokens_of[i], bias_of[i]) = sampling.logit_bias[i];
  }
  put(tokens_of, row(rows.bias_ids));
  put(bias_of, row(rows.bias));
}

// What was sampled, to the host.
void Engine::Impl::fetch(const ops::Sampled& from) {
  const auto begin = [&](const Tensor& t) {
    return t.defined() ? encoder.begin_download(t) : nullptr;
  };
  const std::unique_ptr<PendingDownload> pending[] = {
      begin(from.tokens), begin(from.logprobs), begin(from.top_ids), begin(from.top_logprobs)};
  const auto end = [&](std::size_t i, const Tensor& t, auto& values) {
    if (!pending[i]) return;
    using T = typename std::remove_reference_t<decltype(values)>::value_type;
    const T* first = static_cast<const T*>(pending[i]->wait());
    values.assign(first, first + t.size());
  };
  end(0, from.tokens, tokens);
  end(1, from.logprobs, logprobs);
  end(2, from.top_ids, top_ids);
  end(3, from.top_logprobs, top_logprobs);
}

// Row `row` of what was fetched, for a slot.
Choice Engine::Impl::chosen(std::int64_t index, std::size_t row) {
  Choice choice{index, tokens[row]};
  at(index).last = choice.token;
  if (choice.token < 0) {
    throw NotFinite(
        "sampling: the logits have no largest finite number: the model's weights or its input are "
        "broken");
  }
  if (!options.logprobs) return choice;
  choice.logprob = logprobs[row];
  for (std::size_t i = row * ops::kSampleTop; i < (row + 1) * ops::kSampleTop; ++i) {
    if (top_ids[i] >= 0) choice.top.emplace_back(top_ids[i], top_logprobs[i]);
  }
  return choice;
}

std::vector<Choice> Engine::Impl::read(std::int64_t index) {
  Slot& slot = at(index);
  const std::vector<std::int32_t>& prompt = slot.request.prompt;
  const std::int64_t length = std::ssize(prompt);
  make_room(length, options.first_room);
  const std::int64_t from = std::ssize(slot.past);
  const std::int64_t mark_at = std::min(slot.request.mark_at, length - 1);
  // A chunk ends at the mark.
  std::int64_t to = std::min(length, from + options.prefill_chunk);
  if (from < mark_at) to = std::min(to, mark_at);
  const bool at_mark = from == mark_at && mark_at > 0 && slot.mark.length != mark_at;
  if (at_mark && !state->forgets()) slot.mark = state->mark(encoder, index);
  const auto part = std::span(prompt).subspan(static_cast<std::size_t>(from),
                                              static_cast<std::size_t>(to - from));
  const auto progress = [&](std::int64_t done) {
    if (options.on_read) options.on_read(index, from - slot.kept + done, length - slot.kept);
  };
  if (to < length) {
    models::read_on(encoder, model, *state, index, part, options.prefill_chunk, progress);
    slot.past.insert(slot.past.end(), part.begin(), part.end());
    return {};
  }
  const Tensor logits =
      models::prefill(encoder, model, *state, index, part, options.prefill_chunk, progress);
  slot.past.insert(slot.past.end(), part.begin(), part.end());
  put_settings(index);
  const auto row = [&](const Tensor& t) {
    return t.defined() ? t.slice(0, index, index + 1) : t;
  };
  const ops::SampleRows own{row(rows.numbers), row(rows.whole),    row(rows.history),
                            row(rows.lengths), row(rows.bias_ids), row(rows.bias)};
  const ops::Sampled first = ops::sample(encoder, logits.reshape({1, model.config.plan.vocabulary}),
                                         own, {options.logprobs, options.logprobs, true});
  encoder.copy(first.tokens, row(ids));
  fetch(first);
  slot.phase = Phase::kRunning;
  return {chosen(index, 0)};
}

void Engine::Impl::capture_step() {
  const Tensor one = encoder.full({options.slots}, DType::kI32, 1);
  graph = capture(encoder, [&] {
    // The token chosen last is not read yet.
    const Tensor read_before = ops::subtract(encoder, rows.lengths, one);
    const Tensor logits = models::decode(encoder, model, *state, ids, read_before);
    sampled = ops::sample(encoder, logits, rows, {options.logprobs, options.logprobs, true});
    encoder.copy(sampled.tokens, ids);
  });
}

std::vector<Choice> Engine::Impl::run() {
  std::int64_t longest = 0;
  for (const Slot& slot : slots) {
    if (slot.phase == Phase::kRunning) longest = std::max(longest, std::ssize(slot.past) + 1);
  }
  if (longest > options.context) {
    throw wrong("a sequence has as many tokens as the context, " + std::to_string(options.context) +
                ": cancel it before");
  }
  make_room(longest, 0);
  for (std::int64_t s = 0; s < options.slots; ++s) {
    Slot& slot = at(s);
    if (slot.phase != Phase::kFree || slot.past.empty()) continue;
    go_back(s, 0);  // the step goes on with it as with all others
    const std::int32_t none = 1;
    encoder.upload(&none, sizeof none, rows.lengths.slice(0, s, s + 1));
  }
  if (!graph) capture_step();
  encoder.replay(*graph);
  fetch(sampled);
  std::vector<Choice> choices;
  for (std::int64_t s = 0; s < options.slots; ++s) {
    Slot& slot = at(s);
    if (slot.phase != Phase::kRunning) continue;
    slot.past.push_back(slot.last);
    state->advance(s);
    choices.push_back(chosen(s, static_cast<std::size_t>(s)));
  }
  return choices;
}

std::vector<Choice> Engine::Impl::step() {
  std::int64_t next = -1;
  bool running = false;
  for (std::int64_t s = 0; s < options.slots; ++s) {
    const Slot& slot = at(s);
    running = running || slot.phase == Phase::kRunning;
    if (slot.phase == Phase::kReading && (next < 0 || slot.order < at(next).order)) next = s;
  }
  try {
    if (next >= 0) return read(next);
    return running ? run() : std::vector<Choice>();
  } catch (...) {
    forget();  // half of a step may be in the state
    throw;
  }
}

void Engine::Impl::forget() {
  graph.reset();
  state.reset();
  rows = {};
  ids = {};
  sampled = {};
  biases = 0;
  for (Slot& slot : slots) slot = {};
}

Engine::Engine(CommandEncoder& encoder, const models::Model& model, const EngineOptions& options)
    : impl_(new Impl(encoder, model, options)) {}
Engine::~Engine() = default;

bool Engine::has_free_slot() const {
  return std::any_of(impl_->slots.begin(), impl_->slots.end(),
                     [](const Slot& slot) { return slot.phase == Phase::kFree; });
}
std::int64_t Engine::admit(Request request) { return impl_->admit(std::move(request)); }
std::vector<Choice> Engine::step() { return impl_->step(); }

void Engine::cancel(std::int64_t slot) {
  Slot& own = impl_->at(slot);
  if (own.phase == Phase::kFree) {
    throw wrong("slot " + std::to_string(slot) + " must be taken");
  }
  own.phase = Phase::kFree;
}

void Engine::forget() { impl_->forget(); }

bool Engine::is_busy() const {
  return std::any_of(impl_->slots.begin(), impl_->slots.end(),
                     [](const Slot& slot) { return slot.phase != Phase::kFree; });
}
bool Engine::is_reading() const {
  return std::any_of(impl_->slots.begin(), impl_->slots.end(),
                     [](const Slot& slot) { return slot.phase == Phase::kReading; });
}
std::int64_t Engine::kept(std::int64_t slot) const { return impl_->at(slot).kept; }
std::int64_t Engine::held(std::int64_t slot) const { return std::ssize(impl_->at(slot).past); }
std::int64_t Engine::context() const { return impl_->options.context; }

}  // namespace mlxtape::jobs
