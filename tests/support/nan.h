// What a NaN reaches: the places of NaN among numbers, to be compared with those that it should be at.
#pragma once

#include <cmath>
#include <cstddef>
#include <numeric>
#include <vector>

namespace mlxtape::test {

inline std::vector<std::size_t> nans_of(const std::vector<double>& values) {
  std::vector<std::size_t> places;
  for (std::size_t i = 0; i < values.size(); ++i) {
    if (std::isnan(values[i])) places.push_back(i);
  }
  return places;
}

// count places from first on
inline std::vector<std::size_t> places(std::size_t first, std::size_t count) {
  std::vector<std::size_t> all(count);
  std::iota(all.begin(), all.end(), first);
  return all;
}

}  // namespace mlxtape::test
