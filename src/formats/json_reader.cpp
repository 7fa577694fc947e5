#include <algorithm>
#include <array>
#include <charconv>

#include "formats/real.h"
#include "formats/utf8.h"
#include "mlxtape/base/error.h"
#include "mlxtape/base/quote.h"
#include "mlxtape/formats/json.h"

namespace mlxtape::formats {
namespace {

// Inside a string these stand for themselves and need no look at what comes behind.
constexpr std::array<bool, 256> kPlain = [] {
  std::array<bool, 256> plain{};
  for (std::size_t c = 0x20; c < 0x80; ++c) plain[c] = c != '"' && c != '\\';
  return plain;
}();

bool is_digit(char c) { return c >= '0' && c <= '9'; }
bool is_letter(char c) { return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z'); }

// What is at a place of the text, for messages: a word as a whole.
std::string at_place(std::string_view text, std::size_t at) {
  if (at >= text.size()) return "the end of the text";
  const char c = text[at];
  const std::string_view rest = text.substr(at);
  if (rest.starts_with("\xEF\xBB\xBF")) return "a byte order mark: save it as UTF-8 without one";
  if (at == 0 && (rest.starts_with("\xFF\xFE") || rest.starts_with("\xFE\xFF")))
    return "a byte order mark of UTF-16: save it as UTF-8";
  constexpr std::size_t kWord = 20;
  std::size_t end = 0;
  while (end < rest.size() && end < kWord && is_letter(rest[end])) ++end;
  if (c > 0x20 && c < 0x7F)
    return "'" + std::string(rest.substr(0, std::max<std::size_t>(end, 1))) + "'";
  return "byte 0x" + hex_byte(byte(c));
}

}  // namespace

JsonReader::JsonReader(std::string_view text, std::string source)
    : text_(text), source_(std::move(source)) {}

void JsonReader::fail(const std::string& what) const { fail_at(at_, what); }

void JsonReader::fail_at(std::size_t at, const std::string& what) const {
  throw Error(Errc::kIo, source_ + ": byte " + std::to_string(at) + ": " + what);
}

void JsonReader::expected(const char* what) {
  fail(std::string("must be ") + what + ", got " + at_place(text_, at_));
}

char JsonReader::next() {
  while (at_ < text_.size()) {
    const char c = text_[at_];
    if (c != ' ' && c != '\n' && c != '\r' && c != '\t') return c;
    ++at_;
  }
  return 0;
}

JsonReader::Kind JsonReader::peek() {
  switch (const char c = next()) {
    case '"': return Kind::kString;
    case '[': return Kind::kArray;
    case '{': return Kind::kObject;
    case 'n': return Kind::kNull;
    case 't':
    case 'f': return Kind::kBool;
    default:
      if (c == '-' || is_digit(c)) return Kind::kNumber;
      expected("a value");
  }
}

void JsonReader::open(char bracket, const char* what) {
  if (next() != bracket) expected(what);
  if (depth_ == kJsonDepth) fail("must be at most " + std::to_string(kJsonDepth) + " levels deep");
  ++depth_;
  ++at_;
  first_ = true;
}

// True: the bracket is closed. False: the text goes on with an entry, the comma before it is passed.
bool JsonReader::close(char bracket) {
  const char c = next();
  if (c == bracket) {
    ++at_;
    --depth_;
    first_ = false;
    return true;
  }
  if (!first_) {
    if (c != ',') expected(bracket == '}' ? "',' or '}'" : "',' or ']'");
    ++at_;
    next();
  }
  first_ = false;
  return false;
}

void JsonReader::begin_object() { open('{', "an object"); }
void JsonReader::begin_array() { open('[', "an array"); }
bool JsonReader::next_element() { return !close(']'); }

bool JsonReader::next_key(std::string& key) {
  if (close('}')) return false;
  if (next() != '"') expected("a key");
  read_string(key);
  if (next() != ':') expected("':'");
  ++at_;
  return true;
}

void JsonReader::read_string(std::string& out) {
  if (next() != '"') expected("a string");
  ++at_;
  out.clear();
  std::size_t begin = at_;  // of what is not yet in out
  while (true) {
    while (at_ < text_.size() && kPlain[byte(text_[at_])]) ++at_;
    if (at_ >= text_.size()) expected("'\"' at the end of the string");
    const char c = text_[at_];
    if (byte(c) >= 0x80) {
      const std::size_t length = utf8_length(text_, at_);
      if (length == 0) expected("UTF-8");
      at_ += length;
      continue;
    }
    if (byte(c) < 0x20) expected("escaped, as every control character");
    out.append(text_, begin, at_ - begin);
    ++at_;
    if (c == '"') return;
    read_escape(out);
    begin = at_;
  }
}

unsigned JsonReader::hex4() {
  unsigned code = 0;
  for (int i = 0; i < 4; ++i, ++at_) {
    const char c = at_ < text_.size() ? text_[at_] : '\0';
    const char lower = static_cast<char>(c | 0x20);
    if (!is_digit(c) && (lower < 'a' || lower > 'f')) expected("a hexadecimal digit");
    code = code * 16 + static_cast<unsigned>(is_digit(c) ? c - '0' : lower - 'a' + 10);
  }
  return code;
}

void JsonReader::read_escape(std::string& out) {
  const std::size_t begin = at_ - 1;  // the backslash
  const char c = at_ < text_.size() ? text_[at_] : '\0';
  constexpr std::string_view kLetters = "\"\\/bfnrt";
  constexpr std::string_view kMeanings = "\"\\/\b\f\n\r\t";
  if (const std::size_t i = kLetters.find(c); i != std::string_view::npos) {
    out.push_back(kMeanings[i]);
    ++at_;
    return;
  }
  if (c != 'u') expected("an escape");
  ++at_;
  unsigned code = hex4();
  if (code >= 0xD800 && code < 0xDC00 && text_.substr(at_, 2) == "\\u") {
    at_ += 2;
    const unsigned low = hex4();
    if (low < 0xDC00 || low > 0xDFFF)
      fail_at(begin, "must be a pair of surrogates, got a lone one");
    code = 0x10000 + ((code - 0xD800) << 10U) + (low - 0xDC00);
  } else if (code >= 0xD800 && code < 0xE000) {
    fail_at(begin, "must be a pair of surrogates, got a lone one");
  }
  append_utf8(out, code);
}

std::string JsonReader::string() {
  std::string out;
  read_string(out);
  return out;
}

// -? (0 | [1-9][0-9]*) (. [0-9]+)? ([eE] [+-]? [0-9]+)?
std::string_view JsonReader::number_text() {
  next();
  const std::size_t begin = at_;
  const auto here = [this] {
    return at_ < text_.size() ? text_[at_] : '\0';
  };
  const auto digits = [&] {
    if (!is_digit(here())) expected("a digit");
    while (is_digit(here())) ++at_;
  };
  if (here() != '-' && !is_digit(here())) expected("a number");
  if (here() == '-') ++at_;
  if (here() == '0') {
    ++at_;
    if (is_digit(here())) expected("a number without leading zeros");
  } else {
    digits();
  }
  if (here() == '.') {
    ++at_;
    digits();
  }
  if (here() == 'e' || here() == 'E') {
    ++at_;
    if (here() == '+' || here() == '-') ++at_;
    digits();
  }
  return text_.substr(begin, at_ - begin);
}

std::int64_t JsonReader::integer() {
  const std::string_view digits = number_text();
  std::int64_t value = 0;
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), value);
  if (error != std::errc{} || end != digits.data() + digits.size()) {
    fail_at(at_ - digits.size(), "must be an integer of 64 bits, got " + shown(digits));
  }
  return value;
}

double JsonReader::number() { return to_double(number_text()); }

double JsonReader::to_double(std::string_view digits) const {
  double value = 0;
  if (!to_real(digits, value)) {
    fail_at(at_ - digits.size(), "must be in the range of double, got " + shown(digits));
  }
  return value;
}

void JsonReader::literal(std::string_view word, const char* what) {
  if (text_.substr(at_, word.size()) != word) expected(what);
  at_ += word.size();
}

bool JsonReader::boolean() {
  const bool value = next() == 't';
  literal(value ? "true" : "false", "true or false");
  return value;
}

void JsonReader::null() {
  next();
  literal("null", "null");
}

void JsonReader::skip() {
  switch (peek()) {
    case Kind::kNull: null(); break;
    case Kind::kBool: boolean(); break;
    case Kind::kNumber: number(); break;
    case Kind::kString: read_string(skipped_); break;
    case Kind::kArray:
      for (begin_array(); next_element();) skip();
      break;
    case Kind::kObject:
      for (begin_object(); next_key(skipped_);) skip();
      break;
  }
}

void JsonReader::end() {
  next();
  if (at_ != text_.size()) expected("the end of the text");
}

}  // namespace mlxtape::formats
