// Cache: what a layer keeps of the tokens processed so far: one type for each type of mixer. B sequences as a batch.
//
// kGrows says what a type can do: if true, axis 1 of its tensors is the tokens, so that more tokens need more memory and the
// last ones can be dropped; if false, it has a fixed size, and returning to an earlier token needs a copy that was made there.
#pragma once

#include <cstddef>
#include <variant>

#include "mlxtape/core/tensor.h"
#include "mlxtape/models/plan.h"

namespace mlxtape::models {

struct KeyValueCache {
  static constexpr bool kGrows = true;
  Tensor keys, values;  // [B, capacity, key_heads, head_dim]
};

struct DeltaCache {
  static constexpr bool kGrows = false;
  Tensor conv;  // [B, kernel − 1, channels]: the rows that the filter still needs
  Tensor rule;  // [B, value_heads, value_dim, key_dim] f32
};

using Cache = std::variant<KeyValueCache, DeltaCache>;

// Zeros, or without memory if there is no device.
Cache make_cache(const LayerPlan& layer, std::int64_t batch, std::int64_t capacity, DType dtype,
                 Device* device);

bool grows(const Cache& cache);

// Calls function(name, tensor) with each tensor.
template <class C, class Function>
void each_tensor(C&& cache, const Function& function) {
  if (auto* past = std::get_if<KeyValueCache>(&cache)) {
    function("keys", past->keys);
    function("values", past->values);
  } else {
    auto& state = std::get<DeltaCache>(cache);
    function("conv", state.conv);
    function("rule", state.rule);
  }
}

// Of one sequence: views [1, …].
Cache part_of(const Cache& cache, std::int64_t sequence);
std::size_t bytes_of(const Cache& cache);

}  // namespace mlxtape::models
