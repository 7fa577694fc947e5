#include "mlxtape/models/cache.h"

#include <algorithm>
#include <vector>

#include "mlxtape/core/device.h"

namespace mlxtape::models {

namespace {

// A tensor with more rows of tokens, of which the first `used` are as they were.
Tensor with_rows(CommandEncoder& encoder, const Tensor& t, std::int64_t used, std::int64_t rows) {
  Shape shape = t.shape();
  shape[1] = rows;
  const Tensor more = encoder.zeros(shape, t.dtype());
  encoder.copy(t.slice(1, 0, used), more.slice(1, 0, used));
  encoder.commit_and_wait();
  return more;
}

}  // namespace

Tensor RingPlaces::of(Device& device, std::int64_t rows, std::int64_t capacity) {
  Tensor& places = made_[{rows, capacity}];
  if (!places.defined()) {
    std::vector<std::int32_t> numbers(static_cast<std::size_t>(capacity));
    for (std::size_t p = 0; p < numbers.size(); ++p) {
      numbers[p] = static_cast<std::int32_t>(static_cast<std::int64_t>(p) % rows);
    }
    const auto encoder = device.make_encoder();
    places = encoder->empty({capacity}, DType::kI32);
    encoder->upload(numbers.data(), places.bytes(), places);
    encoder->commit_and_wait();
  }
  return places;
}

void KeyValueCache::grow(CommandEncoder& encoder, std::int64_t used, std::int64_t capacity,
                         RingPlaces&) {
  keys = with_rows(encoder, keys, used, capacity);
  values = with_rows(encoder, values, used, capacity);
}

void WindowCache::grow(CommandEncoder& encoder, std::int64_t used, std::int64_t capacity,
                       RingPlaces& places_of) {
  const std::int64_t rows = std::min(window, capacity);
  if (rows > keys.dim(1)) {  // nothing has been overwritten yet: rows are positions
    keys = with_rows(encoder, keys, used, rows);
    values = with_rows(encoder, values, used, rows);
  }
  if (rows == window && window > 1) {
    places = places_of.of(encoder.device(), window - 1, capacity);
  }
}

void DeltaCache::clear(CommandEncoder& encoder) const {
  for (const Tensor& t : {conv, rule}) encoder.copy(encoder.zeros(t.shape(), t.dtype()), t);
}

Cache make_cache(const LayerPlan& layer, std::int64_t batch, std::int64_t capacity, DType dtype,
                 Device* device, bool rings, RingPlaces& places) {
  const auto zeros = [&](const Shape& shape, DType type) {
    return device == nullptr ? Tensor::meta(shape, type) : device->zeros(shape, type);
  };
  if (const AttentionPlan* attention = layer.attention()) {
    const std::int64_t window = rings ? attention->window : 0;
    const std::int64_t rows = window > 0 ? std::min(window, capacity) : capacity;
    // Zeros: a saved state has rows that a short sequence has not.
    const Shape shape{batch, rows, attention->key_heads, attention->head_dim};
    if (window == 0) return KeyValueCache{zeros(shape, dtype), zeros(shape, dtype)};
    WindowCache ring{zeros(shape, dtype), zeros(shape, dtype), {}, window};
    if (device != nullptr && rows == window && window > 1) {
      ring.places = places.of(*device, window - 1, capacity);
    }
    return ring;
  }
  const DeltaPlan& delta = *layer.delta();
  return DeltaCache{zeros({batch, delta.kernel - 1, delta.channels()}, dtype),
                    zeros({batch, delta.value_heads, delta.value_dim, delta.key_dim}, DType::kF32)};
}

bool forgets(const Cache& cache) {
  return std::visit([](const auto& kind) { return kind.forgets(); }, cache);
}

bool is_marked(const Cache& cache) {
  return std::visit([](const auto& kind) { return kind.kMarked; }, cache);
}

void expect_trim(const Cache& cache, std::int64_t from, std::int64_t to) {
  if (to == from || to == 0) return;
  std::visit(
      [&](const auto& kind) {
        if (kind.can_trim(from, to)) return;
        throw Error(Errc::kArgument,
                    "state: " + kind.why_not() + ": take a snapshot to return to, and restore it");
      },
      cache);
}

void clear(CommandEncoder& encoder, const Cache& cache) {
  std::visit([&](const auto& kind) { kind.clear(encoder); }, cache);
}

void grow(CommandEncoder& encoder, Cache& cache, std::int64_t used, std::int64_t capacity,
          RingPlaces& places) {
  std::visit([&](auto& kind) { kind.grow(encoder, used, capacity, places); }, cache);
}

Tensor used_of(const Cache& cache, const Tensor& t, std::int64_t tokens) {
  return std::visit([&](const auto& kind) { return kind.used(t, tokens); }, cache);
}

std::size_t bytes_of(const Cache& cache) {
  std::size_t sum = 0;
  each_tensor(cache, [&](const char*, const Tensor& t) { sum += t.bytes(); });
  return sum;
}

Cache part_of(const Cache& cache, std::int64_t sequence) {
  Cache part = cache;
  each_tensor(part, [&](const char*, Tensor& t) { t = t.slice(0, sequence, sequence + 1); });
  return part;
}

Cache copy_of(CommandEncoder& encoder, const Cache& cache) {
  Cache copy = cache;
  each_tensor(copy, [&](const char*, Tensor& t) {
    const Tensor own = encoder.empty(t.shape(), t.dtype());
    encoder.copy(t, own);
    t = own;
  });
  return copy;
}

void copy_into(CommandEncoder& encoder, const Cache& from, const Cache& to) {
  std::vector<Tensor> theirs;
  each_tensor(from, [&](const char*, const Tensor& t) { theirs.push_back(t); });
  std::size_t at = 0;
  each_tensor(to, [&](const char*, const Tensor& t) {
    const Tensor& source = theirs[at++];
    encoder.copy(source, t.dim(1) == source.dim(1) ? t : t.slice(1, 0, source.dim(1)));
  });
}

}  // namespace mlxtape::models
