// How a text is cut into the words that a model takes.
#pragma once

#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "formats/regex.h"
#include "formats/tokenizer_model.h"
#include "mlxtape/formats/json.h"

namespace mlxtape::formats {

struct Split {
  enum class Behavior { kRemoved, kIsolated, kMergedWithPrevious, kMergedWithNext, kContiguous };
  std::string text;  // what is looked for; "": the pattern is
  Regex pattern;
  Behavior behavior;
  bool invert;  // what does not match counts as a match
};
struct PrefixSpace {};  // a piece begins with a space: one is added where there is none
struct SpellWords {};   // bytes as the letters that tokens have for them
// Spaces as a character that can be seen, and one before the text.
struct SpellSpaces {
  enum class Prepend { kAlways, kFirst, kNever };
  std::string replacement;
  Prepend prepend;
  std::string spelled(std::string_view text, bool starts) const;
};
using Splitter = std::variant<Split, PrefixSpace, SpellWords, SpellSpaces>;

struct PreTokenizer {
  std::vector<Splitter> steps;
  bool byte_level = false;  // words are bytes, not yet in letters
};
// takes_bytes: the model spells bytes itself, so that the last step need not.
PreTokenizer read_pre_tokenizer(const Json& json, bool takes_bytes, const std::string& who);

// Calls word(std::string_view) for each word, in order, with steps from `first` on. The word lives during the call.
// starts: the text is the beginning of all that is encoded.
class Words {
 public:
  explicit Words(const std::vector<Splitter>& steps)
      : steps_(steps), matches_(steps.size()), pieces_(steps.size()) {}
  template <class Fn>
  void each(std::string_view text, bool starts, Fn&& word, std::size_t first = 0) {
    if (text.empty()) return;
    if (first == steps_.size()) return word(text);
    const Splitter& step = steps_[first];
    if (std::holds_alternative<Split>(step)) {
      cut(text, first);
      for (const Regex::Match& piece : pieces_[first]) {
        each(text.substr(piece.first, piece.second - piece.first), starts && piece.first == 0, word,
             first + 1);
      }
    } else if (std::holds_alternative<PrefixSpace>(step)) {
      text[0] == ' ' ? each(text, starts, word, first + 1)
                     : each(" " + std::string(text), starts, word, first + 1);
    } else if (const auto* spaces = std::get_if<SpellSpaces>(&step)) {
      each(spaces->spelled(text, starts), starts, word, first + 1);
    } else {
      each(letters_of(text), starts, word, first + 1);
    }
  }

 private:
  void cut(std::string_view text, std::size_t step);
  const std::vector<Splitter>& steps_;
  std::vector<std::vector<Regex::Match>> matches_, pieces_;  // by step: their memory is used again
};

}  // namespace mlxtape::formats
