#include "mlxtape/models/state.h"

#include <algorithm>

#include "layer.h"
#include "mlxtape/formats/safetensors.h"
#include "mlxtape/ops/elementwise.h"

namespace mlxtape::models {

namespace {

void check_tokens(std::span<const std::int32_t> tokens, const Model& model, const char* who) {
  for (const std::int32_t token : tokens) {
    if (token < 0 || token >= model.config.plan.vocabulary) {
      throw Error(Errc::kArgument, std::string(who) + ": the token " + std::to_string(token) +
                                       " is not in the model's vocabulary of " +
                                       std::to_string(model.config.plan.vocabulary));
    }
  }
}

}  // namespace

State::State(const Model& model, std::int64_t batch, std::int64_t capacity,
             const StateOptions& options)
    : lengths_(static_cast<std::size_t>(std::max<std::int64_t>(batch, 0))), capacity_(capacity) {
  if (batch < 1 || capacity < 1) {
    throw Error(Errc::kArgument, "state: batch and capacity must be at least 1, got " +
                                     std::to_string(batch) + " and " + std::to_string(capacity));
  }
  for (const LayerPlan& layer : model.config.plan.layers) {
    caches_.push_back(
        make_cache(layer, batch, capacity, model.dtype(), &model.device(), options.rings, places_));
  }
}

std::size_t State::bytes_of(const ModelPlan& plan, DType dtype, std::int64_t batch,
                            std::int64_t capacity, const StateOptions& options) {
  std::size_t sum = 0;
  RingPlaces none;
  for (const LayerPlan& layer : plan.layers) {
    sum +=
        models::bytes_of(make_cache(layer, batch, capacity, dtype, nullptr, options.rings, none));
  }
  return sum;
}

template <class Function>
void State::each(const Function& function) const {
  for (std::size_t l = 0; l < caches_.size(); ++l) {
    each_tensor(caches_[l], [&](const char* what, const Tensor& t) {
      function("layers." + std::to_string(l) + "." + what, caches_[l], t);
    });
  }
}

bool State::forgets() const { return std::all_of(caches_.begin(), caches_.end(), models::forgets); }

std::size_t State::place(std::int64_t sequence) const {
  if (sequence < 0 || sequence >= batch()) {
    throw Error(Errc::kArgument, "state: sequence must be from 0 to " +
                                     std::to_string(batch() - 1) + ", got " +
                                     std::to_string(sequence));
  }
  return static_cast<std::size_t>(sequence);
}

std::int64_t State::length(std::int64_t sequence) const { return lengths_[place(sequence)]; }

std::size_t State::bytes() const {
  std::size_t sum = 0;
  for (const Cache& cache : caches_) sum += models::bytes_of(cache);
  return sum;
}

void State::grow(CommandEncoder& encoder, std::int64_t capacity) {
  if (capacity < capacity_) {
    throw Error(Errc::kArgument, "state: can grow to " + std::to_string(capacity_) +
                                     " tokens or more, not to " + std::to_string(capacity));
  }
  const std::int64_t used = *std::max_element(lengths_.begin(), lengths_.end());
  // Each on its own, so that no more than one layer is there twice. Where there is no room for one, those before it have
  // more than the capacity, which is no harm.
  places_ = {};  // no one needs those of the capacity before
  for (Cache& cache : caches_) models::grow(encoder, cache, used, capacity, places_);
  capacity_ = capacity;
}

void State::trim(CommandEncoder& encoder, std::int64_t sequence, std::int64_t length) {
  std::int64_t& now = lengths_[place(sequence)];
  if (length < 0 || length > now) {
    throw Error(Errc::kArgument, "state: can be trimmed to 0 to " + std::to_string(now) +
                                     " tokens, not to " + std::to_string(length));
  }
  for (const Cache& cache : caches_) expect_trim(cache, now, length);
  now = length;
  if (length != 0) return;
  for (const Cache& cache : caches_) clear(encoder, part_of(cache, sequence));
}

State State::snapshot(CommandEncoder& encoder) const {
  State copy = *this;
  for (Cache& cache : copy.caches_) cache = copy_of(encoder, cache);
  return copy;
}

void State::restore(CommandEncoder& encoder, const State& from) {
  std::vector<Tensor> theirs, ours;
  from.each([&](const std::string&, const Cache&, const Tensor& t) { theirs.push_back(t); });
  each([&](const std::string&, const Cache&, const Tensor& t) { ours.push_back(t); });
  const auto alike = [](const Tensor& a, const Tensor& b) {
    return a.shape() == b.shape() && a.dtype() == b.dtype();
  };
  if (!std::equal(ours.begin(), ours.end(), theirs.begin(), theirs.end(), alike)) {
    throw Error(Errc::kShape,
                "state: only a snapshot of the same model, batch and capacity can be "
                "restored");
  }
  for (std::size_t i = 0; i < ours.size(); ++i) encoder.copy(theirs[i], ours[i]);
  lengths_ = from.lengths_;
}

State::Mark State::mark(CommandEncoder& encoder, std::int64_t sequence) const {
  Mark mark{length(sequence), {}};
  for (const Cache& cache : caches_) {
    if (is_marked(cache)) mark.caches.push_back(copy_of(encoder, part_of(cache, sequence)));
  }
  return mark;
}

void State::rewind(CommandEncoder& encoder, std::int64_t sequence, const Mark& to) {
  std::int64_t& now = lengths_[place(sequence)];
  const auto kept =
      static_cast<std::size_t>(std::count_if(caches_.begin(), caches_.end(), is_marked));
  if (to.length < 0 || to.length > now || to.caches.size() != kept) {
    throw Error(Errc::kArgument,
                "state: a mark must be this sequence's own, of " + std::to_string(kept) +
                    " delta nets and windows and at most " + std::to_string(now) + " tokens, got " +
                    std::to_string(to.caches.size()) + " and " + std::to_string(to.length));
  }
  std::size_t at = 0;
  for (const Cache& cache : caches_) {
    if (is_marked(cache)) copy_into(encoder, to.caches[at++], part_of(cache, sequence));
  }
  now = to.length;
}

void State::save(const std::string& path) const {
  const std::int64_t used = *std::max_element(lengths_.begin(), lengths_.end());
  std::vector<formats::NamedTensor> tensors;
  each([&](const std::string& name, const Cache& cache, const Tensor& t) {
    tensors.push_back({name, used_of(cache, t, used)});
  });
  std::string lengths;
  for (const std::int64_t length : lengths_) {
    lengths += (lengths.empty() ? "" : " ") + std::to_string(length);
  }
  formats::write_safetensors(path, tensors, {{"format", "mlxtape state"}, {"lengths", lengths}});
}

State State::load(const Model& model, const std::string& path, std::int64_t capacity,
                  const StateOptions& options) {
  const formats::SafetensorsFile file(path);
  std::vector<std::int64_t> lengths;
  for (const auto& [key, value] : file.metadata()) {
    if (key != "lengths") continue;
    for (std::size_t at = 0; at < value.size();) {
      std::size_t used = 0;
      try {
        lengths.push_back(std::stoll(value.substr(at), &used));
      } catch (const std::exception&) {
        throw Error(Errc::kIo,
                    path + ": lengths of a state must be numbers, got \"" + value + "\"");
      }
      at += used;
    }
  }
  if (lengths.empty()) throw Error(Errc::kIo, path + ": not a saved state: it has no lengths");
  const auto [least, most] = std::minmax_element(lengths.begin(), lengths.end());
  if (*least < 0 || *most > capacity) {
    throw Error(Errc::kIo, path + ": has sequences of " + std::to_string(*least) + " to " +
                               std::to_string(*most) + " tokens, the capacity is " +
                               std::to_string(capacity));
  }
  State state(model, static_cast<std::int64_t>(lengths.size()), capacity, options);
  std::size_t count = 0;
  state.each([&](const std::string&, const Cache&, const Tensor&) { ++count; });
  if (file.names().size() != count) {
    throw Error(Errc::kIo, path + ": has " + std::to_string(file.names().size()) +
                               " tensors, this model's states have " + std::to_string(count));
  }
  const auto encoder = model.device().make_encoder();
  const std::int64_t used = *most;
  state.each([&](const std::string& name, const Cache& cache, const Tensor& t) {
    const Tensor to = used_of(cache, t, used);
    const Tensor from = file.tensor(name);
    if (!(from.shape() == to.shape()) || from.dtype() != to.dtype()) {
      throw Error(Errc::kIo, path + ": " + name + " must be " + to_string(to.shape()) + " " +
                                 name_of(to.dtype()) + " for this model, got " +
                                 to_string(from.shape()) + " " + name_of(from.dtype()));
    }
    encoder->copy(encoder->place(from), to);
  });
  encoder->commit_and_wait();
  state.lengths_ = std::move(lengths);
  return state;
}

// Reads tokens of one sequence.
class Reader {
 public:
  Reader(CommandEncoder& encoder, const Model& model, State& state, std::int64_t sequence)
      : encoder_(encoder), model_(model), state_(state), sequence_(sequence) {}

