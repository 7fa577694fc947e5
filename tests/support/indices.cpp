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

}  // namespace mlxtape::test
