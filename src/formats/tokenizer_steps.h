// What happens to a text before byte pair encoding: added tokens are cut out, the rest is brought to a normal form and
// cut into words.
#pragma once

#include <array>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "formats/regex.h"
#include "mlxtape/formats/json.h"
#include "mlxtape/formats/tokenizer.h"

namespace mlxtape::formats {

// ---- normalizers ----

struct UnicodeForm {
  bool compose,
      compatible;  // NFC and NFKC compose; NFKC and NFKD take what is compatible for the same
};
struct Replace {
  Regex pattern;
  std::string content;
};
struct Prepend {
  std::string text;
};
using Normalizer = std::variant<UnicodeForm, Replace, Prepend>;

// `who` in what follows: the source of the JSON, for errors.
std::vector<Normalizer> read_normalizers(const Json& json, const std::string& who);
std::string normalize(const std::vector<Normalizer>& steps, std::string text);  // of valid UTF-8

// ---- pre-tokenizers ----

struct Split {
  enum class Behavior { kRemoved, kIsolated, kMergedWithPrevious, kMergedWithNext, kContiguous };
  Regex pattern;
  Behavior behavior;
  bool invert;  // what does not match counts as a match
};
struct PrefixSpace {};  // a piece begins with a space: one is added where there is none
using Splitter = std::variant<Split, PrefixSpace>;

std::vector<Splitter> read_splitters(const Json& json, const std::string& who);
// Calls word(std::string_view) for each word, in order, with steps from `first` on. The word lives during the call.
class Words {
 public:
  explicit Words(const std::vector<Splitter>& steps)
      : steps_(steps), matches_(steps.size()), pieces_(steps.size()) {}
  template <class Fn>
  void each(std::string_view text, Fn&& word, std::size_t first = 0) {
    if (text.empty()) return;
    if (first == steps_.size()) return word(text);
    if (std::holds_alternative<PrefixSpace>(steps_[first])) {
      return text[0] == ' ' ? each(text, word, first + 1)
                            : each(" " + std::string(text), word, first + 1);
    }
    cut(text, first);
    for (const Regex::Match& piece : pieces_[first])
      each(text.substr(piece.first, piece.second - piece.first), word, first + 1);
  }

 private:
  void cut(std::string_view text, std::size_t step);
  const std::vector<Splitter>& steps_;
  std::vector<std::vector<Regex::Match>> matches_, pieces_;  // by step: their memory is used again
};

// ---- added tokens ----

struct AddedToken {
  TokenId id;
  std::string content;
  bool single_word, lstrip, rstrip, normalized, special;
};
std::vector<AddedToken> read_added_tokens(const Json& json, const std::string& who);

// Finds tokens in a text: the leftmost, the longest of those.
class AddedMatcher {
 public:
  void add(const AddedToken& token, std::string content);  // content: what is looked for
  // Calls piece(text) and token(id) in the order of the text.
  template <class Piece, class Token>
  void each(std::string_view text, Piece&& piece, Token&& token) const {
    std::size_t done = 0;
    for (std::size_t at = 0; at < text.size();) {
      std::size_t begin = at, end = at;
      const AddedToken* found = next(text, begin, end);
      if (found == nullptr) break;
      at = end;
      if (!widen(*found, text, done, begin, end)) continue;
      if (done < begin) piece(text.substr(done, begin - done));
      token(found->id);
      done = end;
      at = std::max(at, done);
    }
    if (done < text.size()) piece(text.substr(done));
  }

 private:
  struct Entry {
    std::string content;
    AddedToken token;
  };
  const AddedToken* next(std::string_view text, std::size_t& begin, std::size_t& end) const;
  // Over spaces that belong to the token; false: it must be a word of its own and is not.
  static bool widen(const AddedToken& token, std::string_view text, std::size_t done,
                    std::size_t& begin, std::size_t& end);
  std::array<std::vector<Entry>, 256> by_first_;  // the longest first
};

}  // namespace mlxtape::formats
