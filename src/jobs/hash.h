// FNV-1a of 64 bits, as 16 hexadecimal digits: tells files and settings apart. No protection from those who want to deceive.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <span>
#include <string>
#include <string_view>

namespace mlxtape::jobs {

class Hash {
 public:
  void add(std::span<const std::byte> bytes) {
    for (const std::byte b : bytes) add_byte(static_cast<std::uint64_t>(b));
  }
  void add(std::string_view text) { add(std::as_bytes(std::span(text.data(), text.size()))); }
  void add(std::int64_t value) {  // its bytes, the lowest first
    for (unsigned shift = 0; shift < 64; shift += 8) {
      add_byte((static_cast<std::uint64_t>(value) >> shift) & 255U);
    }
  }
  std::string digits() const {
    std::array<char, 17> text{};
    std::snprintf(text.data(), text.size(), "%016llx", static_cast<unsigned long long>(state_));
    return text.data();
  }

 private:
  void add_byte(std::uint64_t byte) { state_ = (state_ ^ byte) * 0x100000001b3; }

  std::uint64_t state_ = 0xcbf29ce484222325;
};

}  // namespace mlxtape::jobs
