#include "formats/tokenizer_normalize.h"

#include <algorithm>

#include <utf8proc.h>

#include "formats/tokenizer_base64.h"
#include "formats/tokenizer_json.h"
#include "formats/tokenizer_model.h"
#include "formats/utf8.h"

namespace mlxtape::formats {
namespace {

// What a step may make of a text: files can ask for more than there is memory. Real ones make three times as much of it.
class Limit {
 public:
  explicit Limit(std::size_t bytes) : most_(64 * bytes + 65536) {}
  void check(const std::string& text) const {
    if (text.size() <= most_) return;
    throw Error(Errc::kArgument,
                "tokenizer: the normalizer may make a text at most 64 times as long, and got to " +
                    std::to_string(text.size()) + " bytes");
  }

 private:
  std::size_t most_;
};

constexpr std::string_view kSpaceSymbol = "\xE2\x96\x81";  // ▁

std::string replace_text(const ReplaceText& step, std::string text, const Limit& limit) {
  std::size_t found = text.find(step.text);
  if (found == text.npos) return text;
  std::string out;
  out.reserve(text.size() + text.size() / 4);
  std::size_t at = 0;
  for (; found != text.npos; found = text.find(step.text, at)) {
    out.append(text, at, found - at).append(step.content);
    at = found + step.text.size();
    limit.check(out);
  }
  return out.append(text, at);
}

std::string replace_regex(const ReplaceRegex& step, const std::string& text, const Limit& limit) {
  std::vector<Regex::Match> matches;
  step.pattern.find_all(text, matches);
  std::string out;
  std::size_t at = 0;
  for (const auto& [begin, end] : matches) {
    out.append(text, at, begin - at).append(step.content);
    at = end;
    limit.check(out);
  }
  return out.append(text, at);
}

std::string strip(const Strip& step, std::string_view text) {
  while (step.left && !text.empty()) {
    std::size_t at = 0;
    if (!is_white_space(next_code_point(text, at))) break;
    text.remove_prefix(at);
  }
  while (step.right && !text.empty()) {
    const std::size_t begin = backward(text, text.size(), 1);
    std::size_t at = begin;
    if (!is_white_space(next_code_point(text, at))) break;
    text = text.substr(0, begin);
  }
  return std::string(text);
}

// Code point by code point, so that no letter depends on its neighbours. One of them becomes two.
std::string lowercase(std::string_view text) {
  std::string out;
  out.reserve(text.size());
  for (std::size_t at = 0; at < text.size();) {
    const char32_t c = next_code_point(text, at);
    if (c == 0x130) {
      out += "i\u0307";
    } else {
      append_utf8(out, to_lower(c));
    }
  }
  return out;
}

std::string strip_accents(std::string_view text) {
  std::string out;
  for (std::size_t at = 0; at < text.size();) {
    const std::size_t begin = at;
    const auto kind = utf8proc_category(static_cast<utf8proc_int32_t>(next_code_point(text, at)));
    const bool mark = kind == UTF8PROC_CATEGORY_MN || kind == UTF8PROC_CATEGORY_MC ||
                      kind == UTF8PROC_CATEGORY_ME;
    if (!mark) out += text.substr(begin, at - begin);
  }
  return out;
}

// What the text begins with, as SentencePiece's table has it, and how long it is there. A byte that is no UTF-8 is no
// U+FFFD to the table.
Charsmap::Found next_form(const SentencePieceForm& form, std::string_view text) {
  if (form.words != nullptr) {
    if (const std::size_t length = form.words->prefix_length(text); length > 0)
      return {length, text.substr(0, length)};
  }
  if (form.map != nullptr) {
    if (const auto found = form.map->longest(text)) return *found;
  }
  const std::size_t length = utf8_length(text, 0);
  return length > 0 ? Charsmap::Found{length, text.substr(0, length)}
                    : Charsmap::Found{1, "\uFFFD"};
}

// A part between two tokens that are cut out is no beginning and no end, so nothing is put before or behind it.
std::string sentence_piece_form(const SentencePieceForm& form, std::string_view text, bool starts,
                                bool ends, const Limit& limit) {
  const std::string_view space = form.escape_whitespaces ? kSpaceSymbol : " ";
  while (form.remove_extra_whitespaces && starts && !text.empty()) {
    const Charsmap::Found next = next_form(form, text);
    if (next.replacement != " ") break;
    text.remove_prefix(next.length);
  }
  if (text.empty()) return {};
  std::string out;
  out.reserve(text.size() + text.size() / 2);
  const bool prefix = form.add_dummy_prefix && !form.whitespace_as_suffix && starts;
  if (prefix) out += space;
  bool after_space = form.remove_extra_whitespaces && starts;
  while (!text.empty()) {
    const Charsmap::Found next = next_form(form, text);
    std::string_view piece = next.replacement;
    while (after_space && piece.starts_with(' ')) piece.remove_prefix(1);
    for (const char c : piece) {
      if (c == ' ') {
        out += space;
      } else {
        out += c;
      }
    }
    limit.check(out);
    if (!piece.empty()) after_space = form.remove_extra_whitespaces && piece.ends_with(' ');
    text.remove_prefix(next.length);
  }
  while (form.remove_extra_whitespaces && ends && out.ends_with(space))
    out.resize(out.size() - space.size());
  if (form.add_dummy_prefix && form.whitespace_as_suffix && ends) out += space;
  return out;
}

struct Run {
  std::string text;
  bool starts, ends;
  const Limit& limit;
  std::string operator()(const UnicodeForm& form) { return unicode_form(form, std::move(text)); }
  std::string operator()(const ReplaceText& step) {
    return replace_text(step, std::move(text), limit);
  }
  std::string operator()(const ReplaceRegex& step) const {
    return replace_regex(step, text, limit);
  }
  std::string operator()(const Prepend& step) { return text.empty() ? text : step.text + text; }
  std::string operator()(const Strip& step) const { return strip(step, text); }
  std::string operator()(const Lowercase&) const { return lowercase(text); }
  std::string operator()(const StripAccents&) const { return strip_accents(text); }
  std::string operator()(const SpellBytes&) const { return letters_of(text); }
  std::string operator()(const Precompiled& step) const {
    return apply_to_graphemes(*step.map, text, [&](const std::string& out) { limit.check(out); });
  }
  std::string operator()(const SentencePieceForm& form) const {
    return sentence_piece_form(form, text, starts, ends, limit);
  }
};

// Standard base64 with padding, as JSON files keep bytes.
std::string from_base64(std::string_view text, const std::string& who) {
  std::string out;
  if (!append_base64(out, text)) refuse(who, "precompiled_charsmap must be base64");
  return out;
}

Normalizer read_normalizer(const std::string& type, const Json& step, const std::string& who) {
  if (type == "NFC" || type == "NFD" || type == "NFKC" || type == "NFKD")
    return UnicodeForm{type.back() == 'C', type.size() == 4};
  if (type == "Replace") {
    const Pattern pattern = read_pattern(step, who);
    const std::string& content = member(step, "content", who).string();
    if (!pattern.text.empty()) return ReplaceText{pattern.text, content};
    return ReplaceRegex{pattern.compiled(who), content};
  }
  if (type == "Prepend") return Prepend{member(step, "prepend", who).string()};
  if (type == "Strip")
    return Strip{flag(step, "strip_left", true), flag(step, "strip_right", true)};
  if (type == "Lowercase") return Lowercase{};
  if (type == "StripAccents") return StripAccents{};
  if (type == "ByteLevel") return SpellBytes{};
  if (type == "Precompiled") {
    const std::string bytes = from_base64(member(step, "precompiled_charsmap", who).string(), who);
    return Precompiled{std::make_shared<const Charsmap>(bytes, who)};
  }
  refuse(who, "the normalizer '" + shown(type) + "' is not supported");
}

}  // namespace

std::vector<Normalizer> read_normalizers(const Json& json, const std::string& who) {
  std::vector<Normalizer> out;
  for (const Json* step : steps_of(json, "normalizers", who))
    out.push_back(read_normalizer(member(*step, "type", who).string(), *step, who));
  return out;
}

std::string normalize(const std::vector<Normalizer>& steps, std::string text, bool starts,
                      bool ends) {
  const Limit limit(text.size());
  for (const Normalizer& step : steps) {
    text = std::visit(Run{std::move(text), starts, ends, limit}, step);
    limit.check(text);
  }
  return text;
}

}  // namespace mlxtape::formats
