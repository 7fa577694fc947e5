#include "support/indices.h"

namespace mlxtape::test {

std::int64_t count_of(const Shape& shape) { return *element_count(shape); }

std::vector<double> random_indices(Noise& noise, std::int64_t n, std::int64_t length, DType type) {
  std::vector<double> v;
  for (std::int64_t i = 0; i < n; ++i) {
    std::int64_t index = length == 0 ? 7 : noise.below(length);
    if (is_signed(type) && noise.below(3) == 0) index -= length;
    if (noise.below(20) == 0) index = (noise.below(2) == 0 ? 100 : 0) + length;
    if (is_signed(type) && noise.below(20) == 0) index = -length - 1;
    v.push_back(static_cast<double>(index));
  }
  return v;
}

Tensor random_ids(CommandEncoder& encoder, const Shape& shape, std::int64_t length) {
  Noise noise(7);
  std::vector<std::int32_t> ids;
  for (std::int64_t i = 0; i < count_of(shape); ++i) {
    ids.push_back(static_cast<std::int32_t>(noise.below(length)));
  }
  const Tensor t = encoder.empty(shape, DType::kI32);
  encoder.upload(ids.data(), t.bytes(), t);
  return t;
}

}  // namespace mlxtape::test
