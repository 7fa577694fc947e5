#include "mlxtape/models/cache.h"

#include "mlxtape/core/device.h"

namespace mlxtape::models {

Cache make_cache(const LayerPlan& layer, std::int64_t batch, std::int64_t capacity, DType dtype,
                 Device* device) {
  const auto zeros = [&](const Shape& shape, DType type) {
    return device == nullptr ? Tensor::meta(shape, type) : device->zeros(shape, type);
  };
  if (const AttentionPlan* attention = layer.attention()) {
    // Zeros: a saved state has rows that a short sequence has not.
    const Shape shape{batch, capacity, attention->key_heads, attention->head_dim};
    return KeyValueCache{zeros(shape, dtype), zeros(shape, dtype)};
  }
  const DeltaPlan& delta = *layer.delta();
  return DeltaCache{zeros({batch, delta.kernel - 1, delta.channels()}, dtype),
                    zeros({batch, delta.value_heads, delta.value_dim, delta.key_dim}, DType::kF32)};
}

bool grows(const Cache& cache) {
  return std::visit([](const auto& kind) { return kind.kGrows; }, cache);
}

Cache part_of(const Cache& cache, std::int64_t sequence) {
  Cache part = cache;
  each_tensor(part, [&](const char*, Tensor& t) { t = t.slice(0, sequence, sequence + 1); });
  return part;
}

std::size_t bytes_of(const Cache& cache) {
  std::size_t sum = 0;
  each_tensor(cache, [&](const char*, const Tensor& t) { sum += t.bytes(); });
  return sum;
}

}  // namespace mlxtape::models
