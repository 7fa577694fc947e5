// A number as text that tells any two apart.
#pragma once

#include <array>
#include <cstdio>
#include <string>

namespace mlxtape::jobs {

inline std::string digits(double value) {
  std::array<char, 32> text{};
  std::snprintf(text.data(), text.size(), "%.17g", value);
  return text.data();
}

}  // namespace mlxtape::jobs
