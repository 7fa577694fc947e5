// What is done to a text before it is cut into words.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "formats/regex.h"
#include "formats/tokenizer_added.h"
#include "formats/tokenizer_charsmap.h"
#include "mlxtape/formats/json.h"

namespace mlxtape::formats {

// NFC and NFKC compose; NFKC and NFKD take what is compatible for the same.
struct UnicodeForm {
  bool compose, compatible;
};
struct ReplaceText {
  std::string text, content;
};
struct ReplaceRegex {
  Regex pattern;
  std::string content;
};
struct Prepend {
  std::string text;
};
struct Strip {
  bool left, right;
};
struct Lowercase {};
struct StripAccents {};
struct SpellBytes {};  // bytes as the letters that tokens have for them
struct Precompiled {
  std::shared_ptr<const Charsmap> map;
};
// All that SentencePiece does at once.
struct SentencePieceForm {
  std::shared_ptr<const Charsmap> map;        // may be null
  std::shared_ptr<const AddedMatcher> words;  // left as they are; may be null
  bool add_dummy_prefix, remove_extra_whitespaces, escape_whitespaces, whitespace_as_suffix;
};
using Normalizer = std::variant<UnicodeForm, ReplaceText, ReplaceRegex, Prepend, Strip, Lowercase,
                                StripAccents, SpellBytes, Precompiled, SentencePieceForm>;

// `who` in what follows: the source of the JSON, for errors.
std::vector<Normalizer> read_normalizers(const Json& json, const std::string& who);
// Of valid UTF-8. starts, ends: the text is the beginning, the end, of all that is encoded.
std::string normalize(const std::vector<Normalizer>& steps, std::string text, bool starts = true,
                      bool ends = true);

std::string unicode_form(const UnicodeForm& form, std::string text);

}  // namespace mlxtape::formats
