// The bytes of UTF-8, one character at a time: for what reads texts and for what shows them.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace mlxtape {

inline unsigned char byte(char c) { return static_cast<unsigned char>(c); }

// Bytes of the UTF-8 character that begins at `at`, 0 where none does: no overlong form, no surrogate, nothing
// beyond U+10FFFF.
inline std::size_t utf8_length(std::string_view text, std::size_t at) {
  const unsigned lead = byte(text[at]);
  if (lead < 0x80) return 1;
  if (lead < 0xC2 || lead > 0xF4) return 0;
  const std::size_t length = lead < 0xE0 ? 2 : lead < 0xF0 ? 3 : 4;
  if (text.size() - at < length) return 0;
  const unsigned second = byte(text[at + 1]);
  const unsigned least = lead == 0xE0 ? 0xA0 : lead == 0xF0 ? 0x90 : 0x80;
  const unsigned most = lead == 0xED ? 0x9F : lead == 0xF4 ? 0x8F : 0xBF;
  if (second < least || second > most) return 0;
  for (std::size_t i = 2; i < length; ++i) {
    if ((byte(text[at + i]) & 0xC0U) != 0x80) return 0;
  }
  return length;
}

// "0a", for messages and escapes.
inline std::string hex_byte(unsigned char c) {
  constexpr std::string_view kDigits = "0123456789abcdef";
  return {kDigits[c >> 4U], kDigits[c & 15U]};
}

}  // namespace mlxtape
