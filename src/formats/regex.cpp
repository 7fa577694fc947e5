#include "formats/regex.h"

#include <algorithm>

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

#include "mlxtape/base/error.h"
#include "mlxtape/base/quote.h"

namespace mlxtape::formats {
namespace {

std::string message_of(int code) {
  unsigned char text[200] = "";
  pcre2_get_error_message(code, text, sizeof text);
  return reinterpret_cast<const char*>(text);
}

// What belongs to words, in sets. To Oniguruma these six numbers do, and joiners do not.
constexpr const char* kOnigurumaWord =
    R"(\p{Alphabetic}\p{M}\p{Nd}\p{Pc}\x{B2}\x{B3}\x{B9}\x{BC}\x{BD}\x{BE})";
constexpr const char* kRustWord = R"(\p{Alphabetic}\p{M}\p{Nd}\p{Pc}\p{Join_Control})";

// Tokenizers were made with Oniguruma or Rust's libraries; what says something else to PCRE2 is put in its words.
class Translation {
 public:
  Translation(const std::string& pattern, Regex::Flavor flavor) : in_(pattern), flavor_(flavor) {}
  std::string whole() {
    std::string out;
    std::vector<std::size_t> groups;  // where those that are open begin
    std::size_t last = 0;             // where what a quantifier would repeat begins
    while (at_ < in_.size()) {
      const char c = in_[at_];
      if (const std::size_t length = interval(); length > 0) {
        const bool from_none = in_[at_ + 1] == ',';  // {,2}
        out += from_none ? "{0" + in_.substr(at_ + 1, length - 1) : in_.substr(at_, length);
        at_ += length;
        repeat_interval(out, last);
        continue;
      }
      const std::size_t begin = out.size();
      if (c == '(') groups.push_back(begin);
      if (c == ')' && !groups.empty())
        last = groups.back(), groups.pop_back();
      else if (c != '*' && c != '+' && c != '?')
        last = begin;
      out += c == '[' ? set() : letter(false);
    }
    return out;
  }

 private:
  // The length of {1}, {1,} or {1,2} here; 0: there is none.
  std::size_t interval() const {
    if (in_[at_] != '{' || at_ == 0) return 0;
    const std::size_t end = in_.find_first_not_of("0123456789,", at_ + 1);
    return end != in_.npos && in_[end] == '}' && end > at_ + 1 ? end + 1 - at_ : 0;
  }
  // a{1,3}+ keeps what it has, but to Oniguruma it is (?:a{1,3})+; and a{3}? is (?:a{3})?.
  void repeat_interval(std::string& out, std::size_t last) const {
    if (flavor_ != Regex::Flavor::kOniguruma || at_ == in_.size()) return;
    const std::string_view text = out;
    const bool exact = text.find(',', text.rfind('{')) == text.npos;
    if (in_[at_] != '+' && !(in_[at_] == '?' && exact)) return;
    out.insert(last, "(?:");
    out += ')';
  }

  // To Oniguruma white space is Unicode's property of that name; PCRE2's \s has U+180E too, which is no space any more.
  // A script's name means its own characters, not those that others share with it.
  std::string letter(bool in_set) {
    const char c = in_[at_++];
    if (c != '\\' || at_ == in_.size()) return {c};
    const char next = in_[at_++];
    if (next == 's') return "\\p{White_Space}";
    if (next == 'S') return "\\P{White_Space}";
    const std::string word = flavor_ == Regex::Flavor::kRust ? kRustWord : kOnigurumaWord;
    if (next == 'w') return in_set ? word : "[" + word + "]";
    if (next == 'W' && !in_set) return "[^" + word + "]";
    // Letters of numbers to Oniguruma, spaces to PCRE2.
    if (next == 'W' || next == 'h' || next == 'H')
      refuse(at_ - 2, "\\W in a set, \\h and \\H are not supported");
    std::string out = {c, next};
    if (at_ == in_.size() || in_[at_] != '{' ||
        std::string_view("pPxNkgo").find(next) == std::string_view::npos)
      return out;
    for (const char* script : {"Han", "Hiragana", "Katakana", "Hangul", "Latin", "Cyrillic",
                               "Greek", "Arabic", "Hebrew", "Thai", "Devanagari"}) {
      const std::string name = std::string("{") + script + "}";
      if (!std::string_view(in_).substr(at_).starts_with(name)) continue;
      at_ += name.size();
      return out + "{sc:" + script + "}";
    }
    const std::size_t end = std::min(in_.find('}', at_), in_.size() - 1) + 1;
    out += in_.substr(at_, end - at_);
    at_ = end;
    return out;
  }

