#include "mlxtape/jobs/engine.h"

#include <algorithm>
#include <optional>
#include <span>
#include <string>
#include <utility>

#include "engine_slot.h"
#include "head.h"
#include "mlxtape/ops/elementwise.h"
#include "prompt_scorer.h"
#include "slot_sampler.h"

namespace mlxtape::jobs {

namespace {

Error wrong(const std::string& what) { return {Errc::kArgument, "engine: " + what}; }

}  // namespace

struct Engine::Impl {
  Impl(CommandEncoder& e, const models::Model& m, const EngineOptions& o)
      : encoder(e), model(m), options(o), scorer(e, m, options) {
    if (options.slots < 1) throw wrong("slots must be at least 1, got " + std::to_string(o.slots));
    if (options.score_rows < 0) {
      throw wrong("score_rows must be at least 0, got " + std::to_string(o.score_rows));
    }
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

  // How much of a prompt needs not be read again in this slot. Positions to be scored always are, and so is the last token of
  // a prompt to go on from: the answer begins with what comes after it.
  std::int64_t usable(const Slot& slot, const Request& request) const {
    const std::vector<std::int32_t>& prompt = request.prompt;
    std::int64_t most = std::ssize(prompt) - 1;
    if (const ScoredRange of = scored_range(request); of.end > 0) most = std::min(most, of.first);
    const std::int64_t common = std::min(common_prefix(slot.past, prompt), most);
    if (common == std::ssize(slot.past) || (state && state->forgets())) return common;
    return slot.mark.length <= common ? slot.mark.length : 0;
  }

  void check(const Request& request) const;
  std::int64_t admit(Request request);
  void go_back(std::int64_t index, std::int64_t kept);
  void expect_tokens(std::int64_t tokens);
  void make_room(std::int64_t tokens, std::int64_t more);
  void park(std::int64_t index);
  void unpark(std::int64_t index);
  std::vector<Choice> step();
  std::vector<Choice> read(std::int64_t index);
  void score(const Tensor& hidden, const std::vector<ScoredRow>& wanted);
  void score_together(std::int64_t first);
  std::vector<Choice> run();
  void capture_step();
  Choice chosen(std::int64_t index, std::size_t row);
  void forget();

  CommandEncoder& encoder;
  const models::Model& model;
  EngineOptions options;
  PromptScorer scorer;
  std::vector<Slot> slots;
  std::uint64_t admitted = 0;
  bool beyond = false;     // the model's positions
  bool read_last = false;  // the last step was a chunk of a prompt

  std::optional<models::State> state;
  std::optional<SlotSampler> sampler;  // as long as the state
  std::unique_ptr<Graph> graph;
};

void Engine::Impl::check(const Request& request) const {
  check_prompt("engine", model, request.prompt);
  check_targets("engine", model, request.targets);
  require(sampling_check(request.sampling));
  const std::int64_t length = std::ssize(request.prompt);
  const std::int64_t most = options.context - (request.generate ? 1 : 0);
  if (length < 1 || length > most) {
    throw wrong("a prompt must have 1 to " + std::to_string(most) + " tokens, got " +
                std::to_string(length));
  }
  if (std::ssize(request.targets) > length) {
    throw wrong("a prompt of " + std::to_string(length) +
                " tokens must have at most as many targets, got " +
                std::to_string(request.targets.size()));
  }
  if (read_length(request) == 0) {
    throw wrong("a request that generates nothing must have a target, got none");
  }
}

std::int64_t Engine::Impl::admit(Request request) {
  check(request);
  // The slot whose past is of most use, and of equals the one that loses least.
  std::int64_t best = -1, most = -1, least = 0;
  for (std::int64_t s = 0; s < options.slots; ++s) {
    const Slot& slot = slots[static_cast<std::size_t>(s)];
    if (slot.phase != Phase::kFree) continue;
    const std::int64_t fits = usable(slot, request);
    const std::int64_t lost = std::ssize(slot.past) - fits;
    if (fits < most || (fits == most && lost >= least)) continue;
    best = s;
    most = fits;
    least = lost;
  }
  if (best < 0) throw wrong("all " + std::to_string(options.slots) + " slots are in use");
  Slot& slot = at(best);
  go_back(best, most);
  slot.request = std::move(request);
  slot.phase = Phase::kReading;
  slot.order = admitted++;
  slot.kept = most;
  slot.stateless =
      !slot.request.generate && most == 0 && read_length(slot.request) <= options.prefill_chunk;
  slot.scores.clear();
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

// A sequence is about to have so many tokens.
void Engine::Impl::expect_tokens(std::int64_t tokens) {
  const std::int64_t positions = model.config.plan.max_positions;
  if (beyond || tokens <= positions) return;
  beyond = true;
  if (options.on_beyond) options.on_beyond(tokens, positions);
}

// For so many tokens of a sequence, and for some more as long as that is within the context.
void Engine::Impl::make_room(std::int64_t needed, std::int64_t more) {
  expect_tokens(needed);
  const std::int64_t most = std::max(options.context, needed);
  const std::int64_t before = state ? state->capacity() : 0;
  if (before >= needed) return;
  graph.reset();
  if (!state) {
    state.emplace(model, options.slots, std::max(needed, std::min(most, needed + more)));
    sampler.emplace(encoder, options.slots, options.logprobs);
  } else {
    state->grow(encoder, std::max(needed, std::min(most, 2 * before)));
  }
  // One more than the state: the last token is chosen, but not read.
  sampler->make_room(state->capacity() + 1);
}

// A step runs all slots. One whose prompt is half read must come out of it unharmed: what the step appends lies behind its
// past, where the next chunk writes over it; delta nets' states are copied.
void Engine::Impl::park(std::int64_t index) {
  Slot& slot = at(index);
  if (slot.parked || slot.past.empty()) return;
  if (!state->forgets()) slot.aside = state->mark(encoder, index);
  sampler->set_length(index, std::ssize(slot.past) + 1);
  slot.parked = true;
}

void Engine::Impl::unpark(std::int64_t index) {
  Slot& slot = at(index);
  if (!slot.parked) return;
  if (!state->forgets()) state->rewind(encoder, index, slot.aside);
  slot.aside = {};
  slot.parked = false;
}

// What the step chose, or a prompt's last chunk.
Choice Engine::Impl::chosen(std::int64_t index, std::size_t row) {
  Choice choice = sampler->choice(index, row);
  at(index).last = choice.token;
  return choice;
}

void Engine::Impl::score(const Tensor& hidden, const std::vector<ScoredRow>& wanted) {
  std::vector<Score> scores = scorer.score(hidden, wanted);
  for (std::size_t i = 0; i < scores.size(); ++i) {
    at(wanted[i].slot).scores.push_back(std::move(scores[i]));
  }
}

// Prompts that are only scored, side by side.
void Engine::Impl::score_together(std::int64_t first) {
  std::vector<std::int64_t> waiting, together;
  for (std::int64_t s = 0; s < options.slots; ++s) {
    if (at(s).phase == Phase::kReading && at(s).order >= at(first).order) waiting.push_back(s);
  }
  std::sort(waiting.begin(), waiting.end(),
            [&](std::int64_t a, std::int64_t b) { return at(a).order < at(b).order; });
  std::int64_t longest = 0;
  for (const std::int64_t s : waiting) {
    const std::int64_t length = std::max(longest, read_length(at(s).request));
    const std::int64_t rows = std::ssize(together) + 1;
    if (!at(s).stateless || rows * length > options.prefill_chunk) break;
    together.push_back(s);
    longest = length;
  }
  expect_tokens(longest);
  Batch batch;
  batch.rows = std::ssize(together);
  batch.length = longest;
  std::vector<ScoredRow> wanted;
  for (const std::int64_t s : together) {
    const Request& request = at(s).request;
    const std::int64_t row = std::ssize(batch.tokens), length = read_length(request);
    batch.tokens.insert(batch.tokens.end(), request.prompt.begin(),
                        request.prompt.begin() + length);
    batch.tokens.resize(static_cast<std::size_t>(row + longest));  // no token sees those after it
    for (std::int64_t t = 0; t < length; ++t) {
      const std::int32_t target = request.targets[static_cast<std::size_t>(t)];
      if (target >= 0) wanted.push_back({s, row + t, t, target});
    }
  }
  score(hidden_rows(encoder, model, upload_tokens(encoder, batch)), wanted);
  for (const std::int64_t s : together) {
    at(s).phase = Phase::kScored;
    const std::int64_t length = read_length(at(s).request);
    if (options.on_read) options.on_read(s, length, length);
  }
}

std::vector<Choice> Engine::Impl::read(std::int64_t index) {
  Slot& slot = at(index);
  if (slot.stateless) {
    score_together(index);
    return {};
  }
  const Request& request = slot.request;
  const std::int64_t length = read_length(request);
  make_room(length, request.generate ? options.first_room : 0);
  unpark(index);
  const std::int64_t from = std::ssize(slot.past);
  const std::int64_t mark_at = std::min(request.mark_at, length - 1);
  // A chunk ends at the mark.
  std::int64_t to = std::min(length, from + options.prefill_chunk);
  if (from < mark_at) to = std::min(to, mark_at);
  const bool at_mark = from == mark_at && mark_at > 0 && slot.mark.length != mark_at;
  if (at_mark && !state->forgets()) slot.mark = state->mark(encoder, index);
  const auto part =
      std::span(request.prompt)
          .subspan(static_cast<std::size_t>(from), static_cast<std::size_t>(to - from));
  const auto progress = [&](std::int64_t done) {
    if (options.on_read) options.on_read(index, from - slot.kept + done, length - slot.kept);
  };
  std::vector<ScoredRow> wanted;
  for (std::int64_t t = from; t < std::min(to, std::ssize(request.targets)); ++t) {
    const std::int32_t target = request.targets[static_cast<std::size_t>(t)];
    if (target >= 0) wanted.push_back({index, t - from, t, target});
  }
  models::TokenRows rows;
  if (!wanted.empty()) {
    rows = [&](const Tensor& hidden) {
      score(hidden, wanted);
    };
  }
  Tensor logits;
  if (to < length || !request.generate) {
    models::read_on(encoder, model, *state, index, part, options.prefill_chunk, progress, rows);
  } else {
    logits =
        models::prefill(encoder, model, *state, index, part, options.prefill_chunk, progress, rows);
  }
  slot.past.insert(slot.past.end(), part.begin(), part.end());
  if (to < length) return {};
  slot.phase = request.generate ? Phase::kRunning : Phase::kScored;
  if (!request.generate) return {};
  if (sampler->put(index, request.prompt, request.sampling)) graph.reset();
  sampler->sample_one(index, logits);
  return {chosen(index, 0)};
}

void Engine::Impl::capture_step() {
  const Tensor one = encoder.full({options.slots}, DType::kI32, 1);
  graph = capture(encoder, [&] {
    // The token chosen last is not read yet.
    const Tensor read_before = ops::subtract(encoder, sampler->lengths(), one);
    sampler->sample_all(models::decode(encoder, model, *state, sampler->ids(), read_before));
  });
}

std::vector<Choice> Engine::Impl::run() {
  std::int64_t longest = 0, room = 0;
  for (const Slot& slot : slots) {
    if (slot.phase == Phase::kRunning) longest = std::max(longest, std::ssize(slot.past) + 1);
    if (slot.phase == Phase::kReading) room = std::max(room, std::ssize(slot.past) + 1);
  }
  if (longest > options.context) {
    throw wrong("a sequence has reached the context length, " + std::to_string(options.context) +
                ": cancel it first");
  }
  make_room(std::max(longest, room), 0);
  for (std::int64_t s = 0; s < options.slots; ++s) {
    Slot& slot = at(s);
    if (slot.phase == Phase::kReading) park(s);
    if (slot.is_busy() || slot.past.empty()) continue;
    go_back(s, 0);  // the step goes on with it as with all others
    sampler->set_length(s, 1);
  }
  if (!graph) capture_step();
  encoder.replay(*graph);
  sampler->fetch();
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
  const bool turn_of_running = running && (next < 0 || (read_last && !options.prompts_first));
  read_last = !turn_of_running;
  try {
    if (turn_of_running) return run();
    return next >= 0 ? read(next) : std::vector<Choice>();
  } catch (...) {
    forget();  // half of a step may be in the state
    throw;
  }
}

void Engine::Impl::forget() {
  graph.reset();
  sampler.reset();
  state.reset();
  read_last = false;
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
std::vector<Score> Engine::take_scores(std::int64_t slot) {
  return std::exchange(impl_->at(slot).scores, {});
}

void Engine::cancel(std::int64_t slot) {
  Slot& own = impl_->at(slot);
  if (own.phase == Phase::kFree) {
    throw wrong("slot " + std::to_string(slot) + " must be in use");
  }
  impl_->unpark(slot);
  own.phase = Phase::kFree;
}

void Engine::forget() { impl_->forget(); }

bool Engine::is_busy() const {
  return std::any_of(impl_->slots.begin(), impl_->slots.end(),
                     [](const Slot& slot) { return slot.is_busy(); });
}
bool Engine::is_reading() const {
  return std::any_of(impl_->slots.begin(), impl_->slots.end(),
                     [](const Slot& slot) { return slot.phase == Phase::kReading; });
}
std::int64_t Engine::kept(std::int64_t slot) const { return impl_->at(slot).kept; }
std::int64_t Engine::held(std::int64_t slot) const { return std::ssize(impl_->at(slot).past); }
std::int64_t Engine::context() const { return impl_->options.context; }

}  // namespace mlxtape::jobs
