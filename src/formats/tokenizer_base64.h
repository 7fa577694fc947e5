// Bytes as base64, which JSON files and lists of tokens keep them in.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>

namespace mlxtape::formats {

// The standard alphabet; padding may be left out. False where the text is anything else; then out is spoilt.
inline bool append_base64(std::string& out, std::string_view text) {
  static constexpr auto kDigits = [] {
    std::array<std::int8_t, 256> table{};
    table.fill(-1);
    constexpr std::string_view kAlphabet =
        "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    for (std::size_t i = 0; i < kAlphabet.size(); ++i)
      table[static_cast<unsigned char>(kAlphabet[i])] = static_cast<std::int8_t>(i);
    return table;
  }();
  const std::size_t length = text.size();
  while (!text.empty() && text.back() == '=') text.remove_suffix(1);
  const std::size_t padding = length - text.size();
  if (text.size() % 4 == 1 || padding > 2 || (padding > 0 && length % 4 != 0)) return false;
  std::uint32_t bits = 0;
  int held = 0;
  for (const char c : text) {
    const int digit = kDigits[static_cast<unsigned char>(c)];
    if (digit < 0) return false;
    bits = bits << 6 | static_cast<std::uint32_t>(digit);
    held += 6;
    if (held < 8) continue;
    held -= 8;
    out.push_back(static_cast<char>(bits >> held & 0xFFU));
  }
  return (bits & ((1U << held) - 1)) == 0;
}

}  // namespace mlxtape::formats
