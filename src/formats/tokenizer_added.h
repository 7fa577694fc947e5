// Tokens that are looked for in a text before it is cut into words.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "mlxtape/formats/json.h"
#include "mlxtape/formats/tokenizer.h"

namespace mlxtape::formats {

struct AddedToken {
  std::int64_t id = 0;
  std::string content;
  bool single_word = false, lstrip = false, rstrip = false, normalized = false, special = false;
};
std::vector<AddedToken> read_added_tokens(const Json& json, const std::string& who);

// Finds tokens in a text: the leftmost, the longest of those.
class AddedMatcher {
 public:
  void add(const AddedToken& token, std::string content);  // content: what is looked for
  void prepare();                                          // once all are added
  std::size_t prefix_length(
      std::string_view text) const;  // of the longest that it begins with; 0: none
  // Calls piece(text, begin) and token(id) in the order of the text.
  template <class Piece, class Token>
  void each(std::string_view text, Piece&& piece, Token&& token) const {
    std::size_t done = 0;
    for (std::size_t at = 0; at < text.size();) {
      std::size_t begin = at, end = at;
      const AddedToken* found = next(text, begin, end);
      if (found == nullptr) break;
      at = end;
      if (!widen(*found, text, done, begin, end)) continue;
      if (done < begin) piece(text.substr(done, begin - done), done);
      token(static_cast<TokenId>(found->id));
      done = end;
      at = std::max(at, done);
    }
    if (done < text.size()) piece(text.substr(done), done);
  }

 private:
  struct Entry {
    std::string content;
    AddedToken token;
  };
  const AddedToken* next(std::string_view text, std::size_t& begin, std::size_t& end) const;
  const Entry* longest(const std::vector<Entry>& entries, std::string_view text) const;
  // Over spaces that belong to the token; false: it must be a word of its own and is not.
  static bool widen(const AddedToken& token, std::string_view text, std::size_t done,
                    std::size_t& begin, std::size_t& end);
  std::array<std::vector<Entry>, 256> by_first_;  // by their bytes
};

}  // namespace mlxtape::formats
