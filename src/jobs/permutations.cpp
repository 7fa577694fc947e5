#include "permutations.h"

#include <bit>
#include <numeric>
#include <utility>

namespace mlxtape::jobs {

// Uniform in 0 … most: as many bits as most has, drawn again while they are too large.
std::uint32_t Permutations::up_to(std::uint32_t most) {
  if (most == 0) return 0;
  const std::uint32_t mask = UINT32_MAX >> static_cast<unsigned>(std::countl_zero(most));
  std::uint32_t drawn = 0;
  do {
    drawn = static_cast<std::uint32_t>(bits_()) & mask;
  } while (drawn > most);
  return drawn;
}

std::vector<std::int64_t> Permutations::next(std::int64_t n) {
  std::vector<std::int64_t> order(static_cast<std::size_t>(n));
  std::iota(order.begin(), order.end(), std::int64_t{0});
  for (std::size_t i = order.size(); i-- > 1;) {
    std::swap(order[i], order[up_to(static_cast<std::uint32_t>(i))]);
  }
  return order;
}

}  // namespace mlxtape::jobs
