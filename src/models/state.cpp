#include "mlxtape/models/state.h"

#include <algorithm>

#include "layer.h"
#include "mlxtape/formats/safetensors.h"
#include "mlxtape/ops/elementwise.h"

namespace mlxtape::models {

namespace {

// The sequence's part of a tensor [B, …].
Tensor of(const Tensor& t, std::int64_t sequence) { return t.slice(0, sequence, sequence + 1); }

nn::DeltaNetState of(const nn::DeltaNetState& state, std::int64_t sequence) {
  return {of(state.conv, sequence), of(state.rule, sequence)};
}

void check_tokens(std::span<const std::int32_t> tokens, const Model& model, const char* who) {
  for (const std::int32_t token : tokens) {
    if (token < 0 || token >= model.config.vocabulary) {
      throw Error(Errc::kArgument, std::string(who) + ": the token " + std::to_string(token) +
                                       " is not in the model's vocabulary of " +
                                       std::to_string(model.config.vocabulary));
    }
  }
}

struct LayerSizes {
  Shape keys;        // and values; of a layer with attention
  Shape conv, rule;  // of a delta net
};

LayerSizes sizes_of(const Config& c, std::int64_t layer, std::int64_t batch,
                    std::int64_t capacity) {
  if (c.has_attention(layer)) return {{batch, capacity, c.key_heads, c.head_dim}, {}, {}};
  const std::int64_t channels =
      2 * c.linear_key_heads * c.linear_key_dim + c.linear_value_heads * c.linear_value_dim;
  return {{},
          {batch, c.linear_kernel - 1, channels},
          {batch, c.linear_value_heads, c.linear_value_dim, c.linear_key_dim}};
}

std::string layer_name(std::size_t layer, const char* what) {
  return "layers." + std::to_string(layer) + "." + what;
}

}  // namespace

State::State(const Model& model, std::int64_t batch, std::int64_t capacity)
    : lengths_(static_cast<std::size_t>(std::max<std::int64_t>(batch, 0))), capacity_(capacity) {
  if (batch < 1 || capacity < 1) {
    throw Error(Errc::kArgument, "state: batch and capacity must be at least 1, got " +
                                     std::to_string(batch) + " and " + std::to_string(capacity));
  }
  const Config& c = model.config;
  Device& device = model.device();
  for (std::int64_t l = 0; l < c.layers; ++l) {
    Layer layer;
    const LayerSizes sizes = sizes_of(c, l, batch, capacity);
    if (c.has_attention(l)) {
      // Zeros: save writes rows that a short sequence has not.
      layer.keys = device.zeros(sizes.keys, model.dtype());
      layer.values = device.zeros(sizes.keys, model.dtype());
    } else {
      layer.delta.conv = device.zeros(sizes.conv, model.dtype());
      layer.delta.rule = device.zeros(sizes.rule, DType::kF32);
    }
    layers_.push_back(std::move(layer));
  }
}

std::size_t State::bytes_of(const Config& config, DType dtype, std::int64_t batch,
                            std::int64_t capacity) {
  std::size_t sum = 0;
  for (std::int64_t l = 0; l < config.layers; ++l) {
    const LayerSizes sizes = sizes_of(config, l, batch, capacity);
    const auto count = [](const Shape& shape) {
      return static_cast<std::size_t>(element_count(shape).value_or(0));
    };
    sum += config.has_attention(l)
               ? 2 * count(sizes.keys) * size_of(dtype)
               : count(sizes.conv) * size_of(dtype) + count(sizes.rule) * size_of(DType::kF32);
  }
  return sum;
}

template <class Function>
void State::each(const Function& function) const {
  for (std::size_t l = 0; l < layers_.size(); ++l) {
    const Layer& layer = layers_[l];
    if (layer.keys.defined()) {
      function(l, "keys", layer.keys);
      function(l, "values", layer.values);
    } else {
      function(l, "conv", layer.delta.conv);
      function(l, "rule", layer.delta.rule);
    }
  }
}

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
  each([&](std::size_t, const char*, const Tensor& t) { sum += t.bytes(); });
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
  for (Layer& layer : layers_) {
    if (!layer.keys.defined()) continue;
    for (Tensor* t : {&layer.keys, &layer.values}) {
      const Tensor more = encoder.zeros({t->dim(0), capacity, t->dim(2), t->dim(3)}, t->dtype());
      encoder.copy(t->slice(1, 0, used), more.slice(1, 0, used));
      *t = more;
      encoder.commit_and_wait();
    }
  }
  capacity_ = capacity;
}

