#include "human.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <iterator>

namespace mlxtape {

namespace {

std::string scaled(double value, double step, const char* const* units, std::size_t count) {
  std::size_t unit = 0;
  while (unit + 1 < count && std::abs(value) >= step) {
    value /= step;
    ++unit;
  }
  const bool whole = unit == 0;
  const int digits = std::abs(value) < 10 ? 2 : 1;
  return fixed(value, whole ? 0 : digits) + units[unit];
}

}  // namespace

std::string fixed(double value, int digits) {
  std::array<char, 400> text{};
  std::snprintf(text.data(), text.size(), "%.*f", digits, value);
  return text.data();
}

std::string human_bytes(double bytes) {
  static constexpr const char* kUnits[] = {" bytes", " KiB", " MiB", " GiB", " TiB", " PiB"};
  return scaled(bytes, 1024, kUnits, std::size(kUnits));
}

std::string human_count(double count) {
  static constexpr const char* kUnits[] = {"", " K", " M", " B", " T"};
  return scaled(count, 1000, kUnits, std::size(kUnits));
}

std::string human_time(double seconds) {
  if (seconds < 10) return fixed(std::max(0.0, seconds), 1) + " s";
  const auto all = static_cast<std::int64_t>(std::min(std::round(seconds), 1e9));
  std::array<char, 64> text{};
  if (all < 3600) {
    std::snprintf(text.data(), text.size(), "%d:%02d", static_cast<int>(all / 60),
                  static_cast<int>(all % 60));
  } else {
    std::snprintf(text.data(), text.size(), "%d:%02d:%02d", static_cast<int>(all / 3600),
                  static_cast<int>(all / 60 % 60), static_cast<int>(all % 60));
  }
  return text.data();
}

}  // namespace mlxtape
