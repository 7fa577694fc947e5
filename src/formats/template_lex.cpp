// Cuts a template into text and tags, and tags into tokens. What happens to the white space beside a tag:
//   {%- {{- {#-        all before it goes       {%+          stays
//   {%  {#             spaces between the line's beginning and the tag go (lstrip_blocks)
//   -%} -}} -#}        all behind it goes       +%}          stays
//   %}  #}             one line break goes (trim_blocks)
#include <algorithm>
#include <array>
#include <cctype>

#include "formats/template_syntax.h"
#include "formats/utf8.h"

namespace mlxtape::formats::jinja {
namespace {

using Kind = Token::Kind;

bool name_start(char c) {
  return std::isalpha(static_cast<unsigned char>(c)) != 0 || c == '_' || (c & 0x80) != 0;
}
bool digit(char c) { return c >= '0' && c <= '9'; }

// One kind of line break, and none at the very end: a file's last line is not part of the text.
std::string normalized(std::string_view text) {
  std::string out;
  for (std::size_t i = 0; i < text.size(); ++i) {
    if (text[i] != '\r') {
      out += text[i];
    } else if (i + 1 == text.size() || text[i + 1] != '\n') {
      out += '\n';
    }
  }
  if (out.ends_with('\n')) out.pop_back();
  return out;
}

class Lexer {
 public:
  explicit Lexer(std::string_view text) : text_(text) {}

  std::vector<Token> run() {
    while (at_ < text_.size()) {
      std::size_t tag = at_;
      while ((tag = text_.find('{', tag)) != text_.npos &&
             (tag + 1 == text_.size() ||
              std::string_view("{%#").find(text_[tag + 1]) == std::string_view::npos))
        ++tag;
      if (tag == text_.npos) tag = text_.size();
      const char kind = tag < text_.size() ? text_[tag + 1] : 0;
      const char sign = tag + 2 < text_.size() ? text_[tag + 2] : 0;
      emit_text(text_.substr(at_, tag - at_), kind, sign);
      if (kind == 0) break;
      move_to(tag + 2 + (sign == '-' || (sign == '+' && kind != '{') ? 1 : 0));
      if (kind == '#') {
        comment();
      } else {
        push(kind == '{' ? Kind::kPrintBegin : Kind::kBlockBegin, "");
        inside(kind == '{' ? "}}" : "%}");
      }
    }
    push(Kind::kEnd, "");
    return std::move(tokens_);
  }

 private:
  [[noreturn]] void fail(const std::string& what) const { throw Syntax(line_, what); }
  void push(Kind kind, std::string text) { tokens_.push_back({kind, std::move(text), line_}); }
  void move_to(std::size_t to) {
    line_ += static_cast<int>(std::count(text_.begin() + static_cast<std::ptrdiff_t>(at_),
                                         text_.begin() + static_cast<std::ptrdiff_t>(to), '\n'));
    at_ = to;
  }

  void emit_text(std::string_view text, char kind, char sign) {
    if (kind != 0 && sign == '-') {
      text = trim_right(text);
    } else if ((kind == '%' || kind == '#') && sign != '+') {
      const std::size_t line = text.rfind('\n') + 1;  // npos + 1 = 0
      if ((line > 0 || line_starts_) && trim_left(text.substr(line)).empty())
        text = text.substr(0, line);
    }
    if (!text.empty()) push(Kind::kText, std::string(text));
  }

  // Behind a tag's end.
  void after(std::size_t end, char sign, bool trims) {
    const std::size_t begin = at_;
    std::size_t to = end;
    if (sign == '-') {
      to = text_.size() - trim_left(text_.substr(end)).size();
    } else if (sign != '+' && trims && end < text_.size() && text_[end] == '\n') {
      ++to;
    }
    move_to(to);
    line_starts_ = to > begin && text_[to - 1] == '\n';
  }

  void comment() {
    const std::size_t end = text_.find("#}", at_);
    if (end == text_.npos) fail("a comment is not closed by #}");
    const char sign = end > at_ ? text_[end - 1] : 0;
    after(end + 2, sign, true);
  }

  void inside(std::string_view end) {
    std::string open;  // brackets: a tag does not end inside of them
    for (;;) {
      while (at_ < text_.size() && std::isspace(static_cast<unsigned char>(text_[at_])) != 0)
        move_to(at_ + 1);
      if (at_ >= text_.size()) fail("a tag is not closed by " + std::string(end));
      const std::string_view rest = text_.substr(at_);
      if (open.empty()) {
        const char sign = rest[0] == '-' || (rest[0] == '+' && end == "%}") ? rest[0] : '\0';
        const std::size_t skip = sign != 0 ? 1 : 0;
        if (rest.substr(skip).starts_with(end)) {
          push(end == "}}" ? Kind::kPrintEnd : Kind::kBlockEnd, "");
          after(at_ + skip + 2, sign, end == "%}");
          return;
        }
      }
      token(rest, open);
    }
  }