void State::trim(CommandEncoder& encoder, std::int64_t sequence, std::int64_t length) {
  std::int64_t& now = lengths_[place(sequence)];
  if (length < 0 || length > now) {
    throw Error(Errc::kArgument, "state: can be trimmed to 0 to " + std::to_string(now) +
                                     " tokens, not to " + std::to_string(length));
  }
  const bool forgets = std::all_of(layers_.begin(), layers_.end(),
                                   [](const Layer& layer) { return layer.keys.defined(); });
  if (length != now && length != 0 && !forgets) {
    throw Error(
        Errc::kArgument,
        "state: a delta net cannot forget single tokens: take a snapshot where you may want "
        "to come back to, and restore it");
  }
  now = length;
  if (length != 0 || forgets) return;
  for (const Layer& layer : layers_) {
    if (layer.keys.defined()) continue;
    for (const Tensor& t : {of(layer.delta.conv, sequence), of(layer.delta.rule, sequence)}) {
      encoder.copy(encoder.zeros(t.shape(), t.dtype()), t);
    }
  }
}

State State::snapshot(CommandEncoder& encoder) const {
  State copy = *this;
  for (Layer& layer : copy.layers_) {
    for (Tensor* t : {&layer.keys, &layer.values, &layer.delta.conv, &layer.delta.rule}) {
      if (!t->defined()) continue;
      const Tensor own = encoder.empty_like(*t);
      encoder.copy(*t, own);
      *t = own;
    }
  }
  return copy;
}

void State::restore(CommandEncoder& encoder, const State& from) {
  std::vector<Tensor> theirs, ours;
  from.each([&](std::size_t, const char*, const Tensor& t) { theirs.push_back(t); });
  each([&](std::size_t, const char*, const Tensor& t) { ours.push_back(t); });
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
  const auto own = [&](const Tensor& t) {
    const Tensor copy = encoder.empty(t.shape(), t.dtype());
    encoder.copy(t, copy);
    return copy;
  };
  for (const Layer& layer : layers_) {
    if (layer.keys.defined()) continue;
    const nn::DeltaNetState now = of(layer.delta, sequence);
    mark.delta.push_back({own(now.conv), own(now.rule)});
  }
  return mark;
}

void State::rewind(CommandEncoder& encoder, std::int64_t sequence, const Mark& to) {
  std::int64_t& now = lengths_[place(sequence)];
  const auto nets = static_cast<std::size_t>(std::count_if(
      layers_.begin(), layers_.end(), [](const Layer& layer) { return !layer.keys.defined(); }));
  if (to.length < 0 || to.length > now || to.delta.size() != nets) {
    throw Error(Errc::kArgument,
                "state: a mark must be this sequence's own, of " + std::to_string(nets) +
                    " delta nets and at most " + std::to_string(now) + " tokens, got " +
                    std::to_string(to.delta.size()) + " and " + std::to_string(to.length));
  }
  std::size_t net = 0;
  for (const Layer& layer : layers_) {
    if (layer.keys.defined()) continue;
    const nn::DeltaNetState here = of(layer.delta, sequence);
    encoder.copy(to.delta[net].conv, here.conv);
    encoder.copy(to.delta[net].rule, here.rule);
    ++net;
  }
  now = to.length;
}

void State::save(const std::string& path) const {
  const std::int64_t used = *std::max_element(lengths_.begin(), lengths_.end());
  std::vector<formats::NamedTensor> tensors;
  each([&](std::size_t l, const char* what, const Tensor& t) {
    const bool grows = layers_[l].keys.defined();
    tensors.push_back({layer_name(l, what), grows ? t.slice(1, 0, used) : t});
  });
  std::string lengths;
  for (const std::int64_t length : lengths_) {
    lengths += (lengths.empty() ? "" : " ") + std::to_string(length);
  }
  formats::write_safetensors(path, tensors, {{"format", "mlxtape state"}, {"lengths", lengths}});
}

State State::load(const Model& model, const std::string& path, std::int64_t capacity) {
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
  if (lengths.empty()) throw Error(Errc::kIo, path + ": this is no saved state: it has no lengths");
  const auto [least, most] = std::minmax_element(lengths.begin(), lengths.end());
  if (*least < 0 || *most > capacity) {
    throw Error(Errc::kIo, path + ": has sequences of " + std::to_string(*least) + " to " +
                               std::to_string(*most) + " tokens, the capacity is " +
                               std::to_string(capacity));
  }
  State state(model, static_cast<std::int64_t>(lengths.size()), capacity);
  if (file.names().size() != 2 * state.layers_.size()) {
    throw Error(Errc::kIo, path + ": has " + std::to_string(file.names().size()) +
                               " tensors, this model's states have " +
                               std::to_string(2 * state.layers_.size()));
  }
  const auto encoder = model.device().make_encoder();
  const std::int64_t used = *most;
  state.each([&](std::size_t l, const char* what, const Tensor& t) {
    const Tensor to = state.layers_[l].keys.defined() ? t.slice(1, 0, used) : t;
    const Tensor from = file.tensor(layer_name(l, what));
    if (!(from.shape() == to.shape()) || from.dtype() != to.dtype()) {
      throw Error(Errc::kIo, path + ": " + layer_name(l, what) + " must be " +
                                 to_string(to.shape()) + " " + name_of(to.dtype()) +
                                 " for this model, got " + to_string(from.shape()) + " " +
                                 name_of(from.dtype()));
    }
    const Tensor here = encoder->empty(from.shape(), from.dtype());
    encoder->upload(from.data(), from.bytes(), here);
    encoder->copy(here, to);
  });
  encoder->commit_and_wait();
  state.lengths_ = std::move(lengths);
  return state;
}