  // What the layers gave for the last token.
  Stream read(std::span<const std::int32_t> tokens, std::int64_t chunk,
              const std::function<void(std::int64_t)>& progress, const TokenRows& rows) {
    std::int64_t& length = state_.lengths_[state_.place(sequence_)];
    const auto count = static_cast<std::int64_t>(tokens.size());
    if (count == 0 || chunk < 1) {
      throw Error(Errc::kArgument,
                  "prefill: there must be at least one token, and chunks of at least one");
    }
    if (length + count > state_.capacity_) {
      throw Error(Errc::kArgument,
                  "prefill: " + std::to_string(length) + " tokens and " + std::to_string(count) +
                      " more do not fit into a capacity of " + std::to_string(state_.capacity_));
    }
    check_tokens(tokens, model_, "prefill");
    Stream last;
    for (std::int64_t at = 0; at < count; at += chunk) {
      const std::int64_t n = std::min(chunk, count - at);
      last = run(tokens.subspan(static_cast<std::size_t>(at), static_cast<std::size_t>(n)), at,
                 length, progress, rows);
      length += n;
    }
    return last;
  }

 private:
  // After `at` tokens of the call, and `start` of the sequence.
  Stream run(std::span<const std::int32_t> tokens, std::int64_t at, std::int64_t start,
             const std::function<void(std::int64_t)>& progress, const TokenRows& rows) {
    const auto n = static_cast<std::int64_t>(tokens.size());
    const auto layers = static_cast<std::int64_t>(state_.caches_.size());
    Tape tape(encoder_);
    const Tensor ids = encoder_.empty({1, n}, DType::kI32);
    encoder_.upload(tokens.data(), tokens.size_bytes(), ids);
    Stream stream = run_embedding(tape, model_, ids);
    for (std::int64_t l = 0; l < layers; ++l) {
      const Past past{nn::Mode::kPrefill,
                      part_of(state_.caches_[static_cast<std::size_t>(l)], sequence_), start};
      stream = run_layer(tape, model_, l, stream, past);
      if (progress) progress(at + n * (l + 1) / layers);
    }
    if (rows) rows(run_norm(tape, model_, stream).reshape({n, model_.config.plan.width}));
    const auto row = [&](const Tensor& t) {
      return encoder_.contiguous(t.slice(1, n - 1, n));
    };
    return {row(stream.more), row(stream.h)};
  }

