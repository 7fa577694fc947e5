// UTF-8: what a character is, and how one is written.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace mlxtape::formats {

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

inline void append_utf8(std::string& out, unsigned code) {
  const auto put = [&out](unsigned value) {
    out.push_back(static_cast<char>(value));
  };
  if (code < 0x80) {
    put(code);
    return;
  }
  if (code < 0x800) {
    put(0xC0U | code >> 6U);
  } else if (code < 0x10000) {
    put(0xE0U | code >> 12U);
    put(0x80U | (code >> 6U & 0x3FU));
  } else {
    put(0xF0U | code >> 18U);
    put(0x80U | (code >> 12U & 0x3FU));
    put(0x80U | (code >> 6U & 0x3FU));
  }
  put(0x80U | (code & 0x3FU));
}

// "0a", for messages and escapes.
inline std::string hex_byte(unsigned char c) {
  constexpr std::string_view kDigits = "0123456789abcdef";
  return {kDigits[c >> 4U], kDigits[c & 15U]};
}

}  // namespace mlxtape::formats
