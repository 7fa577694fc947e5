#include "formats/utf8.h"

#include <utf8proc.h>

namespace mlxtape::formats {
namespace {

constexpr char32_t kReplacement = 0xFFFD;

std::uint8_t byte_at(std::string_view text, std::size_t i) {
  return static_cast<std::uint8_t>(text[i]);
}

// What may follow a first byte: how many bytes there are in all (0: it is none), and the range of the second.
struct Lead {
  int length;
  std::uint8_t low, high;
};
Lead lead_of(std::uint8_t b) {
  if (b < 0x80) return {1, 0, 0};
  if (b < 0xC2) return {0, 0, 0};
  if (b < 0xE0) return {2, 0x80, 0xBF};
  if (b == 0xE0) return {3, 0xA0, 0xBF};
  if (b == 0xED) return {3, 0x80, 0x9F};
  if (b < 0xF0) return {3, 0x80, 0xBF};
  if (b == 0xF0) return {4, 0x90, 0xBF};
  if (b < 0xF4) return {4, 0x80, 0xBF};
  if (b == 0xF4) return {4, 0x80, 0x8F};
  return {0, 0, 0};
}

// Bytes at `at` that are valid together, up to a whole code point.
int valid_bytes(std::string_view text, std::size_t at, const Lead& lead) {
  if (lead.length == 0) return 0;
  int n = 1;
  while (n < lead.length && at + static_cast<std::size_t>(n) < text.size()) {
    const std::uint8_t b = byte_at(text, at + static_cast<std::size_t>(n));
    if (b < (n == 1 ? lead.low : 0x80) || b > (n == 1 ? lead.high : 0xBF)) break;
    ++n;
  }
  return n;
}

// False where a bad sequence was passed.
bool advance(std::string_view text, std::size_t& at, char32_t& c) {
  const std::uint8_t first = byte_at(text, at);
  const Lead lead = lead_of(first);
  const int n = valid_bytes(text, at, lead);
  if (n == 0 || n < lead.length) {
    at += n == 0 ? 1 : static_cast<std::size_t>(n);
    c = kReplacement;
    return false;
  }
  c = n == 1 ? first : first & (0xFFU >> (n + 1));
  for (int i = 1; i < n; ++i)
    c = c << 6 | (byte_at(text, at + static_cast<std::size_t>(i)) & 0x3FU);
  at += static_cast<std::size_t>(n);
  return true;
}

template <class Map>
std::string mapped(std::string_view text, Map map) {
  std::string out;
  out.reserve(text.size());
  for (std::size_t at = 0; at < text.size();) append_utf8(out, map(next_code_point(text, at)));
  return out;
}

}  // namespace

char32_t next_code_point(std::string_view text, std::size_t& at) {
  char32_t c = 0;
  advance(text, at, c);
  return c;
}

void append_utf8(std::string& out, char32_t c) {
  if (c > 0x10FFFF || (c >= 0xD800 && c <= 0xDFFF)) c = kReplacement;
  const auto put = [&](char32_t b) {
    out.push_back(static_cast<char>(b));
  };
  if (c < 0x80) {
    put(c);
  } else if (c < 0x800) {
    put(0xC0 | c >> 6), put(0x80 | (c & 0x3F));
  } else if (c < 0x10000) {
    put(0xE0 | c >> 12), put(0x80 | (c >> 6 & 0x3F)), put(0x80 | (c & 0x3F));
  } else {
    put(0xF0 | c >> 18), put(0x80 | (c >> 12 & 0x3F)), put(0x80 | (c >> 6 & 0x3F)),
        put(0x80 | (c & 0x3F));
  }
}

bool is_valid_utf8(std::string_view text) {
  char32_t c = 0;
  for (std::size_t at = 0; at < text.size();) {
    if (byte_at(text, at) < 0x80) {
      ++at;
    } else if (!advance(text, at, c)) {
      return false;
    }
  }
  return true;
}

std::string replace_invalid_utf8(std::string_view text) {
  return mapped(text, [](char32_t c) { return c; });
}

std::size_t count_code_points(std::string_view text) {
  std::size_t n = 0;
  for (const char c : text) n += (static_cast<std::uint8_t>(c) & 0xC0) != 0x80;
  return n;
}

std::size_t forward(std::string_view text, std::size_t at, std::size_t code_points) {
  for (; code_points > 0 && at < text.size(); --code_points) {
    do ++at;
    while (at < text.size() && (byte_at(text, at) & 0xC0) == 0x80);
  }
  return at;
}

std::size_t backward(std::string_view text, std::size_t at, std::size_t code_points) {
  for (; code_points > 0 && at > 0; --code_points) {
    do --at;
    while (at > 0 && (byte_at(text, at) & 0xC0) == 0x80);
  }
  return at;
}

std::size_t complete_prefix(std::string_view text) {
  for (std::size_t back = 1; back <= 3 && back <= text.size(); ++back) {
    const std::size_t at = text.size() - back;
    const Lead lead = lead_of(byte_at(text, at));
    if (lead.length <= 1) continue;
    const int n = valid_bytes(text, at, lead);
    return n < lead.length && static_cast<std::size_t>(n) == back ? at : text.size();
  }
  return text.size();
}

std::u32string to_code_points(std::string_view text) {
  std::u32string out;
  for (std::size_t at = 0; at < text.size();) out.push_back(next_code_point(text, at));
  return out;
}

bool is_space(char32_t c) {
  return (c >= 9 && c <= 13) || (c >= 0x1C && c <= 0x20) || c == 0x85 || c == 0xA0 || c == 0x1680 ||
         (c >= 0x2000 && c <= 0x200A) || c == 0x2028 || c == 0x2029 || c == 0x202F || c == 0x205F ||
         c == 0x3000;
}

bool is_white_space(char32_t c) { return is_space(c) && !(c >= 0x1C && c <= 0x1F); }

std::string_view trim_left(std::string_view text) {
  for (std::size_t at = 0; at < text.size();) {
    const std::size_t here = at;
    if (!is_space(next_code_point(text, at))) return text.substr(here);
  }
  return {};
}

std::string_view trim_right(std::string_view text) {
  while (!text.empty()) {
    std::size_t begin = text.size() - 1;
    while (begin > 0 && (byte_at(text, begin) & 0xC0) == 0x80) --begin;
    std::size_t at = begin;
    if (!is_space(next_code_point(text, at)) || at != text.size()) break;
    text.remove_suffix(text.size() - begin);
  }
  return text;
}

char32_t to_lower(char32_t c) {
  return static_cast<char32_t>(utf8proc_tolower(static_cast<utf8proc_int32_t>(c)));
}
char32_t to_upper(char32_t c) {
  return static_cast<char32_t>(utf8proc_toupper(static_cast<utf8proc_int32_t>(c)));
}
std::string to_lower(std::string_view text) {
  return mapped(text, [](char32_t c) { return to_lower(c); });
}
std::string to_upper(std::string_view text) {
  return mapped(text, [](char32_t c) { return to_upper(c); });
}

}  // namespace mlxtape::formats