LayerPast State::past(std::size_t layer, std::int64_t sequence) const {
  const Layer& from = layers_[layer];
  LayerPast past;
  const std::int64_t start = lengths_[static_cast<std::size_t>(sequence)];
  if (from.keys.defined()) {
    past.attention = {of(from.keys, sequence), of(from.values, sequence), start, {}};
  } else {
    past.delta = of(from.delta, sequence);
    past.delta_is_new = start == 0;
  }
  return past;
}

Tensor prefill(CommandEncoder& encoder, const Model& model, State& state, std::int64_t sequence,
               std::span<const std::int32_t> tokens, std::int64_t chunk,
               const std::function<void(std::int64_t)>& progress) {
  std::int64_t& length = state.lengths_[state.place(sequence)];
  const auto count = static_cast<std::int64_t>(tokens.size());
  if (count == 0 || chunk < 1) {
    throw Error(Errc::kArgument, "prefill: at least one token, and chunks of at least one");
  }
  if (length + count > state.capacity_) {
    throw Error(Errc::kArgument,
                "prefill: " + std::to_string(length) + " tokens and " + std::to_string(count) +
                    " more do not fit into a capacity of " + std::to_string(state.capacity_));
  }
  check_tokens(tokens, model, "prefill");
  Tape tape(encoder);
  Tensor last;
  for (std::int64_t at = 0; at < count; at += chunk) {
    const std::int64_t n = std::min(chunk, count - at);
    const Tensor ids = encoder.empty({1, n}, DType::kI32);
    encoder.upload(tokens.data() + at, static_cast<std::size_t>(n) * sizeof(std::int32_t), ids);
    Stream stream{{}, nn::embed(tape, model.weights.embedding, ids)};
    for (std::size_t l = 0; l < state.layers_.size(); ++l) {
      const LayerPast past = state.past(l, sequence);
      stream = run_layer(tape, model, static_cast<std::int64_t>(l), stream, &past);
      if (progress) {
        progress(at + n * static_cast<std::int64_t>(l + 1) /
                          static_cast<std::int64_t>(state.layers_.size()));
      }
    }
    length += n;
    if (at + n == count) {
      const auto row = [&](const Tensor& t) {
        return encoder.contiguous(t.slice(1, n - 1, n));
      };
      last = run_norm(tape, model, {row(stream.more), row(stream.h)});
    }
  }
  return ops::cast(encoder, logits(tape, model, last), DType::kF32)
      .reshape({model.config.vocabulary});
}

struct Stepper::Impl {
  CommandEncoder& encoder;
  const Model& model;
  State& state;
  Tensor inputs;  // [2, B]: tokens, lengths
  Tensor logits;
  std::unique_ptr<Graph> graph;

  void run() {
    Tape tape(encoder);
    const std::int64_t batch = state.batch();
    const Tensor ids = inputs.slice(0, 0, 1).reshape({batch, 1});
    const Tensor lengths = inputs.slice(0, 1, 2).reshape({batch});
    Stream stream{{}, nn::embed(tape, model.weights.embedding, ids)};
    for (std::size_t l = 0; l < state.layers_.size(); ++l) {
      const State::Layer& layer = state.layers_[l];
      const LayerPast past{{layer.keys, layer.values, 0, lengths}, layer.delta};
      stream = run_layer(tape, model, static_cast<std::int64_t>(l), stream, &past);
    }
    const Tensor last = models::logits(tape, model, run_norm(tape, model, stream));
    logits = ops::cast(encoder, last, DType::kF32).reshape({batch, model.config.vocabulary});
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
    throw Error(Errc::kArgument, "step: one token for each of " + std::to_string(batch) +
                                     " sequences, got " + std::to_string(tokens.size()));
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
    s.encoder.begin_capture();
    try {
      s.run();
    } catch (...) {
      try {
        static_cast<void>(s.encoder.end_capture());
      } catch (const Error&) {  // the first failure is the one to tell of
      }
      throw;
    }
    s.graph = s.encoder.end_capture();
  }
  s.encoder.upload(inputs.data(), inputs.size() * sizeof(std::int32_t), s.inputs);
  s.encoder.replay(*s.graph);
  for (std::int64_t& length : s.state.lengths_) ++length;
  return s.logits;
}

}  // namespace mlxtape::models
