#include "formats/regex.h"

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

// Tokenizers were made with Oniguruma. To it white space is Unicode's property of that name; PCRE2's \s has U+180E too,
// which is no space any more.
std::string in_our_words(const std::string& pattern) {
  std::string out;
  for (std::size_t i = 0; i < pattern.size(); ++i) {
    const char next = pattern[i] == '\\' && i + 1 < pattern.size() ? pattern[i + 1] : '\0';
    if (next == 's' || next == 'S') {
      out += next == 's' ? "\\p{White_Space}" : "\\P{White_Space}";
      ++i;
    } else {
      out += pattern[i];
      if (next != 0) out += pattern[++i];
    }
  }
  return out;
}

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

Regex::Regex(const std::string& pattern)
    : Regex(in_our_words(pattern),
            PCRE2_UTF | PCRE2_UCP | PCRE2_MULTILINE | PCRE2_NEVER_BACKSLASH_C) {}

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
