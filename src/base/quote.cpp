#include "mlxtape/base/quote.h"

#include "base/utf8_bytes.h"

namespace mlxtape {
namespace {

// What a terminal obeys beyond ASCII: U+0080 to U+009F, U+2028 to U+202E and U+2066 to U+2069. 0: none of them.
unsigned control_code(std::string_view character) {
  const unsigned first = byte(character[0]), second = byte(character[1]);
  if (character.size() == 2) return first == 0xC2 && second < 0xA0 ? second : 0;
  if (character.size() != 3 || first != 0xE2) return 0;
  const unsigned code = 0x2000 | (second & 0x3FU) << 6 | (byte(character[2]) & 0x3FU);
  return (code >= 0x2028 && code <= 0x202E) || (code >= 0x2066 && code <= 0x2069) ? code : 0;
}

void append_ascii(std::string& out, char c, std::string_view keep) {
  constexpr std::string_view kNamed = "\n\r\t", kNames = "nrt";
  if ((byte(c) >= 0x20 && byte(c) != 0x7F) || keep.find(c) != keep.npos) {
    out += c;
  } else if (const std::size_t i = kNamed.find(c); i != kNamed.npos) {
    out += '\\', out += kNames[i];
  } else {
    out += "\\x" + hex_byte(byte(c));
  }
}

}  // namespace

std::string escaped(std::string_view text, std::string_view keep) {
  std::string out;
  out.reserve(text.size());
  for (std::size_t at = 0; at < text.size();) {
    const std::size_t length = utf8_length(text, at);
    if (length == 0) {
      out += "\\x" + hex_byte(byte(text[at++]));
      continue;
    }
    if (length == 1) {
      append_ascii(out, text[at], keep);
    } else if (const unsigned code = control_code(text.substr(at, length)); code != 0) {
      out += "\\u" + hex_byte(static_cast<unsigned char>(code >> 8)) +
             hex_byte(static_cast<unsigned char>(code & 0xFF));
    } else {
      out += text.substr(at, length);
    }
    at += length;
  }
  return out;
}

std::string shown(std::string_view text, std::size_t most) {
  if (text.size() <= most) return escaped(text);
  std::size_t end = most;  // not in the midst of a character
  while (end > 0 && most - end < 3 && (byte(text[end]) & 0xC0U) == 0x80) --end;
  return escaped(text.substr(0, end)) + "... (" + std::to_string(text.size()) + " bytes)";
}

}  // namespace mlxtape
