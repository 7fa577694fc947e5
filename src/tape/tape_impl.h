// What a Tape holds. A value is anything that carries gradient: something watched, or made from it. Nodes
// are in the order they were recorded, which is an order that inputs come before outputs in.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "mlxtape/tape/tape.h"

namespace mlxtape {

// Numbers of values by their identity. Identities that one thread hands out follow each other, so their
// lowest bits are as good as a hash.
class IdentityMap {
 public:
  static constexpr std::int32_t kNone = -1;

  std::int32_t find(std::uint64_t identity) const {
    if (slots_.empty()) return kNone;
    for (std::size_t i = identity & mask();; i = (i + 1) & mask()) {
      if (slots_[i].first == identity) return slots_[i].second;
      if (slots_[i].first == 0) return kNone;
    }
  }
  void add(std::uint64_t identity, std::int32_t value) {
    if (2 * (count_ + 1) > slots_.size()) grow();
    put(identity, value);
    ++count_;
  }
  void clear() {
    slots_.assign(slots_.size(), {0, kNone});
    count_ = 0;
  }

 private:
  std::size_t mask() const { return slots_.size() - 1; }
  void put(std::uint64_t identity, std::int32_t value) {
    std::size_t i = identity & mask();
    while (slots_[i].first != 0) i = (i + 1) & mask();
    slots_[i] = {identity, value};
  }
  void grow() {
    const auto before = std::exchange(slots_, {});
    slots_.assign(before.empty() ? 64 : 2 * before.size(), {0, kNone});
    for (const auto& [identity, value] : before) {
      if (identity != 0) put(identity, value);
    }
  }

  std::vector<std::pair<std::uint64_t, std::int32_t>>
      slots_;  // a power of two; identity 0 is empty
  std::size_t count_ = 0;
};

struct Tape::Impl {
  using Gradient = std::unique_ptr<Tensor>;  // most values have none at any time
  struct Value {
    std::uint64_t identity;
    bool is_leaf;     // no node made it
    bool is_watched;  // its gradient is kept
    DType dtype;
    DType sum;  // what its gradient is added up in
    Shape shape;
    Gradient flow;  // dL/dvalue of the walk that is under way; a leaf's goes to kept at once
    Gradient kept;  // of all walks since clear_grads
    std::unique_ptr<RowGrad>
        rows;  // a leaf's, while all of it came as rows; kept is then what was made of it
  };
  struct Node {
    const char* name;
    BackwardFn backward;
    std::size_t first_edge;  // inputs, then outputs
    std::size_t inputs, outputs;
    Saved saved;
  };

  explicit Impl(CommandEncoder& e) : encoder(&e) {}

  CommandEncoder* encoder;
  const Impl* outer = nullptr;
  bool recording = true;
  bool walking = false;
  bool walked = false;         // has any walk been done?
  bool torn = false;           // did the last one throw, with gradients added in part?
  std::uint64_t freed_to = 0;  // identities up to here were freed by a walk
  std::uint64_t first_identity = 0;
  std::vector<Value> values;
  IdentityMap index;
  std::vector<Node> nodes;
  std::vector<std::int32_t> edges;  // numbers of values; kNone: carries no gradient
  std::vector<char> given;          // for each edge, during a walk
  std::vector<Tensor>* noting =
      nullptr;  // instead of recording: what the outer tape tracks of the inputs
  struct Carried {
    Tensor state, before;  // the tensor, and a copy of what was in it at first
  };
  std::vector<Carried>* carried = nullptr;  // of the checkpoint whose first run this tape serves

  // Is x a value here, or a value of an outer tape? Throws where x is a view that no tape knows of.
  bool tracks(const Tensor& x) const;
  std::int32_t find(const Tensor& x) const { return index.find(x.identity()); }
  // The number of x, which becomes a leaf where an outer tape tracks it; kNone if nobody does.
  std::int32_t number_of(const Tensor& x);
  std::int32_t add_value(const Tensor& x, bool is_leaf, bool is_watched);
  // x watched: the value's number, and x's identity in identity.
  std::int32_t watch(const Tensor& x, DType sum, std::uint64_t& identity);
  // Those of inputs and outputs are appended to edges, a node to nodes.
  void record(const char* name, BackwardFn backward, std::span<const TensorRef> inputs,
              std::span<Tensor* const> outputs, Saved&& saved);

  using Seeds = std::vector<std::pair<std::int32_t, Tensor>>;  // values and their gradients
  void meet(const Tensor& y);                   // becomes a leaf where an outer tape tracks it
  std::int32_t seed_of(const Tensor& y) const;  // throws where no walk can start there
  void check_walk(const Seeds& seeds) const;
  void walk(Tape& tape, Seeds seeds, bool retain);
  void run(Tape& tape, std::size_t node, bool retain);
  void give(std::int32_t value, Tensor gradient);
  void give_rows(std::int32_t value, RowGrad&& gradient);
  void add(Gradient& to, DType type, Tensor&& gradient) const;
  void own(Tensor& sum) const;                  // to be written in place
  void make_dense(Value& value) const;          // kept from rows
  const Value& watched(const Tensor& x) const;  // throws for what is not
  void check_whole() const;                     // throws where gradients are torn
  void forget_nodes();
};

}  // namespace mlxtape
