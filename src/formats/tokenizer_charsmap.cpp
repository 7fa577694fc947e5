#include "formats/tokenizer_charsmap.h"

#include <utf8proc.h>

#include "formats/utf8.h"
#include "mlxtape/base/error.h"

namespace mlxtape::formats {
namespace {

// One of the double array: a label and the way to its children, or a value.
struct Unit {
  std::uint32_t bits;
  bool has_value() const { return (bits >> 8 & 1U) != 0; }
  std::uint32_t value() const { return bits & 0x7FFFFFFFU; }
  std::uint32_t label() const { return bits & 0x800000FFU; }
  std::uint32_t offset() const { return bits >> 10 << ((bits & 0x200U) >> 6); }
};

constexpr std::size_t kMostGraphemeBytes = 5;  // of those that are replaced as a whole

void append_replaced(const Charsmap& map, std::string_view part, std::string& out) {
  const auto found = map.shortest(part);
  out.append(found ? found->replacement : part);
}

}  // namespace

Charsmap::Charsmap(std::string_view bytes, const std::string& who) {
  const auto fail = [&](const std::string& what) {
    throw Error(Errc::kIo, who + ": " + what);
  };
  const auto u32 = [&](std::size_t at) {
    std::uint32_t value = 0;
    for (std::size_t i = 4; i-- > 0;)
      value = value << 8 | static_cast<unsigned char>(bytes[at + i]);
    return value;
  };
  if (bytes.size() < 4) fail("a charsmap must have at least 4 bytes");
  const std::size_t trie = u32(0);
  if (trie == 0 || trie % 4 != 0 || trie > bytes.size() - 4)
    fail("the trie of a charsmap must lie in it, got " + std::to_string(trie) + " of " +
         std::to_string(bytes.size()) + " bytes");
  units_.reserve(trie / 4);
  for (std::size_t at = 4; at < 4 + trie; at += 4) units_.push_back(u32(at));
  replacements_ = bytes.substr(4 + trie);
  if (replacements_.empty() || replacements_.back() != '\0')
    fail("the replacements of a charsmap must end with a zero");
  if (!is_valid_utf8(replacements_)) fail("the replacements of a charsmap must be UTF-8");
}

template <class Fn>
void Charsmap::each_prefix(std::string_view text, Fn&& fn) const {
  std::uint32_t node = Unit{units_[0]}.offset();
  for (std::size_t i = 0; i < text.size(); ++i) {
    node ^= static_cast<unsigned char>(text[i]);
    if (node >= units_.size()) return;
    const Unit unit{units_[node]};
    if (unit.label() != static_cast<unsigned char>(text[i])) return;
    node ^= unit.offset();
    if (!unit.has_value()) continue;
    if (node >= units_.size()) return;
    if (!fn(i + 1, Unit{units_[node]}.value())) return;
  }
}

// An empty one where the value leads nowhere, or into the midst of a character.
std::string_view Charsmap::replacement(std::uint32_t value) const {
  if (value >= replacements_.size()) return {};
  if ((static_cast<unsigned char>(replacements_[value]) & 0xC0U) == 0x80U) return {};
  return replacements_.c_str() + value;
}

std::optional<Charsmap::Found> Charsmap::longest(std::string_view text) const {
  std::optional<Found> best;
  each_prefix(text, [&](std::size_t length, std::uint32_t value) {
    best = {length, replacement(value)};
    return true;
  });
  return best;
}

std::optional<Charsmap::Found> Charsmap::shortest(std::string_view text) const {
  std::optional<Found> best;
  each_prefix(text, [&](std::size_t length, std::uint32_t value) {
    best = {length, replacement(value)};
    return false;
  });
  return best;
}

std::string apply_to_graphemes(const Charsmap& map, const std::string& text,
                               const std::function<void(const std::string&)>& check) {
  std::string out;
  out.reserve(text.size());
  for (std::size_t at = 0; at < text.size();) {
    const std::size_t begin = at;
    auto c = static_cast<utf8proc_int32_t>(next_code_point(text, at));
    utf8proc_int32_t state = 0;
    for (std::size_t next = at; next < text.size(); at = next) {
      const auto d = static_cast<utf8proc_int32_t>(next_code_point(text, next));
      if (utf8proc_grapheme_break_stateful(c, d, &state)) break;
      c = d;
    }
    const std::string_view grapheme = std::string_view(text).substr(begin, at - begin);
    if (grapheme.size() <= kMostGraphemeBytes && map.shortest(grapheme)) {
      append_replaced(map, grapheme, out);
      check(out);
      continue;
    }
    for (std::size_t i = 0; i < grapheme.size();) {
      const std::size_t end = forward(grapheme, i, 1);
      append_replaced(map, grapheme.substr(i, end - i), out);
      i = end;
      check(out);
    }
  }
  return out;
}

}  // namespace mlxtape::formats
