#include "formats/tokenizer_steps.h"

#include <algorithm>

#include <utf8proc.h>

#include "formats/utf8.h"
#include "mlxtape/base/error.h"
#include "mlxtape/base/quote.h"

namespace mlxtape::formats {
namespace {

[[noreturn]] void fail(const std::string& who, const std::string& what) {
  throw Error(Errc::kIo, who + ": " + what);
}

const Json& member(const Json& json, const char* key, const std::string& who) {
  const Json* found = json.find(key);
  if (found == nullptr)
    fail(who, std::string("'") + key + "' must be given in " + shown(json.dump()));
  return *found;
}

bool flag(const Json& json, const char* key, bool otherwise) {
  const Json* found = json.find(key);
  return found != nullptr ? found->boolean() : otherwise;
}

// {"String": ...} or {"Regex": ...}
Regex read_pattern(const Json& json, const std::string& who) {
  const Json& pattern = member(json, "pattern", who);
  const Json *text = pattern.find("String"), *regex = pattern.find("Regex");
  if (text == nullptr && regex == nullptr)
    fail(who, "a pattern must be a String or a Regex, got " + shown(pattern.dump()));
  if (text != nullptr) {
    if (text->string().empty()) fail(who, "a pattern must not be empty");
    return Regex::literal(text->string());
  }
  try {
    return Regex(regex->string());
  } catch (const Error& e) {
    fail(who, e.what());
  }
}

// The steps of a Sequence, those of a Sequence in it too; one step; none for null.
std::vector<const Json*> steps_of(const Json& json, const char* list, const std::string& who) {
  if (json.is_null()) return {};
  if (member(json, "type", who).string() != "Sequence") return {&json};
  std::vector<const Json*> out;
  for (const Json& step : member(json, list, who).array()) {
    for (const Json* s : steps_of(step, list, who)) out.push_back(s);
  }
  return out;
}

std::string unicode_form(const UnicodeForm& form, const std::string& text) {
  // Nothing below U+0300 is put together with another, nor taken apart by composing forms.
  const bool plain = std::none_of(text.begin(), text.end(), [&](char c) {
    return static_cast<unsigned char>(c) >= (form.compose && !form.compatible ? 0xCC : 0x80);
  });
  if (plain) return text;
  const int options =
      UTF8PROC_STABLE | UTF8PROC_DECOMPOSE | (form.compatible ? UTF8PROC_COMPAT : 0);
  std::vector<utf8proc_int32_t> points;
  for (std::size_t at = 0; at < text.size();) {
    const auto c = static_cast<utf8proc_int32_t>(next_code_point(text, at));
    utf8proc_int32_t parts[32];  // the longest decomposition has 18
    const utf8proc_ssize_t n =
        utf8proc_decompose_char(c, parts, 32, static_cast<utf8proc_option_t>(options), nullptr);
    if (n < 0 || n > 32)
      throw Error(Errc::kArgument,
                  std::string("tokenizer: a text has no normal form: ") + utf8proc_errmsg(n));
    points.insert(points.end(), parts, parts + n);
  }
  // Marks behind a letter are ordered by class. utf8proc would do it too, in a time that is quadratic in their number.
  const auto class_of = [](utf8proc_int32_t c) {
    return utf8proc_get_property(c)->combining_class;
  };
  for (auto begin = points.begin(); begin != points.end();) {
    const auto end =
        std::find_if(begin, points.end(), [&](utf8proc_int32_t c) { return class_of(c) == 0; });
    std::stable_sort(begin, end, [&](utf8proc_int32_t a, utf8proc_int32_t b) {
      return class_of(a) < class_of(b);
    });
    begin = end == points.end() ? end : end + 1;
  }
  auto n = static_cast<utf8proc_ssize_t>(points.size());
  if (form.compose)
    n = utf8proc_normalize_utf32(
        points.data(), n, static_cast<utf8proc_option_t>(UTF8PROC_STABLE | UTF8PROC_COMPOSE));
  std::string out;
  out.reserve(text.size());
  for (utf8proc_ssize_t i = 0; i < n; ++i)
    append_utf8(out, static_cast<char32_t>(points[static_cast<std::size_t>(i)]));
  return out;
}

std::string replace_all(const Replace& step, const std::string& text) {
  std::vector<Regex::Match> matches;
  step.pattern.find_all(text, matches);
  std::string out;
  std::size_t at = 0;
  for (const auto& [begin, end] : matches) {
    out.append(text, at, begin - at).append(step.content);
    at = end;
  }
  return out.append(text, at);
}

struct Run {
  const std::string& text;
  std::string operator()(const UnicodeForm& form) const { return unicode_form(form, text); }
  std::string operator()(const Replace& step) const { return replace_all(step, text); }
  std::string operator()(const Prepend& step) const {
    return text.empty() ? text : step.text + text;
  }
};

Split::Behavior behavior_of(const std::string& name, const std::string& who) {
  using B = Split::Behavior;
  static constexpr std::pair<std::string_view, B> kNames[] = {
      {"Removed", B::kRemoved},
      {"Isolated", B::kIsolated},
      {"MergedWithPrevious", B::kMergedWithPrevious},
      {"MergedWithNext", B::kMergedWithNext},
      {"Contiguous", B::kContiguous}};
  for (const auto& [known, behavior] : kNames) {
    if (name == known) return behavior;
  }
  fail(who, "the behavior '" + shown(name) + "' of Split is not supported");
}

// What GPT-2 cuts words by, and ByteLevel does unless it is told not to.
constexpr const char* kGpt2Words =
    R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";

// What a word has to Unicode (UTS 18, \w).
bool is_word(std::string_view character) {
  static const Regex kWord("[\\p{Alphabetic}\\p{M}\\p{Nd}\\p{Pc}\\p{Join_Control}]");
  std::vector<Regex::Match> found;
  kWord.find_all(character, found);
  return !found.empty();
}

std::size_t last_begin(std::string_view text) {
  std::size_t at = text.size() - 1;
  while (at > 0 && (static_cast<unsigned char>(text[at]) & 0xC0) == 0x80) --at;
  return at;
}

// White space by Unicode's property: without the four separators that Python counts.
bool is_white(char32_t c) { return is_space(c) && !(c >= 0x1C && c <= 0x1F); }

}  // namespace

std::vector<Normalizer> read_normalizers(const Json& json, const std::string& who) {
  std::vector<Normalizer> out;
  for (const Json* step : steps_of(json, "normalizers", who)) {
    const std::string& type = member(*step, "type", who).string();
    if (type == "NFC" || type == "NFD" || type == "NFKC" || type == "NFKD") {
      out.emplace_back(UnicodeForm{type.back() == 'C', type.size() == 4});
    } else if (type == "Replace") {
      out.emplace_back(Replace{read_pattern(*step, who), member(*step, "content", who).string()});
    } else if (type == "Prepend") {
      out.emplace_back(Prepend{member(*step, "prepend", who).string()});
    } else {
      fail(who, "the normalizer '" + shown(type) + "' is not supported");
    }
  }
  return out;
}

std::string normalize(const std::vector<Normalizer>& steps, std::string text) {
  for (const Normalizer& step : steps) text = std::visit(Run{text}, step);
  return text;
}

std::vector<Splitter> read_splitters(const Json& json, const std::string& who) {
  std::vector<Splitter> out;
  bool bytes = false;
  for (const Json* step : steps_of(json, "pretokenizers", who)) {
    const std::string& type = member(*step, "type", who).string();
    if (bytes)
      fail(who,
           "the pre-tokenizer ByteLevel must be the last one, but " + shown(type) + " follows");
    if (type == "Split") {
      out.emplace_back(Split{read_pattern(*step, who),
                             behavior_of(member(*step, "behavior", who).string(), who),
                             flag(*step, "invert", false)});
    } else if (type == "Digits") {
      out.emplace_back(Split{Regex("\\p{N}"),
                             flag(*step, "individual_digits", false) ? Split::Behavior::kIsolated
                                                                     : Split::Behavior::kContiguous,
                             false});
    } else if (type == "ByteLevel") {
      bytes = true;
      if (flag(*step, "add_prefix_space", true)) out.emplace_back(PrefixSpace{});
      if (flag(*step, "use_regex", true))
        out.emplace_back(Split{Regex(kGpt2Words), Split::Behavior::kIsolated, false});
    } else {
      fail(who, "the pre-tokenizer '" + shown(type) + "' is not supported");
    }
  }
  if (!bytes) fail(who, "the pre-tokenizer must end with ByteLevel");
  return out;
}

void Words::cut(std::string_view text, std::size_t step) {
  const Split& split = std::get<Split>(steps_[step]);
  std::vector<Regex::Match>& matches = matches_[step];
  std::vector<Regex::Match>& out = pieces_[step];
  split.pattern.find_all(text, matches);
  out.clear();
  using B = Split::Behavior;
  bool before = false;   // the piece before was a match
  bool waiting = false;  // the last piece is a match that the next one is merged with
  const auto put = [&](std::size_t begin, std::size_t end, bool match) {
    if (begin == end) return;
    match = match != split.invert;
    const bool joins = (split.behavior == B::kContiguous && match == before) ||
                       (split.behavior == B::kMergedWithPrevious && match && !before) ||
                       (split.behavior == B::kMergedWithNext && !match && waiting);
    if (split.behavior == B::kRemoved && match) {
      // nothing is left of it
    } else if (joins && !out.empty()) {
      out.back().second = end;
    } else {
      out.emplace_back(begin, end);
    }
    before = waiting = match;
  };
  std::size_t at = 0;
  for (const auto& [begin, end] : matches) {
    put(at, begin, false);
    put(begin, end, true);
    at = end;
  }
  put(at, text.size(), false);
}

std::vector<AddedToken> read_added_tokens(const Json& json, const std::string& who) {
  std::vector<AddedToken> out;
  for (const Json& t : json.array()) {
    out.push_back({static_cast<TokenId>(
                       std::clamp<std::int64_t>(member(t, "id", who).integer(), -1, INT32_MAX)),
                   member(t, "content", who).string(), flag(t, "single_word", false),
                   flag(t, "lstrip", false), flag(t, "rstrip", false), flag(t, "normalized", true),
                   flag(t, "special", false)});
  }
  return out;
}

void AddedMatcher::add(const AddedToken& token, std::string content) {
  if (content.empty()) return;
  std::vector<Entry>& entries = by_first_[static_cast<unsigned char>(content[0])];
  const auto at = std::find_if(entries.begin(), entries.end(),
                               [&](const Entry& e) { return e.content.size() < content.size(); });
  entries.insert(at, {std::move(content), token});
}

const AddedToken* AddedMatcher::next(std::string_view text, std::size_t& begin,
                                     std::size_t& end) const {
  for (; begin < text.size(); ++begin) {
    const std::vector<Entry>& entries = by_first_[static_cast<unsigned char>(text[begin])];
    for (const Entry& e : entries) {
      if (!text.substr(begin).starts_with(e.content)) continue;
      end = begin + e.content.size();
      return &e.token;
    }
  }
  return nullptr;
}

bool AddedMatcher::widen(const AddedToken& token, std::string_view text, std::size_t done,
                         std::size_t& begin, std::size_t& end) {
  if (token.single_word) {
    const std::size_t left = begin > 0 ? last_begin(text.substr(0, begin)) : 0;
    std::size_t right = end;
    if (right < text.size()) next_code_point(text, right);
    if (is_word(text.substr(left, begin - left)) || is_word(text.substr(end, right - end)))
      return false;
  }
  while (token.lstrip && begin > done) {
    const std::size_t before = last_begin(text.substr(0, begin));
    std::size_t at = before;
    if (!is_white(next_code_point(text, at))) break;
    begin = std::max(before, done);
  }
  for (std::size_t at = end;
       token.rstrip && at < text.size() && is_white(next_code_point(text, at));)
    end = at;
  return true;
}

}  // namespace mlxtape::formats
