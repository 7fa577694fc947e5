#include "backends/metal/emulator/bind/tokens.h"

#include <cctype>
#include <cstdio>
#include <fstream>
#include <iterator>

namespace mlxtape::metal_bind {
namespace {

bool begins_word(char c) { return std::isalpha(static_cast<unsigned char>(c)) != 0 || c == '_'; }
bool is_digit(char c) { return std::isdigit(static_cast<unsigned char>(c)) != 0; }
bool is_blank(char c) { return std::isspace(static_cast<unsigned char>(c)) != 0; }

std::size_t end_of_line(std::string_view s, std::size_t i) {
  while (i < s.size() && s[i] != '\n') i += s[i] == '\\' ? 2 : 1;
  return i;
}

std::size_t end_of_number(std::string_view s, std::size_t i) {
  const bool hex = s.substr(i, 2) == "0x" || s.substr(i, 2) == "0X";
  while (i < s.size() && (begins_word(s[i]) || is_digit(s[i]) || s[i] == '.' || s[i] == '\'')) {
    const char c = static_cast<char>(std::tolower(static_cast<unsigned char>(s[i])));
    ++i;
    const bool exponent = hex ? c == 'p' : c == 'e';
    if (exponent && i < s.size() && (s[i] == '+' || s[i] == '-')) ++i;
  }
  return i;
}

std::size_t end_of_string(std::string_view s, std::size_t i) {
  const char quote = s[i++];
  while (i < s.size() && s[i] != quote) i += s[i] == '\\' ? 2 : 1;
  return i + 1;
}

}  // namespace

std::vector<Token> tokens_of(std::string_view s) {
  using Kind = Token::Kind;
  std::vector<Token> tokens;
  bool in_attribute = false;
  std::size_t i = 0;
  while (i < s.size()) {
    const std::size_t begin = i;
    Kind kind = Kind::kSign;
    if (is_blank(s[i])) {
      while (i < s.size() && is_blank(s[i])) ++i;
      kind = Kind::kSpace;
    } else if (s[i] == '#' || s.substr(i, 2) == "//") {
      i = end_of_line(s, i);
      kind = Kind::kSpace;
    } else if (s.substr(i, 2) == "/*") {
      const std::size_t end = s.find("*/", i);
      i = end == std::string_view::npos ? s.size() : end + 2;
      kind = Kind::kSpace;
    } else if (begins_word(s[i])) {
      while (i < s.size() && (begins_word(s[i]) || is_digit(s[i]))) ++i;
      kind = Kind::kWord;
    } else if (is_digit(s[i]) || (s[i] == '.' && i + 1 < s.size() && is_digit(s[i + 1]))) {
      i = end_of_number(s, i);
      kind = Kind::kNumber;
    } else if (s[i] == '"' || s[i] == '\'') {
      i = end_of_string(s, i);
      kind = Kind::kString;
    } else {
      const std::string_view two = s.substr(i, 2);
      const bool leaves_attribute = in_attribute && two == "]]";  // and not a[b[i]]
      if (two == "[[") in_attribute = true;
      if (leaves_attribute) in_attribute = false;
      i += leaves_attribute || two == "[[" || two == "::" || two == "->" || two == "&&" ||
                   two == "==" || two == "<=" || two == ">=" || two == "<<"
               ? 2
               : 1;
    }
    if (i > s.size()) i = s.size();
    tokens.push_back({kind, std::string(s.substr(begin, i - begin))});
  }
  return tokens;
}

std::string read_file(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  if (!in) throw Error(path + ": cannot be read");
  return {std::istreambuf_iterator<char>(in), {}};
}

void write_file(const std::string& path, const std::string& text) {
  std::ifstream in(path, std::ios::binary);
  if (in && std::string(std::istreambuf_iterator<char>(in), {}) == text) return;
  in.close();
  std::ofstream out(path, std::ios::binary);
  out << text;
  out.close();
  if (!out) throw Error(path + ": cannot be written");
}

std::size_t Tokens::next(std::size_t i) const {
  do ++i;
  while (i < all_.size() && is_space(i));
  return i;
}

std::size_t Tokens::previous(std::size_t i) const {
  while (i > 0) {
    if (!is_space(--i)) return i;
  }
  return all_.size();
}

std::size_t Tokens::closing(std::size_t i) const {
  const std::string& open = all_[i].text;
  const std::string shut = open == "("   ? ")"
                           : open == "[" ? "]"
                           : open == "{" ? "}"
                           : open == "<" ? ">"
                                         : "]]";
  for (std::size_t k = next(i); k < all_.size(); k = next(k)) {
    const std::string& t = all_[k].text;
    if (t == shut) return k;
    if (t == "(" || t == "[" || t == "{" || t == "[[" || (t == "<" && open == "<")) k = closing(k);
  }
  fail(i, "'" + open + "' is not closed");
}

std::string Tokens::text(std::size_t begin, std::size_t end) const {
  std::string s;
  for (std::size_t i = begin; i < end; ++i) s += all_[i].text;
  return s;
}

void Tokens::blank(std::size_t begin, std::size_t end) {
  for (std::size_t i = begin; i < end; ++i) {
    std::string kept;
    if (all_[i].text[0] == '#') {
      kept = all_[i].text;
    } else {
      for (const char c : all_[i].text) {
        if (c == '\n') kept += c;
      }
    }
    all_[i] = {Token::Kind::kSpace, kept.empty() ? " " : kept};
  }
}

void Tokens::replace(std::size_t i, std::string text) {
  all_[i] = {Token::Kind::kSpace, std::move(text)};
}

// Line markers, # 12 "file", say where what follows comes from.
void Tokens::fail(std::size_t at, const std::string& what) const {
  std::string file = "text";
  long line = 1;
  for (std::size_t i = 0; i < at && i < all_.size(); ++i) {
    const std::string& t = all_[i].text;
    char name[1024] = "";
    long marked = 0;
    if (is_space(i) && (std::sscanf(t.c_str(), "# %ld \"%1023[^\"]", &marked, name) == 2 ||
                        std::sscanf(t.c_str(), "#line %ld \"%1023[^\"]", &marked, name) == 2)) {
      file = name;
      line = marked - 1;  // the marker's own line end follows
      continue;
    }
    for (const char c : t) line += c == '\n' ? 1 : 0;
  }
  throw Error(file + ":" + std::to_string(line) + ": " + what);
}

}  // namespace mlxtape::metal_bind
