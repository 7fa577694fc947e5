// Tokens of a text in Metal's language, and errors that name its lines.
#pragma once

#include <cstddef>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace mlxtape::metal_bind {

struct Token {
  enum class Kind {
    kSpace,
    kWord,
    kNumber,
    kString,
    kSign
  };  // spaces: comments, directives and line markers too
  Kind kind;
  std::string text;
};

class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

std::vector<Token> tokens_of(std::string_view text);
std::string read_file(const std::string& path);  // throws Error
// Written only if it differs, so that nothing is made anew for it.
void write_file(const std::string& path, const std::string& text);

// A text as tokens, of which only those that are no space are counted.
class Tokens {
 public:
  explicit Tokens(std::string_view text) : all_(tokens_of(text)) {}

  std::size_t size() const { return all_.size(); }
  const std::string& operator[](std::size_t i) const { return all_[i].text; }
  bool is(std::size_t i, std::string_view text) const {
    return i < all_.size() && all_[i].text == text;
  }
  bool is_word(std::size_t i) const {
    return i < all_.size() && all_[i].kind == Token::Kind::kWord;
  }
  bool is_number(std::size_t i) const {
    return i < all_.size() && all_[i].kind == Token::Kind::kNumber;
  }
  bool is_space(std::size_t i) const { return all_[i].kind == Token::Kind::kSpace; }

  std::size_t next(std::size_t i) const;      // size() at the end
  std::size_t previous(std::size_t i) const;  // size() at the beginning
  // Of what opens at i: ( [ { < or [[.
  std::size_t closing(std::size_t i) const;
  std::string text(std::size_t begin, std::size_t end) const;

  // Only line ends stay, so that what follows keeps its lines.
  void blank(std::size_t begin, std::size_t end);
  void replace(std::size_t i, std::string text);  // by what is no longer looked at

  [[noreturn]] void fail(std::size_t i, const std::string& what) const;

 private:
  std::vector<Token> all_;
};

}  // namespace mlxtape::metal_bind
