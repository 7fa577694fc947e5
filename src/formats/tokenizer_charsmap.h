// SentencePiece's table of replacements: a trie of character sequences, as a double array, and what each becomes.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace mlxtape::formats {

class Charsmap {
 public:
  struct Found {
    std::size_t length;            // of what is replaced, in bytes
    std::string_view replacement;  // valid UTF-8
  };

  // The bytes of precompiled_charsmap. Throws kIo, beginning with `who`.
  Charsmap(std::string_view bytes, const std::string& who);
  std::optional<Found> longest(std::string_view text) const;  // of what the text begins with
  std::optional<Found> shortest(std::string_view text) const;

 private:
  // Calls fn(length, value) for each sequence that the text begins with, the shortest first, until it says false.
  template <class Fn>
  void each_prefix(std::string_view text, Fn&& fn) const;
  std::string_view replacement(std::uint32_t value) const;

  std::vector<std::uint32_t> units_;
  std::string replacements_;  // each with a zero at its end
};

// As the library `tokenizers` applies it: to each grapheme of less than 6 bytes, else to its characters.
// check is called with what there is so far.
std::string apply_to_graphemes(const Charsmap& map, const std::string& text,
                               const std::function<void(const std::string&)>& check);

}  // namespace mlxtape::formats