  CommandEncoder& encoder_;
  const Model& model_;
  State& state_;
  std::int64_t sequence_;
};

Tensor prefill(CommandEncoder& encoder, const Model& model, State& state, std::int64_t sequence,
               std::span<const std::int32_t> tokens, std::int64_t chunk,
               const std::function<void(std::int64_t)>& progress, const TokenRows& rows) {
  const Stream last = Reader(encoder, model, state, sequence).read(tokens, chunk, progress, rows);
  Tape tape(encoder);
  const Tensor row = logits(tape, model, run_norm(tape, model, last));
  return ops::cast(encoder, row, DType::kF32).reshape({model.config.plan.vocabulary});
}

void read_on(CommandEncoder& encoder, const Model& model, State& state, std::int64_t sequence,
             std::span<const std::int32_t> tokens, std::int64_t chunk,
             const std::function<void(std::int64_t)>& progress, const TokenRows& rows) {
  Reader(encoder, model, state, sequence).read(tokens, chunk, progress, rows);
}

Tensor decode(CommandEncoder& encoder, const Model& model, State& state, const Tensor& ids,
              const Tensor& lengths) {
  Tape tape(encoder);
  const std::int64_t batch = state.batch();
  Stream stream = run_embedding(tape, model, ids.reshape({batch, 1}));
  for (std::size_t l = 0; l < state.caches_.size(); ++l) {
    const Past past{nn::Mode::kStep, state.caches_[l], 0, lengths};
    stream = run_layer(tape, model, static_cast<std::int64_t>(l), stream, past);
  }
  return logits(tape, model, run_norm(tape, model, stream))
      .reshape({batch, model.config.plan.vocabulary});
}

void State::advance(std::int64_t sequence, std::int64_t tokens) {
  std::int64_t& length = lengths_[place(sequence)];
  if (tokens < 0 || length + tokens > capacity_) {
    throw Error(Errc::kArgument, "state: a sequence of " + std::to_string(length) +
                                     " tokens in a capacity of " + std::to_string(capacity_) +
                                     " cannot have " + std::to_string(tokens) + " more");
  }
  length += tokens;
}

struct Stepper::Impl {
  CommandEncoder& encoder;
  const Model& model;
  State& state;
  Tensor inputs;  // [2, B]: tokens, lengths
  Tensor logits;
  std::unique_ptr<Graph> graph;

