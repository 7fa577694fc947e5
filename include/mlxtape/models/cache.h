// Cache: what a layer keeps of the tokens processed so far: one type for each type of mixer. B sequences as a batch.
//
// Every kind says for itself what can be done with it; State asks each layer's in turn and knows no kind.
//   each(cache, f)        calls f(name, tensor) with what a copy, a snapshot or a file holds of it
//   forgets()             can the last tokens be forgotten, however many came?
//   can_trim(from, to)    can they here, in a sequence of `from` tokens?
//   clear(encoder)        of one sequence: as if no token had come
//   grow(…)               room for more tokens; what `used` tokens left stays
//   used(t, tokens)       the part of a tensor that sequences of up to so many tokens have written
//   kMarked               a mark copies it: what is overwritten by later tokens
#pragma once

#include <cstddef>
#include <map>
#include <string>
#include <utility>
#include <variant>

#include "mlxtape/core/encoder.h"
#include "mlxtape/models/plan.h"

namespace mlxtape::models {

// For rings of the same size: where in it each position is, [capacity] i32. One tensor for all layers.
class RingPlaces {
 public:
  Tensor of(Device& device, std::int64_t rows, std::int64_t capacity);

 private:
  std::map<std::pair<std::int64_t, std::int64_t>, Tensor> made_;
};

// Of every token.
struct KeyValueCache {
  static constexpr bool kMarked = false;
  Tensor keys, values;  // [B, capacity, key_heads, head_dim]

  template <class Self, class Function>
  static void each(Self& self, const Function& function) {
    function("keys", self.keys);
    function("values", self.values);
  }
  bool forgets() const { return true; }
  bool can_trim(std::int64_t, std::int64_t) const { return true; }
  static std::string why_not() { return ""; }
  void clear(CommandEncoder&) const {}
  void grow(CommandEncoder& encoder, std::int64_t used, std::int64_t capacity, RingPlaces& places);
  static Tensor used(const Tensor& t, std::int64_t tokens) { return t.slice(1, 0, tokens); }
};

// Of the last `window` tokens, which is all that a layer with a window can see. Position p is in row p mod (window − 1); the
// last row is the newest token's while it is attended to (nn/self_attention.h). A capacity below the window is that many
// rows, and nothing is ever overwritten.
struct WindowCache {
  static constexpr bool kMarked = true;
  Tensor keys, values;  // [B, min(window, capacity), key_heads, head_dim]
  Tensor places = {};   // of RingPlaces; not defined where the capacity is below the window
  std::int64_t window = 0;

  template <class Self, class Function>
  static void each(Self& self, const Function& function) {
    function("keys", self.keys);
    function("values", self.values);
  }
  bool forgets() const { return keys.dim(1) < window; }
  // Until something has been overwritten.
  bool can_trim(std::int64_t from, std::int64_t) const { return from < window; }
  static std::string why_not() {
    return "a window keeps only its last tokens and cannot drop single tokens once it is full";
  }
  void clear(CommandEncoder&) const {}
  void grow(CommandEncoder& encoder, std::int64_t used, std::int64_t capacity, RingPlaces& places);
  static Tensor used(const Tensor& t, std::int64_t tokens) {
    return t.slice(1, 0, tokens < t.dim(1) ? tokens : t.dim(1));
  }
};

// One size, whatever came.
struct DeltaCache {
  static constexpr bool kMarked = true;
  Tensor conv;  // [B, kernel − 1, channels]: the rows that a filter still sees
  Tensor rule;  // [B, value_heads, value_dim, key_dim] f32

  template <class Self, class Function>
  static void each(Self& self, const Function& function) {
    function("conv", self.conv);
    function("rule", self.rule);
  }
  bool forgets() const { return false; }
  bool can_trim(std::int64_t, std::int64_t) const { return false; }
  static std::string why_not() { return "a delta net cannot drop single tokens"; }
  void clear(CommandEncoder& encoder) const;
  void grow(CommandEncoder&, std::int64_t, std::int64_t, RingPlaces&) {}
  static Tensor used(const Tensor& t, std::int64_t) { return t; }
};

using Cache = std::variant<KeyValueCache, WindowCache, DeltaCache>;

// Of zeros, or without memory where there is no device. rings: a layer with a window keeps no more than that.
Cache make_cache(const LayerPlan& layer, std::int64_t batch, std::int64_t capacity, DType dtype,
                 Device* device, bool rings, RingPlaces& places);

// Calls function(name, tensor) with each tensor.
template <class C, class Function>
void each_tensor(C&& cache, const Function& function) {
  std::visit([&](auto& kind) { kind.each(kind, function); }, cache);
}

bool forgets(const Cache& cache);
bool is_marked(const Cache& cache);
// Throws kArgument, with what the kind says, where it cannot.
void expect_trim(const Cache& cache, std::int64_t from, std::int64_t to);
void clear(CommandEncoder& encoder, const Cache& cache);
void grow(CommandEncoder& encoder, Cache& cache, std::int64_t used, std::int64_t capacity,
          RingPlaces& places);
Tensor used_of(const Cache& cache, const Tensor& t, std::int64_t tokens);
std::size_t bytes_of(const Cache& cache);

// Of one sequence: views, [1, …].
Cache part_of(const Cache& cache, std::int64_t sequence);
// Tensors of its own with the same numbers, and back into a cache of the same kind, which may have grown meanwhile.
Cache copy_of(CommandEncoder& encoder, const Cache& cache);
void copy_into(CommandEncoder& encoder, const Cache& from, const Cache& to);

}  // namespace mlxtape::models