  void token(std::string_view rest, std::string& open) {
    const char c = rest[0];
    std::size_t n = 0;
    if (name_start(c)) {
      while (n < rest.size() && (name_start(rest[n]) || digit(rest[n]))) ++n;
      push(Kind::kName, std::string(rest.substr(0, n)));
    } else if (digit(c)) {
      n = number(rest);
    } else if (c == '\'' || c == '"') {
      n = string(rest);
    } else {
      n = op(rest, open);
    }
    move_to(at_ + n);
  }

  std::size_t number(std::string_view rest) {
    std::size_t n = 0;
    const auto digits = [&] {
      while (n < rest.size() && (digit(rest[n]) || rest[n] == '_')) ++n;
    };
    digits();
    Kind kind = Kind::kInt;
    if (n + 1 < rest.size() && rest[n] == '.' && digit(rest[n + 1]))
      kind = Kind::kFloat, ++n, digits();
    if (n < rest.size() && (rest[n] == 'e' || rest[n] == 'E')) {
      const std::size_t sign =
          n + 1 < rest.size() && (rest[n + 1] == '+' || rest[n + 1] == '-') ? 1 : 0;
      if (n + 1 + sign < rest.size() && digit(rest[n + 1 + sign]))
        kind = Kind::kFloat, n += 1 + sign, digits();
    }
    std::string text(rest.substr(0, n));
    std::erase(text, '_');
    push(kind, std::move(text));
    return n;
  }

  std::size_t string(std::string_view rest) {
    std::string out;
    std::size_t n = 1;
    for (; n < rest.size() && rest[n] != rest[0]; ++n) {
      if (rest[n] != '\\' || n + 1 == rest.size()) {
        out += rest[n];
        continue;
      }
      const char c = rest[++n];
      static constexpr std::string_view kLetters = "ntrbfav0\\'\"",
                                        kBytes("\n\t\r\b\f\a\v\0\\'\"", 11);
      const std::size_t hex = c == 'x' ? 2 : c == 'u' ? 4 : c == 'U' ? 8 : 0;
      if (hex != 0) {
        const std::string code(rest.substr(n + 1, hex));
        if (code.size() != hex || code.find_first_not_of("0123456789abcdefABCDEF") != code.npos)
          fail("\\" + std::string(1, c) + " must be followed by " + std::to_string(hex) +
               " hexadecimal digits");
        append_utf8(out, static_cast<char32_t>(std::stoul(code, nullptr, 16)));
        n += hex;
      } else if (const std::size_t i = kLetters.find(c); i != kLetters.npos) {
        out += kBytes[i];
      } else if (c != '\n') {  // a line break behind a backslash is none
        out += '\\', out += c;
      }
    }
    if (n >= rest.size()) fail("a string is not closed");
    push(Kind::kString, std::move(out));
    return n + 1;
  }

  std::size_t op(std::string_view rest, std::string& open) {
    static constexpr std::array<std::string_view, 6> kTwo = {"//", "**", "==", "!=", ">=", "<="};
    for (const std::string_view two : kTwo) {
      if (rest.starts_with(two)) return push(Kind::kOperator, std::string(two)), 2;
    }
    const char c = rest[0];
    if (std::string_view("+-/*%~[](){}<>=.:|,").find(c) == std::string_view::npos)
      fail(std::string("'") + c + "' is no part of an expression");
    static constexpr std::string_view kOpen = "([{", kClose = ")]}";
    if (kOpen.find(c) != kOpen.npos) open += c;
    if (const std::size_t i = kClose.find(c); i != kClose.npos) {
      if (open.empty() || open.back() != kOpen[i]) fail(std::string("'") + c + "' closes nothing");
      open.pop_back();
    }
    push(Kind::kOperator, std::string(1, c));
    return 1;
  }

  std::string_view text_;
  std::size_t at_ = 0;
  int line_ = 1;
  bool line_starts_ = true;
  std::vector<Token> tokens_;
};

}  // namespace

std::vector<Token> tokenize(std::string_view text) {
  const std::string clean = normalized(text);
  return Lexer(clean).run();
}

}  // namespace mlxtape::formats::jinja