  void run() {
    const std::int64_t batch = state.batch();
    const Tensor last = decode(encoder, model, state, inputs.slice(0, 0, 1).reshape({batch}),
                               inputs.slice(0, 1, 2).reshape({batch}));
    logits = ops::cast(encoder, last, DType::kF32);
  }
};

Stepper::Stepper(CommandEncoder& encoder, const Model& model, State& state)
    : impl_(new Impl{
          encoder, model, state, encoder.zeros({2, state.batch()}, DType::kI32), {}, nullptr}) {}
Stepper::~Stepper() = default;

const Tensor& Stepper::step(std::span<const std::int32_t> tokens) {
  Impl& s = *impl_;
  const auto batch = static_cast<std::size_t>(s.state.batch());
  if (tokens.size() != batch) {
    throw Error(Errc::kArgument, "step: there must be one token for each of " +
                                     std::to_string(batch) + " sequences, got " +
                                     std::to_string(tokens.size()));
  }
  check_tokens(tokens, s.model, "step");
  std::vector<std::int32_t> inputs(tokens.begin(), tokens.end());
  for (const std::int64_t length : s.state.lengths_) {
    if (length >= s.state.capacity_) {
      throw Error(Errc::kArgument, "step: the state's capacity of " +
                                       std::to_string(s.state.capacity_) + " tokens is used up");
    }
    inputs.push_back(static_cast<std::int32_t>(length));
  }
  if (s.graph == nullptr) {
    s.graph = capture(s.encoder, [&] { s.run(); });
  }
  s.encoder.upload(inputs.data(), inputs.size() * sizeof(std::int32_t), s.inputs);
  s.encoder.replay(*s.graph);
  for (std::int64_t& length : s.state.lengths_) ++length;
  return s.logits;
}

}  // namespace mlxtape::models
