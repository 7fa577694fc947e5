// Numbers that look drawn at random, from numbers.
#pragma once

#include <cstdint>

namespace mlxtape::jobs {

// Every bit of the result depends on every bit of x (the finaliser of splitmix64).
inline std::uint64_t mixed(std::uint64_t x) {
  x += 0x9e3779b97f4a7c15;
  x = (x ^ (x >> 30U)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27U)) * 0x94d049bb133111eb;
  return x ^ (x >> 31U);
}

}  // namespace mlxtape::jobs
