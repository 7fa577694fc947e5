#include "mlxtape/tape/tape.h"

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <map>
#include <set>

#include "tape_impl.h"

namespace mlxtape {

namespace {

constexpr std::int32_t kNone = IdentityMap::kNone;

std::uint64_t new_identity() {
  static std::atomic<std::uint64_t> last{0};
  return last.fetch_add(1, std::memory_order_relaxed) + 1;
}

Error wrong(Errc code, const std::string& what) { return {code, "tape: " + what}; }

}  // namespace

// ---- what was saved ----

std::uint32_t Saved::version_of(const Tensor& t) {
  const Storage* storage = t.buffer().storage();
  const std::uint32_t own = t.buffer().version();
  if (storage == nullptr || storage->backing == nullptr) return own;
  return own + storage->backing->version.load(std::memory_order_relaxed);
}

int Saved::changed() const {
  for (std::size_t i = 0; i < tensors_.size(); ++i) {
    if (version_of(tensors_[i].tensor) != tensors_[i].version) return static_cast<int>(i);
  }
  return -1;
}

// ---- values ----

bool Tape::Impl::tracks(const Tensor& x) const {
  if (x.identity() == 0) return false;
  for (const Impl* tape = this; tape != nullptr; tape = tape->outer) {
    if (tape->find(x) == kNone) continue;
    if (!x.is_loose()) return true;
    throw wrong(Errc::kArgument,
                "a view of a tracked tensor must be made on the tape, got " + to_string(x.shape()) +
                    " made by a member of Tensor or the encoder; use the op of that name, or "
                    "detach()");
  }
  return false;
}

std::int32_t Tape::Impl::add_value(const Tensor& x, bool is_leaf, bool is_watched) {
  const auto number = static_cast<std::int32_t>(values.size());
  values.push_back(
      {x.identity(), is_leaf, is_watched, x.dtype(), x.dtype(), x.shape(), {}, {}, {}});
  index.add(x.identity(), number);
  return number;
}

std::int32_t Tape::Impl::number_of(const Tensor& x) {
  if (!tracks(x)) return kNone;
  const std::int32_t here = find(x);
  if (here != kNone) return here;
  const std::int32_t number = add_value(x, true, true);
  // Summed as it will be there: a checkpoint must not round what the tape around it would not.
  for (const Impl* tape = outer; tape != nullptr; tape = tape->outer) {
    const std::int32_t there = tape->find(x);
    if (there == kNone) continue;
    const Value& value = tape->values[static_cast<std::size_t>(there)];
    if (value.is_leaf) values[static_cast<std::size_t>(number)].sum = value.sum;
    break;
  }
  return number;
}

// ---- recording ----

void Tape::Impl::record(const char* name, BackwardFn backward, std::span<const TensorRef> inputs,
                        std::span<Tensor* const> outputs, Saved&& saved) {
  if (walking) {
    throw wrong(Errc::kArgument, std::string(name) +
                                     " must not be recorded on a tape that is being walked; use an "
                                     "inner tape");
  }
  if (noting != nullptr) {
    for (const Tensor& x : inputs) {
      if (tracks(x)) noting->push_back(x);
    }
    return;
  }
  const std::size_t input_count = inputs.size();
  const std::size_t output_count = outputs.size();
  if (output_count == 0) {
    throw wrong(Errc::kArgument, std::string(name) + " must have an output, got none");
  }
  const std::size_t first = edges.size();
  bool any = false;
  for (std::size_t i = 0; i < input_count; ++i) {
    edges.push_back(number_of(inputs[i]));
    any |= edges.back() != kNone;
  }
  bool carries = false;
  for (std::size_t i = 0; i < output_count; ++i) carries |= is_float(outputs[i]->dtype());
  if (!any || !carries) {
    edges.resize(first);
    return;
  }
  for (std::size_t i = 0; i < output_count; ++i) {
    Tensor& y = *outputs[i];
    if (!is_float(y.dtype())) {
      edges.push_back(kNone);
      continue;
    }
    y.identity_ = new_identity();
    if (first_identity == 0) first_identity = y.identity_;
    edges.push_back(add_value(y, false, false));
  }
  nodes.push_back({name, backward, first, input_count, output_count, std::move(saved)});
}

std::int32_t Tape::Impl::watch(const Tensor& x, DType sum, std::uint64_t& identity) {
  if (!is_float(x.dtype())) {
    throw wrong(Errc::kDType, std::string("only floats have gradients, got ") + name_of(x.dtype()) +
                                  " " + to_string(x.shape()) +
                                  "; indices need no stop_gradient, they never carry one");
  }
  if (!is_kernel_float(sum)) {
    throw wrong(Errc::kDType,
                std::string("gradients are summed in f32, f16 or bf16, got ") + name_of(sum));
  }
  if (x.device() != &encoder->device()) {
    throw wrong(Errc::kDevice, "what is watched must be on " + encoder->device().name() + ", got " +
                                   (x.device() == nullptr ? std::string("a tensor without memory")
                                                          : "one on " + x.device()->name()));
  }
  Tensor known = x;
  if (x.identity() != 0 && x.is_loose()) {
    if (!tracks(x)) known.identity_ = 0;  // throws if it is a view of something tracked
  }
  if (known.identity_ == 0) known.identity_ = new_identity();
  identity = known.identity_;
  std::int32_t number = number_of(known);
  if (number == kNone) number = add_value(known, true, true);
  values[static_cast<std::size_t>(number)].is_watched = true;
  Value& value = values[static_cast<std::size_t>(number)];
  if (value.sum != sum && (value.kept || value.rows)) {
    throw wrong(Errc::kArgument, "the type of a gradient's sum must be chosen before a walk");
  }
  value.sum = sum;
  return number;
}

void Tape::Impl::forget_nodes() {
  if (!values.empty()) {
    for (const Value& v : values) freed_to = std::max(freed_to, v.is_leaf ? 0 : v.identity);
  }
  nodes.clear();
  edges.clear();
  // What is watched stays, as leaves: an intermediate's gradient can be read until the next walk.
  std::erase_if(values, [](const Value& v) { return !v.is_watched; });
  index.clear();
  for (std::size_t i = 0; i < values.size(); ++i) {
    values[i].is_leaf = true;
    values[i].flow.reset();
    index.add(values[i].identity, static_cast<std::int32_t>(i));
  }
}

// ---- walking ----

// sum += gradient, in place where nobody else has a share of sum.
void Tape::Impl::add(Gradient& to, DType type, Tensor&& gradient) const {
  if (!to && gradient.dtype() == type) {
    to = std::make_unique<Tensor>(std::move(gradient));
    return;
  }
  if (!to) to = std::make_unique<Tensor>(encoder->zeros(gradient.shape(), type));
  own(*to);
  encoder->add_into(*to, gradient);
}

void Tape::Impl::own(Tensor& sum) const {
  if (sum.buffer().owners() == 1 && sum.is_contiguous()) return;
  const Tensor before = encoder->contiguous(sum);
  const Tensor copy = encoder->empty(before.shape(), before.dtype());
  encoder->copy(before, copy);
  sum = copy;
}

void Tape::Impl::make_dense(Value& value) const {
  if (value.kept || !value.rows) return;
  value.kept = std::make_unique<Tensor>(encoder->zeros(value.shape, value.sum));
  value.rows->add_to(*encoder, *value.kept, *value.rows);
}

// A leaf's rows stay rows as long as nothing else comes. What a node made is dense, for its backward function.
void Tape::Impl::give_rows(std::int32_t number, RowGrad&& gradient) {
  Value& value = values[static_cast<std::size_t>(number)];
  if (value.is_leaf && (value.rows || !value.kept)) {
    RowGrad sum = std::move(gradient);
    if (value.rows) {
      sum = sum.merge(*encoder, *value.rows, sum, value.shape, value.sum);
    } else if (sum.rows.dtype() != value.sum) {
      sum = sum.merge(*encoder, sum, {}, value.shape, value.sum);
    }
    value.rows = std::make_unique<RowGrad>(std::move(sum));
    value.kept.reset();
    return;
  }
  Gradient& to = value.is_leaf ? value.kept : value.flow;
  const DType type = value.is_leaf ? value.sum : value.dtype;
  if (!to) to = std::make_unique<Tensor>(encoder->zeros(value.shape, type));
  own(*to);
  gradient.add_to(*encoder, *to, gradient);
}

void Tape::Impl::give(std::int32_t number, Tensor gradient) {
  Value& value = values[static_cast<std::size_t>(number)];
  if (value.is_leaf) {
    const auto rows = std::move(value.rows);
    if (rows) value.kept.reset();  // made of them: the sum must not depend on who asked for it
    add(value.kept, value.sum, std::move(gradient));
    if (rows) {
      own(*value.kept);
      rows->add_to(*encoder, *value.kept, *rows);
    }
  } else {
    add(value.flow, value.dtype, std::move(gradient));
  }
}

void Tape::Impl::check_whole() const {
  if (!torn || walking) return;
  throw wrong(
      Errc::kArgument,
      "gradients must be whole, got parts of them from a walk that failed; clear_grads() or "
      "reset() first");
}

void Tape::Impl::meet(const Tensor& y) {
  if (!walking) number_of(y);
}

std::int32_t Tape::Impl::seed_of(const Tensor& y) const {
  if (!y.defined()) throw wrong(Errc::kArgument, "backward needs a tensor, got an undefined one");
  if (!is_float(y.dtype())) {
    throw wrong(Errc::kDType,
                std::string("backward starts from a float, got ") + name_of(y.dtype()));
  }
  if (walking) throw wrong(Errc::kArgument, "one walk at a time, got backward inside of backward");
  check_whole();
  tracks(y);  // throws for a loose view
  const std::int32_t number = find(y);
  if (number != kNone) return number;
  if (y.identity() != 0 && y.identity() >= first_identity && y.identity() <= freed_to) {
    throw wrong(Errc::kArgument,
                "y was walked from before, and the walk freed what it passed; pass retain to walk "
                "twice");
  }
  throw wrong(Errc::kNoGradient, "y must depend on something watched on this tape, got " +
                                     to_string(y.shape()) +
                                     (y.identity() != 0 ? " made on another tape or before reset"
                                                        : " that nothing was recorded of"));
}

// Everything that can go wrong before any work is done: which nodes will be passed, have they all a
// gradient, and is what they saved still what it was?
void Tape::Impl::check_walk(const Seeds& seeds) const {
  std::vector<char> reached(values.size(), 0);
  for (const auto& [number, dy] : seeds) reached[static_cast<std::size_t>(number)] = 1;
  for (std::size_t n = nodes.size(); n-- > 0;) {
    const Node& node = nodes[n];
    const std::int32_t* edge = edges.data() + node.first_edge;
    bool passes = false;
    for (std::size_t o = 0; o < node.outputs; ++o) {
      const std::int32_t value = edge[node.inputs + o];
      passes |= value != kNone && reached[static_cast<std::size_t>(value)] != 0;
    }
    if (!passes) continue;
    if (node.backward == nullptr) {
      throw wrong(Errc::kNoGradient,
                  std::string(node.name) +
                      " has no gradient, got it on the way back; stop_gradient what it is given or "
                      "what it gives");
    }
    if (const int i = node.saved.changed(); i >= 0) {
      const Tensor& t = node.saved[static_cast<std::size_t>(i)];
      throw wrong(Errc::kArgument, std::string(node.name) + " saved a tensor " +
                                       to_string(t.shape()) + " " + name_of(t.dtype()) +
                                       " that must not change until the walk, got one that was "
                                       "written in place since");
    }
    for (std::size_t i = 0; i < node.inputs; ++i) {
      if (edge[i] != kNone) reached[static_cast<std::size_t>(edge[i])] = 1;
    }
  }
}

void Tape::Impl::run(Tape& tape, std::size_t n, bool retain) {
  Node& node = nodes[n];
  const std::int32_t* out = edges.data() + node.first_edge + node.inputs;
  bool any = false;
  for (std::size_t o = 0; o < node.outputs; ++o) {
    if (out[o] == kNone) continue;
    Value& value = values[static_cast<std::size_t>(out[o])];
    if (!value.flow) continue;
    any = true;
    if (value.is_watched) add(value.kept, value.sum, Tensor(*value.flow));
  }
  if (any) {
    Pullback pullback(tape, n);
    node.backward(pullback);
    for (std::size_t i = 0; i < node.inputs; ++i) {
      if (pullback.needs(i) && given[node.first_edge + i] == 0) {
        throw wrong(Errc::kNoGradient, std::string(node.name) +
                                           " must give a gradient for each input that needs one, "
                                           "got none for input " +
                                           std::to_string(i));
      }
    }
  }
  if (!retain) node.saved = Saved();
  for (std::size_t o = 0; o < node.outputs; ++o) {
    if (out[o] != kNone) values[static_cast<std::size_t>(out[o])].flow.reset();
  }
}

void Tape::Impl::walk(Tape& tape, Seeds seeds, bool retain) {
  check_walk(seeds);
  given.assign(edges.size(), 0);
  struct Walking {  // however it ends
    Impl& self;
    bool retain;
    explicit Walking(Impl& s, bool r) : self(s), retain(r) { self.walking = true; }
    ~Walking() {
      self.walking = false;
      for (Value& v : self.values) v.flow.reset();
      if (!retain) self.forget_nodes();
    }
  } walking_now(*this, retain);
  walked = true;
  torn = true;  // until all of it is done
  while (!seeds.empty()) {
    give(seeds.back().first, std::move(seeds.back().second));
    seeds.pop_back();
  }
  for (std::size_t n = nodes.size(); n-- > 0;) run(tape, n, retain);
}

// ---- a node's turn ----

CommandEncoder& Pullback::encoder() const { return *tape_.impl().encoder; }

const Saved& Pullback::saved() const { return tape_.impl().nodes[node_].saved; }

std::size_t Pullback::inputs() const { return tape_.impl().nodes[node_].inputs; }
std::size_t Pullback::outputs() const { return tape_.impl().nodes[node_].outputs; }

const Shape& Pullback::input_shape(std::size_t input) const {
  MT_ASSERT(needs(input));
  const Tape::Impl& impl = tape_.impl();
  const std::int32_t value = impl.edges[impl.nodes[node_].first_edge + input];
  return impl.values[static_cast<std::size_t>(value)].shape;
}

const Shape& Pullback::output_shape(std::size_t output) const {
  const Tape::Impl& impl = tape_.impl();
  const Tape::Impl::Node& node = impl.nodes[node_];
  const std::int32_t value = impl.edges[node.first_edge + node.inputs + output];
  MT_ASSERT(output < node.outputs && value != kNone);
  return impl.values[static_cast<std::size_t>(value)].shape;
}

Tensor* Pullback::flow(std::size_t output) const {
  Tape::Impl& impl = tape_.impl();
  const Tape::Impl::Node& node = impl.nodes[node_];
  MT_ASSERT(output < node.outputs);
  const std::int32_t value = impl.edges[node.first_edge + node.inputs + output];
  if (value == kNone) return nullptr;
  return impl.values[static_cast<std::size_t>(value)].flow.get();
}

bool Pullback::has_grad(std::size_t output) const { return flow(output) != nullptr; }

const Tensor& Pullback::grad(std::size_t output) const {
  const Tensor* dy = flow(output);
  if (dy == nullptr) {
    throw wrong(Errc::kNoGradient, std::string(tape_.impl().nodes[node_].name) +
                                       " asks for the gradient of output " +
                                       std::to_string(output) + ", which nothing used");
  }
  return *dy;
}

Tensor Pullback::take_grad(std::size_t output) {
  grad(output);
  Tape::Impl& impl = tape_.impl();
  const Tape::Impl::Node& node = impl.nodes[node_];
  const std::int32_t value = impl.edges[node.first_edge + node.inputs + output];
  const Tape::Impl::Gradient dy = std::move(impl.values[static_cast<std::size_t>(value)].flow);
  return std::move(*dy);
}

bool Pullback::needs(std::size_t input) const {
  const Tape::Impl::Node& node = tape_.impl().nodes[node_];
  MT_ASSERT(input < node.inputs);
  return tape_.impl().edges[node.first_edge + input] != kNone;
}

void Pullback::mark(std::size_t input) {
  char& given = tape_.impl().given[tape_.impl().nodes[node_].first_edge + input];
  if (given != 0) {
    throw wrong(Errc::kArgument, std::string(tape_.impl().nodes[node_].name) +
                                     " gives each gradient once, got input " +
                                     std::to_string(input) + " twice");
  }
  given = 1;
}

void Pullback::give(std::size_t input, Tensor gradient) {
  if (!needs(input)) return;
  mark(input);
  Tape::Impl& impl = tape_.impl();
  const Tape::Impl::Node& node = impl.nodes[node_];
  const std::int32_t number = impl.edges[node.first_edge + input];
  const Tape::Impl::Value& value = impl.values[static_cast<std::size_t>(number)];
  if (!(gradient.shape() == value.shape)) {
    throw wrong(Errc::kShape, giving(input) + "of its shape " + to_string(value.shape) + ", got " +
                                  to_string(gradient.shape()));
  }
  if (gradient.dtype() != value.dtype && !(value.is_leaf && is_kernel_float(gradient.dtype()))) {
    throw wrong(Errc::kDType, giving(input) + "of its type " + name_of(value.dtype) + ", got " +
                                  name_of(gradient.dtype()));
  }
  impl.give(number, std::move(gradient));
}

std::string Pullback::giving(std::size_t input) const {
  return std::string(tape_.impl().nodes[node_].name) + " gives input " + std::to_string(input) +
         " a gradient ";
}

void Pullback::give_rows(std::size_t input, RowGrad gradient) {
  if (!needs(input)) return;
  mark(input);
  Tape::Impl& impl = tape_.impl();
  const std::int32_t number = impl.edges[impl.nodes[node_].first_edge + input];
  const Tape::Impl::Value& value = impl.values[static_cast<std::size_t>(number)];
  const Tensor& ids = gradient.ids;
  const Tensor& rows = gradient.rows;
  if (gradient.add_to == nullptr || gradient.merge == nullptr) {
    throw wrong(Errc::kArgument, giving(input) + "of rows that can be added, got one without how");
  }
  if (ids.rank() != 1 || ids.dtype() != DType::kI32) {
    throw wrong(ids.rank() != 1 ? Errc::kShape : Errc::kDType,
                giving(input) + "of rows with ids [n] i32, got " + to_string(ids.shape()) + " " +
                    name_of(ids.dtype()));
  }
  Shape shape = value.shape;
  if (shape.rank() != 0) shape[0] = ids.dim(0);
  if (shape.rank() == 0 || !(rows.shape() == shape)) {
    throw wrong(Errc::kShape, giving(input) + "of rows of its shape " + to_string(value.shape) +
                                  " for " + to_string(ids.shape()) + " ids, got " +
                                  to_string(rows.shape()));
  }
  if (!is_kernel_float(rows.dtype())) {
    throw wrong(Errc::kDType,
                giving(input) + "of rows of f32, f16 or bf16, got " + name_of(rows.dtype()));
  }
  if (ids.device() != &impl.encoder->device() || rows.device() != &impl.encoder->device()) {
    throw wrong(Errc::kDevice,
                giving(input) + "of rows that must be on " + impl.encoder->device().name());
  }
  impl.give_rows(number, std::move(gradient));
}

DType Pullback::sum_type(std::size_t input) const {
  MT_ASSERT(needs(input));
  const Tape::Impl& impl = tape_.impl();
  const std::int32_t number = impl.edges[impl.nodes[node_].first_edge + input];
  const Tape::Impl::Value& value = impl.values[static_cast<std::size_t>(number)];
  return value.is_leaf ? value.sum : value.dtype;
}

void Pullback::give_none(std::size_t input) {
  if (needs(input)) mark(input);
}

// ---- the tape ----

Tape::Tape(CommandEncoder& encoder) : impl_(std::make_unique<Impl>(encoder)) {}
Tape::Tape(Tape& outer) : Tape(outer.encoder()) { impl_->outer = outer.impl_.get(); }
Tape::~Tape() = default;
Tape::Tape(Tape&& other) noexcept = default;
Tape& Tape::operator=(Tape&& other) noexcept = default;

Tape::Impl& Tape::impl() const {
  if (!impl_) throw wrong(Errc::kArgument, "this tape was moved from, and holds nothing");
  return *impl_;
}

CommandEncoder& Tape::encoder() const { return *impl().encoder; }

Tensor Tape::watch(const Tensor& x) {
  const std::int32_t number = is_float(x.dtype()) ? impl().number_of(x) : kNone;
  return watch(x,
               number == kNone ? x.dtype() : impl().values[static_cast<std::size_t>(number)].sum);
}

Tensor Tape::watch(const Tensor& x, DType sum) {
  Tensor known = x;
  impl().watch(x, sum, known.identity_);
  return known;
}

void Tape::backward(const Tensor& y, BackwardOptions options) {
  Impl& self = impl();
  self.meet(y);
  const std::int32_t number = self.seed_of(y);
  if (y.size() != 1) {
    throw wrong(Errc::kShape, "backward without a gradient given needs one number, got " +
                                  to_string(y.shape()) + "; sum it, or give dy");
  }
  self.walk(*this, {{number, self.encoder->full(y.shape(), y.dtype(), 1)}}, options.retain);
  self.torn = false;
}

void Tape::backward(const Tensor& y, const Tensor& dy, BackwardOptions options) {
  backward({{y, dy}}, options);
}

void Tape::backward(const std::vector<std::pair<Tensor, Tensor>>& seeds, BackwardOptions options) {
  Impl& self = impl();
  Impl::Seeds numbered;
  for (const auto& [y, dy] : seeds) {
    self.meet(y);
    const std::int32_t number = self.seed_of(y);
    if (!(dy.shape() == y.shape()) || dy.dtype() != y.dtype()) {
      throw wrong(dy.dtype() != y.dtype() ? Errc::kDType : Errc::kShape,
                  "dy must have the shape and type of y, " + to_string(y.shape()) + " " +
                      name_of(y.dtype()) + ", got " + to_string(dy.shape()) + " " +
                      name_of(dy.dtype()));
    }
    if (dy.device() != &self.encoder->device()) {
      throw wrong(Errc::kDevice, "dy must be on " + self.encoder->device().name());
    }
    numbered.emplace_back(number, dy.detach());
  }
  self.walk(*this, std::move(numbered), options.retain);
  // dy is the caller's to write again: a gradient that is dy, handed through, is kept as a copy.
  for (Impl::Value& v : self.values) {
    const auto is_kept = [&](const std::pair<Tensor, Tensor>& seed) {
      return seed.second.buffer().storage() == v.kept->buffer().storage();
    };
    if (v.kept && std::any_of(seeds.begin(), seeds.end(), is_kept)) self.own(*v.kept);
  }
  self.torn = false;
}

const Tape::Impl::Value& Tape::Impl::watched(const Tensor& x) const {
  check_whole();
  tracks(x);  // throws for a loose view
  const std::int32_t number = find(x);
  if (number == kNone || !values[static_cast<std::size_t>(number)].is_watched) {
    if (!is_float(x.dtype())) {
      throw wrong(Errc::kDType,
                  std::string("integers have no gradient, got ") + name_of(x.dtype()));
    }
    throw wrong(Errc::kArgument, "the gradient of " + to_string(x.shape()) +
                                     " is not kept; watch() it before the walk, and ask with what "
                                     "watch returned");
  }
  return values[static_cast<std::size_t>(number)];
}

Tensor Tape::grad(const Tensor& x) const {
  Impl& self = impl();
  const Impl::Value& found = self.watched(x);
  if (!self.walked) throw wrong(Errc::kArgument, "a gradient needs a backward first, got none yet");
  self.make_dense(self.values[static_cast<std::size_t>(&found - self.values.data())]);
  if (found.kept) *found.kept = self.encoder->contiguous(*found.kept);  // may be a transposed view
  return found.kept ? *found.kept : self.encoder->zeros(found.shape, found.sum);
}

bool Tape::has_grad(const Tensor& x) const {
  impl().check_whole();
  const std::int32_t number = impl().find(x);
  if (number == kNone) return false;
  const Impl::Value& value = impl().values[static_cast<std::size_t>(number)];
  return value.kept != nullptr || value.rows != nullptr;
}

RowGrad Tape::row_grad(const Tensor& x) const {
  const Impl::Value& value = impl().watched(x);
  if (!value.rows) {
    throw wrong(Errc::kArgument, "a gradient by rows needs walks that gave nothing else, got " +
                                     std::string(value.kept ? "a dense one" : "none") + " for " +
                                     to_string(x.shape()) + "; ask has_row_grad, or grad");
  }
  return *value.rows;
}

bool Tape::has_row_grad(const Tensor& x) const {
  impl().check_whole();
  const std::int32_t number = impl().find(x);
  return number != kNone && impl().values[static_cast<std::size_t>(number)].rows != nullptr;
}

void Tape::clear_grads() {
  Impl& self = impl();
  for (Impl::Value& v : self.values) {
    v.kept.reset();
    v.rows.reset();
  }
  if (!self.walking) self.torn = false;
}

void Tape::reset() {
  Impl& self = impl();
  if (self.walking) throw wrong(Errc::kArgument, "reset must wait for the walk that is under way");
  for (Impl::Value& v : self.values) v.is_watched = false;
  self.forget_nodes();
  self.walked = self.torn = false;
  self.first_identity = self.freed_to = 0;
}

std::size_t Tape::nodes() const { return impl().nodes.size(); }

bool Tape::wants(std::initializer_list<TensorRef> inputs) const {
  return wants(std::span(inputs.begin(), inputs.size()));
}

bool Tape::wants(std::span<const TensorRef> inputs) const {
  const Impl& self = impl();
  if (!self.recording) return false;
  bool any = false;
  for (const Tensor& t : inputs) any |= self.tracks(t);
  return any;
}

void Tape::record(const char* name, BackwardFn backward, std::initializer_list<TensorRef> inputs,
                  std::initializer_list<Tensor*> outputs, Saved saved) {
  record(name, backward, std::span(inputs.begin(), inputs.size()),
         std::span(outputs.begin(), outputs.size()), std::move(saved));
}

void Tape::record(const char* name, BackwardFn backward, std::span<const TensorRef> inputs,
                  std::span<Tensor* const> outputs, Saved saved) {
  Impl& self = impl();
  for (Tensor* y : outputs) y->identity_ = 0;
  if (!self.recording) return;
  self.record(name, backward, inputs, outputs, std::move(saved));
}

Tape::NoGrad::NoGrad(Tape& tape)
    : tape_(tape), before_(std::exchange(tape.impl().recording, false)) {}
Tape::NoGrad::~NoGrad() { tape_.impl_->recording = before_; }

Tensor stop_gradient(const Tensor& x) { return x.detach(); }

// ---- what it holds ----

TapeReport Tape::report() const {
  const Impl& self = impl();
  TapeReport report;
  std::set<const Storage*> seen;
  const auto bytes_of = [&](const Tensor& t) {
    const Storage* storage = t.buffer().storage();
    return storage != nullptr && seen.insert(storage).second ? storage->capacity : 0;
  };
  std::map<std::string, TapeReport::Row> rows;
  for (const Impl::Node& node : self.nodes) {
    TapeReport::Row& row = rows[node.name];
    ++row.nodes;
    for (std::size_t i = 0; i < node.saved.size(); ++i) row.bytes += bytes_of(node.saved[i]);
  }
  for (auto& [name, row] : rows) {
    row.name = name;
    report.saved_bytes += row.bytes;
    report.rows.push_back(row);
  }
  std::stable_sort(report.rows.begin(), report.rows.end(),
                   [](const auto& a, const auto& b) { return a.bytes > b.bytes; });
  for (const Impl::Value& v : self.values) {
    if (v.kept) report.grad_bytes += bytes_of(*v.kept);
    if (v.flow) report.grad_bytes += bytes_of(*v.flow);
    if (v.rows) report.grad_bytes += bytes_of(v.rows->ids) + bytes_of(v.rows->rows);
  }
  report.peak_bytes = self.encoder->device().memory().stats().peak;
  return report;
}

std::string to_string(const TapeReport& report) {
  const auto line = [](const std::string& name, const std::string& nodes, std::size_t bytes) {
    char text[128];
    std::snprintf(text, sizeof text, "%-32s %8s %14.3f MiB\n", name.c_str(), nodes.c_str(),
                  static_cast<double>(bytes) / (1 << 20));
    return std::string(text);
  };
  std::string text;
  for (const TapeReport::Row& row : report.rows) {
    text += line(row.name, std::to_string(row.nodes), row.bytes);
  }
  return text + line("saved", "", report.saved_bytes) + line("gradients", "", report.grad_bytes) +
         line("peak of the device", "", report.peak_bytes);
}

}  // namespace mlxtape
