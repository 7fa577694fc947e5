// UTF-8 as bytes, code points and Python's ideas of white space and case.
#pragma once

#include <cstddef>
#include <cstdint>
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

// "0a", for messages and escapes.
inline std::string hex_byte(unsigned char c) {
  constexpr std::string_view kDigits = "0123456789abcdef";
  return {kDigits[c >> 4U], kDigits[c & 15U]};
}

// The code point at `at`, which moves behind it. A byte that begins none counts as U+FFFD; so does
// the longest beginning of a valid one, as a whole.
char32_t next_code_point(std::string_view text, std::size_t& at);
void append_utf8(std::string& out, char32_t code_point);  // surrogates and beyond U+10FFFF: U+FFFD

bool is_valid_utf8(std::string_view text);
std::string replace_invalid_utf8(std::string_view text);  // each bad sequence becomes U+FFFD
std::size_t count_code_points(std::string_view text);     // of valid text
// Where valid UTF-8 that is only cut short begins at the end; the length where nothing is cut.
std::size_t complete_prefix(std::string_view text);

std::u32string to_code_points(std::string_view text);
std::string to_utf8(std::u32string_view points);

bool is_space(char32_t c);  // as Python's str.isspace
std::string_view trim_left(std::string_view text);
std::string_view trim_right(std::string_view text);
std::string to_lower(std::string_view text);  // one code point to one
std::string to_upper(std::string_view text);

}  // namespace mlxtape::formats
