// What the CPU kernels of sort share: counts of 8-bit digits.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <utility>

namespace mlxtape::ops {

constexpr int kDigits = 256;
using Counts = std::array<std::uint32_t, kDigits>;

// counts become the place of each digit's first entry.
inline void places(Counts& counts) {
  std::uint32_t before = 0;
  for (std::uint32_t& c : counts) before += std::exchange(c, before);
}

// n entries in the order of their upper 32 bits, equal ones as they stood: in a or in b, which is returned.
inline std::uint64_t* radix_sort_upper(std::uint64_t* a, std::uint64_t* b, std::int64_t n) {
  constexpr std::size_t kPasses = 4;
  const auto digit = [](std::uint64_t e, std::size_t pass) {
    return e >> (32 + 8 * pass) & 255U;
  };
  std::array<Counts, kPasses> counts{};
  for (std::int64_t i = 0; i < n; ++i) {
    for (std::size_t p = 0; p < kPasses; ++p) ++counts[p][digit(a[i], p)];
  }
  for (std::size_t p = 0; p < kPasses; ++p) {
    Counts& place = counts[p];
    if (n == 0 || place[digit(a[0], p)] == n) continue;  // the same in all
    places(place);
    for (std::int64_t i = 0; i < n; ++i) b[place[digit(a[i], p)]++] = a[i];
    std::swap(a, b);
  }
  return a;
}

}  // namespace mlxtape::ops
