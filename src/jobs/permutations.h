// Orders as numpy's RandomState draws them: seeded by one number, a permutation after the other.
#pragma once

#include <cstdint>
#include <random>
#include <vector>

namespace mlxtape::jobs {

class Permutations {
 public:
  explicit Permutations(std::uint32_t seed) : bits_(seed) {}

  // Of 0 … n − 1, n below 2^32. Each call goes on where the one before it ended.
  std::vector<std::int64_t> next(std::int64_t n);

 private:
  std::uint32_t up_to(std::uint32_t most);

  std::mt19937 bits_;  // the standard's seeding by one number is numpy's
};

}  // namespace mlxtape::jobs
