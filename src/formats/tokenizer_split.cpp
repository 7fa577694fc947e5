#include "formats/tokenizer_split.h"

#include "formats/tokenizer_json.h"
#include "formats/utf8.h"

namespace mlxtape::formats {
namespace {

using Behavior = Split::Behavior;

// What GPT-2 cuts words by, and ByteLevel does unless it is told not to.
constexpr const char* kGpt2Words =
    R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";
// Punctuation by Unicode, and what ASCII counts for it besides.
constexpr const char* kPunctuation = R"([\p{P}$+<=>^`|~])";
// Words and what lies between them, of the characters that are no space (\w by UTS 18).
constexpr const char* kWordsAndSigns =
    R"([\p{Alphabetic}\p{M}\p{Nd}\p{Pc}\p{Join_Control}]+|[^\s\p{Alphabetic}\p{M}\p{Nd}\p{Pc}\p{Join_Control}]+)";

Behavior behavior_of(const std::string& name, const std::string& type, const std::string& who) {
  static constexpr std::pair<std::string_view, Behavior> kNames[] = {
      {"Removed", Behavior::kRemoved},
      {"Isolated", Behavior::kIsolated},
      {"MergedWithPrevious", Behavior::kMergedWithPrevious},
      {"MergedWithNext", Behavior::kMergedWithNext},
      {"Contiguous", Behavior::kContiguous}};
  for (const auto& [known, behavior] : kNames) {
    if (name == known) return behavior;
  }
  refuse(who, "the behavior '" + shown(name) + "' of " + type + " is not supported");
}

Split by_regex(const char* pattern, Behavior behavior, bool invert = false) {
  return {"", Regex(pattern), behavior, invert};
}
Split by_text(const std::string& text, Behavior behavior) {
  return {text, Regex::literal(text), behavior, false};
}

Split read_split(const Json& step, const std::string& who) {
  const Pattern pattern = read_pattern(step, who);
  return {pattern.text, pattern.compiled(who),
          behavior_of(member(step, "behavior", who).string(), "Split", who),
          flag(step, "invert", false)};
}

// A text of one character; files of the first versions call it str_rep.
std::string read_replacement(const Json& step, const std::string& who) {
  const std::string& text = member(step, "replacement", who).string();
  if (count_code_points(text) != 1)
    refuse(who, "the replacement of Metaspace must be one character, got '" + shown(text) + "'");
  return text;
}

void add_metaspace(const Json& step, std::vector<Splitter>& out, const std::string& who) {
  using Prepend = SpellSpaces::Prepend;
  const std::string replacement = read_replacement(step, who);
  Prepend prepend = flag(step, "add_prefix_space", true) ? Prepend::kAlways : Prepend::kNever;
  if (const Json* scheme = step.find("prepend_scheme")) {
    const std::string& name = scheme->string();
    if (name != "always" && name != "first" && name != "never")
      refuse(who, "the prepend_scheme of Metaspace must be always, first or never, got '" +
                      shown(name) + "'");
    prepend = name == "always"  ? Prepend::kAlways
              : name == "first" ? Prepend::kFirst
                                : Prepend::kNever;
  }
  out.emplace_back(SpellSpaces{replacement, prepend});
  if (flag(step, "split", true)) out.emplace_back(by_text(replacement, Behavior::kMergedWithNext));
}

void add_byte_level(const Json& step, std::vector<Splitter>& out) {
  if (flag(step, "add_prefix_space", true)) out.emplace_back(PrefixSpace{});
  if (flag(step, "use_regex", true)) out.emplace_back(by_regex(kGpt2Words, Behavior::kIsolated));
  out.emplace_back(SpellWords{});
}

void add_step(const std::string& type, const Json& step, std::vector<Splitter>& out,
              const std::string& who) {
  if (type == "Split") {
    out.emplace_back(read_split(step, who));
  } else if (type == "Digits") {
    out.emplace_back(by_regex("\\p{N}", flag(step, "individual_digits", false)
                                            ? Behavior::kIsolated
                                            : Behavior::kContiguous));
  } else if (type == "ByteLevel") {
    add_byte_level(step, out);
  } else if (type == "Metaspace") {
    add_metaspace(step, out, who);
  } else if (type == "Whitespace") {
    out.emplace_back(by_regex(kWordsAndSigns, Behavior::kRemoved, true));
  } else if (type == "WhitespaceSplit") {
    out.emplace_back(by_regex("\\s", Behavior::kRemoved));
  } else if (type == "BertPreTokenizer") {
    out.emplace_back(by_regex("\\s", Behavior::kRemoved));
    out.emplace_back(by_regex(kPunctuation, Behavior::kIsolated));
  } else if (type == "Punctuation") {
    const Json* name = step.find("behavior");
    out.emplace_back(by_regex(kPunctuation, name == nullptr
                                                ? Behavior::kIsolated
                                                : behavior_of(name->string(), type, who)));
  } else if (type == "CharDelimiterSplit") {
    const std::string& delimiter = member(step, "delimiter", who).string();
    if (delimiter.empty()) refuse(who, "the delimiter of CharDelimiterSplit must not be empty");
    out.emplace_back(by_text(delimiter, Behavior::kRemoved));
  } else {
    refuse(who, "the pre-tokenizer '" + shown(type) + "' is not supported");
  }
}

void find_text(std::string_view text, std::string_view part, std::vector<Regex::Match>& out) {
  out.clear();
  for (std::size_t at = 0; (at = text.find(part, at)) != text.npos; at += part.size())
    out.emplace_back(at, at + part.size());
}

}  // namespace

std::string SpellSpaces::spelled(std::string_view text, bool starts) const {
  std::string out;
  out.reserve(text.size() + text.size() / 2 + replacement.size());
  const bool begins = text.starts_with(replacement) || text.starts_with(' ');
  if (!begins && (prepend == Prepend::kAlways || (prepend == Prepend::kFirst && starts)))
    out += replacement;
  for (const char c : text) {
    if (c == ' ') {
      out += replacement;
    } else {
      out += c;
    }
  }
  return out;
}

PreTokenizer read_pre_tokenizer(const Json& json, bool takes_bytes, const std::string& who) {
  PreTokenizer out;
  for (const Json* step : steps_of(json, "pretokenizers", who))
    add_step(member(*step, "type", who).string(), *step, out.steps, who);
  std::size_t spellings = 0;
  for (const Splitter& step : out.steps) spellings += std::holds_alternative<SpellWords>(step);
  // Each of them spells what the one before has spelt, in twice as many bytes.
  if (spellings > 2)
    refuse(who,
           "ByteLevel must come at most twice, got it " + std::to_string(spellings) + " times");
  out.byte_level =
      takes_bytes && spellings == 1 && std::holds_alternative<SpellWords>(out.steps.back());
  if (out.byte_level) out.steps.pop_back();
  return out;
}

void Words::cut(std::string_view text, std::size_t step) {
  const Split& split = std::get<Split>(steps_[step]);
  std::vector<Regex::Match>& matches = matches_[step];
  std::vector<Regex::Match>& out = pieces_[step];
  if (split.text.empty()) {
    split.pattern.find_all(text, matches);
  } else {
    find_text(text, split.text, matches);
  }
  out.clear();
  bool before = false;   // the piece before was a match
  bool waiting = false;  // the last piece is a match that the next one is merged with
  const auto put = [&](std::size_t begin, std::size_t end, bool match) {
    if (begin == end) return;
    match = match != split.invert;
    const bool joins = (split.behavior == Behavior::kContiguous && match == before) ||
                       (split.behavior == Behavior::kMergedWithPrevious && match && !before) ||
                       (split.behavior == Behavior::kMergedWithNext && !match && waiting);
    if (split.behavior == Behavior::kRemoved && match) {
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

}  // namespace mlxtape::formats