  // From [ to ]. [a&&[^b]] is what is in both, which PCRE2 does not know: (?:(?![b])[a]).
  std::string set() {
    const std::size_t begin = at_;
    std::string out = {in_[at_++]};
    if (at_ < in_.size() && in_[at_] == '^') out += in_[at_++];
    if (at_ < in_.size() && in_[at_] == ']') out += in_[at_++];
    while (at_ < in_.size() && in_[at_] != ']') {
      const std::string_view rest = std::string_view(in_).substr(at_);
      if (rest.starts_with("&&[")) return both(out, begin);
      if (rest.starts_with("&&")) refuse(begin, "&& must be followed by a set");
      if (rest.starts_with("[:")) {
        const std::size_t end = in_.find(":]", at_);
        if (end == in_.npos) refuse(begin, "[: must end with :]");
        out += in_.substr(at_, end + 2 - at_);
        at_ = end + 2;
      } else if (in_[at_] == '[') {
        out += inner(begin);
      } else {
        out += letter(true);
      }
    }
    if (at_ < in_.size()) out += in_[at_++];
    return out;
  }
  // What a set in a set adds to it: [a[bc]] is [abc].
  std::string inner(std::size_t begin) {
    if (++depth_ > 1) refuse(begin, "a set in a set in a set is not supported");
    const std::string out = set();
    --depth_;
    if (out.size() < 3 || out[1] == '^' || out[1] == ']' || out[0] != '[' || out.back() != ']')
      refuse(begin, "this set in a set is not supported");
    return out.substr(1, out.size() - 2);
  }
  std::string both(const std::string& first, std::size_t begin) {
    at_ += 2;
    if (++depth_ > 1 || first.starts_with("[^")) refuse(begin, "this use of && is not supported");
    std::string second = set();
    --depth_;
    if (at_ == in_.size() || in_[at_++] != ']') refuse(begin, "a set must end behind &&[...]");
    const bool without = second.starts_with("[^");
    if (without) second.erase(1, 1);
    return (without ? "(?:(?!" : "(?:(?=") + second + ")" + first + "])";
  }
  [[noreturn]] void refuse(std::size_t at, const char* what) const {
    throw Error(Errc::kIo,
                "regex: byte " + std::to_string(at) + " of '" + shown(in_) + "': " + what);
  }

  const std::string& in_;
  const Regex::Flavor flavor_;
  std::size_t at_ = 0;
  int depth_ = 0;
};

// Memory for one thread's matches, made once: patterns are asked for every word of a text.
struct Scratch {
  pcre2_match_data* data = pcre2_match_data_create(1, nullptr);
  pcre2_match_context* context = pcre2_match_context_create(nullptr);
  pcre2_jit_stack* stack =
      pcre2_jit_stack_create(std::size_t{32} << 10, std::size_t{16} << 20, nullptr);
  Scratch() {
    if (data == nullptr || context == nullptr || stack == nullptr)
      throw Error(Errc::kOutOfMemory, "regex: no memory for a match");
    pcre2_jit_stack_assign(context, nullptr, stack);
  }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  ~Scratch() {
    pcre2_jit_stack_free(stack);
    pcre2_match_context_free(context);
    pcre2_match_data_free(data);
  }
};

}  // namespace

Regex::Regex(const std::string& pattern, Flavor flavor)
    : Regex(Translation(pattern, flavor).whole(),
            PCRE2_UTF | PCRE2_UCP | PCRE2_NEVER_BACKSLASH_C |
                (flavor == Flavor::kOniguruma ? PCRE2_MULTILINE : PCRE2_DOLLAR_ENDONLY)) {}

Regex Regex::literal(std::string_view text) {
  return {std::string(text), PCRE2_UTF | PCRE2_LITERAL};
}

Regex::Regex(const std::string& pattern, unsigned options) : pattern_(pattern) {
  int error = 0;
  std::size_t at = 0;
  pcre2_code* code = pcre2_compile(reinterpret_cast<const unsigned char*>(pattern.data()),
                                   pattern.size(), options, &error, &at, nullptr);
  if (code == nullptr) {
    throw Error(Errc::kIo, "regex: byte " + std::to_string(at) + " of '" + shown(pattern) +
                               "': " + message_of(error));
  }
  code_ = std::shared_ptr<const void>(
      code, [](const void* p) { pcre2_code_free(static_cast<pcre2_code*>(const_cast<void*>(p))); });
  pcre2_jit_compile(
      code, PCRE2_JIT_COMPLETE);  // where it cannot, matching is interpreted: slower, the same
}

void Regex::find_all(std::string_view text, std::vector<Match>& out) const {
  out.clear();
  thread_local Scratch scratch;
  const auto* code = static_cast<const pcre2_code*>(code_.get());
  const auto* subject = reinterpret_cast<const unsigned char*>(text.data());
  for (std::size_t at = 0; at < text.size();) {
    const int found =
        pcre2_match(code, subject, text.size(), at, PCRE2_NO_UTF_CHECK | PCRE2_NOTEMPTY,
                    scratch.data, scratch.context);
    if (found == PCRE2_ERROR_NOMATCH) return;
    const auto fail = [&](const std::string& what) {
      throw Error(Errc::kIo, "regex: '" + shown(pattern_) + "' at byte " + std::to_string(at) +
                                 " of a text: " + what);
    };
    if (found < 0) fail(message_of(found));
    const std::size_t* ends = pcre2_get_ovector_pointer(scratch.data);
    // \K in a group that a lookaround calls moves the begin behind the end, or before the last match.
    if (ends[0] < at || ends[1] <= ends[0]) {
      fail("a match must begin behind the one before and end behind its beginning, got bytes " +
           std::to_string(ends[0]) + " to " + std::to_string(ends[1]));
    }
    out.emplace_back(ends[0], ends[1]);
    at = ends[1];
  }
}

}  // namespace mlxtape::formats
