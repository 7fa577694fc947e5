#include "mlxtape/formats/json.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <unordered_set>

#include "mlxtape/base/error.h"

namespace mlxtape::formats {
namespace {

unsigned char byte(char c) { return static_cast<unsigned char>(c); }

// Inside a string these stand for themselves and need no look at what comes behind.
constexpr std::array<bool, 256> kPlain = [] {
  std::array<bool, 256> plain{};
  for (std::size_t c = 0x20; c < 0x80; ++c) plain[c] = c != '"' && c != '\\';
  return plain;
}();

// Bytes of the UTF-8 character that begins at `at`, 0 where none does: no overlong form, no surrogate, nothing
// beyond U+10FFFF.
std::size_t utf8_length(std::string_view text, std::size_t at) {
  const unsigned lead = byte(text[at]);
  if (lead < 0x80) return 1;
  if (lead < 0xC2 || lead > 0xF4) return 0;
  const std::size_t length = lead < 0xE0 ? 2 : lead < 0xF0 ? 3 : 4;
  if (text.size() - at < length) return 0;
  const unsigned second = byte(text[at + 1]);
  const unsigned least = lead == 0xE0 ? 0xA0 : lead == 0xF0 ? 0x90 : 0x80;
  const unsigned most = lead == 0xED ? 0x9F : lead == 0xF4 ? 0x8F : 0xBF;
  if (second < least || second > most) return 0;
  for (std::size_t i = 2; i < length; ++i) {
    if ((byte(text[at + i]) & 0xC0U) != 0x80) return 0;
  }
  return length;
}

void append_utf8(std::string& out, unsigned code) {
  const auto put = [&out](unsigned value) {
    out.push_back(static_cast<char>(value));
  };
  if (code < 0x80) {
    put(code);
    return;
  }
  if (code < 0x800) {
    put(0xC0U | code >> 6U);
  } else if (code < 0x10000) {
    put(0xE0U | code >> 12U);
    put(0x80U | (code >> 6U & 0x3FU));
  } else {
    put(0xF0U | code >> 18U);
    put(0x80U | (code >> 12U & 0x3FU));
    put(0x80U | (code >> 6U & 0x3FU));
  }
  put(0x80U | (code & 0x3FU));
}

std::string hex_byte(unsigned char c) {
  constexpr std::string_view digits = "0123456789abcdef";
  return {digits[c >> 4U], digits[c & 15U]};
}

// What is at a place of the text, for messages.
std::string at_place(std::string_view text, std::size_t at) {
  if (at >= text.size()) return "the end of the text";
  const char c = text[at];
  if (c > 0x20 && c < 0x7F) return std::string("'") + c + "'";
  return "byte 0x" + hex_byte(byte(c));
}

bool is_digit(char c) { return c >= '0' && c <= '9'; }

}  // namespace

// ---- JsonReader ----

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
  constexpr std::string_view letters = "\"\\/bfnrt";
  constexpr std::string_view meanings = "\"\\/\b\f\n\r\t";
  if (const std::size_t i = letters.find(c); i != std::string_view::npos) {
    out.push_back(meanings[i]);
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
    fail_at(at_ - digits.size(), "must be an integer of 64 bits, got " + std::string(digits));
  }
  return value;
}

double JsonReader::number() { return to_double(number_text()); }

double JsonReader::to_double(std::string_view digits) const {
  double value = 0;
  if (std::from_chars(digits.data(), digits.data() + digits.size(), value).ec != std::errc{}) {
    fail_at(at_ - digits.size(), "must be in the range of double, got " + std::string(digits));
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
    case Kind::kNumber: number_text(); break;
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

// ---- Json ----

Json Json::parse(std::string_view text, const std::string& source) {
  JsonReader reader(text, source);
  Json value = read(reader);
  reader.end();
  return value;
}

Json Json::read(JsonReader& reader) {
  switch (reader.peek()) {
    case JsonReader::Kind::kNull: reader.null(); return nullptr;
    case JsonReader::Kind::kBool: return reader.boolean();
    case JsonReader::Kind::kNumber: {
      const std::string_view digits = reader.number_text();
      const char* end = digits.data() + digits.size();
      std::int64_t value = 0;
      if (std::from_chars(digits.data(), end, value) == std::from_chars_result{end, std::errc{}}) {
        return value;
      }
      return reader.to_double(digits);
    }
    case JsonReader::Kind::kString: return reader.string();
    case JsonReader::Kind::kArray: {
      Array array;
      for (reader.begin_array(); reader.next_element();) array.push_back(read(reader));
      return array;
    }
    case JsonReader::Kind::kObject: break;
  }
  Object object;
  std::unordered_set<std::string> seen;
  std::string key;
  for (reader.begin_object(); reader.next_key(key);) {
    if (!seen.insert(key).second) reader.fail("each key must come once, got \"" + key + "\" twice");
    object.emplace_back(key, read(reader));
  }
  return object;
}

namespace {

const char* kind_of(const Json& value) {
  if (value.is_null()) return "null";
  if (value.is_bool()) return "a bool";
  if (value.is_integer()) return "an integer";
  if (value.is_number()) return "a number";
  if (value.is_string()) return "a string";
  return value.is_array() ? "an array" : "an object";
}

template <class T, class Variant>
auto& held(Variant& variant, const Json& value, const char* what) {
  if (auto* there = std::get_if<T>(&variant)) return *there;
  throw Error(Errc::kIo, std::string("json: must be ") + what + ", got " + kind_of(value));
}

}  // namespace

bool Json::boolean() const { return held<bool>(value_, *this, "a bool"); }
std::int64_t Json::integer() const { return held<std::int64_t>(value_, *this, "an integer"); }
double Json::number() const {
  if (is_integer()) return static_cast<double>(integer());
  return held<double>(value_, *this, "a number");
}
const std::string& Json::string() const { return held<std::string>(value_, *this, "a string"); }
const Json::Array& Json::array() const { return held<Array>(value_, *this, "an array"); }
Json::Array& Json::array() { return held<Array>(value_, *this, "an array"); }
const Json::Object& Json::object() const { return held<Object>(value_, *this, "an object"); }
Json::Object& Json::object() { return held<Object>(value_, *this, "an object"); }

const Json* Json::find(std::string_view key) const {
  if (!is_object()) return nullptr;
  for (const auto& [name, value] : object()) {
    if (name == key) return &value;
  }
  return nullptr;
}

void Json::set(std::string_view key, Json value) {
  for (auto& [name, old] : object()) {
    if (name != key) continue;
    old = std::move(value);
    return;
  }
  object().emplace_back(key, std::move(value));
}

void Json::erase(std::string_view key) {
  std::erase_if(object(), [key](const auto& entry) { return entry.first == key; });
}

// ---- dump ----

namespace {

void dump_string(std::string& out, std::string_view text) {
  out.push_back('"');
  for (std::size_t at = 0; at < text.size();) {
    const char c = text[at];
    const std::size_t length = utf8_length(text, at);
    if (length == 0) {
      throw Error(Errc::kArgument, "json: text must be UTF-8, got byte 0x" + hex_byte(byte(c)));
    }
    constexpr std::string_view special = "\"\\\b\f\n\r\t";
    if (const std::size_t i = special.find(c); i != std::string_view::npos) {
      out.push_back('\\');
      out.push_back("\"\\bfnrt"[i]);
    } else if (byte(c) < 0x20) {
      out += "\\u00" + hex_byte(byte(c));
    } else {
      out.append(text, at, length);
    }
    at += length;
  }
  out.push_back('"');
}

// As Python writes it: the fewest digits that are read back the same, an exponent below 1e-4 and from 1e16 on.
void dump_double(std::string& out, double value) {
  if (!std::isfinite(value)) {
    throw Error(Errc::kArgument, "json: a number must be finite, got " + std::to_string(value));
  }
  std::array<char, 64> digits{};
  const double size = std::abs(value);
  const bool fixed = size == 0 || (size >= 1e-4 && size < 1e16);
  const char* end = std::to_chars(digits.begin(), digits.end(), value,
                                  fixed ? std::chars_format::fixed : std::chars_format::scientific)
                        .ptr;
  const std::string_view text(digits.data(), static_cast<std::size_t>(end - digits.data()));
  out += text;
  if (fixed && text.find('.') == std::string_view::npos) out += ".0";
}

}  // namespace

std::string Json::dump(int indent, bool sorted) const {
  std::string out;
  dump_to(out, indent, sorted, 0);
  return out;
}

void Json::dump_to(std::string& out, int indent, bool sorted, int level) const {
  // Before each entry, and with one level less before the closing bracket.
  const auto line = [&](int depth) {
    if (indent < 0) return;
    out.push_back('\n');
    out.append(static_cast<std::size_t>(indent) * static_cast<std::size_t>(depth), ' ');
  };
  const auto list = [&](const char* brackets, std::size_t entries, auto&& entry) {
    out.push_back(brackets[0]);
    for (std::size_t i = 0; i < entries; ++i) {
      if (i > 0) out += indent < 0 ? ", " : ",";
      line(level + 1);
      entry(i);
    }
    if (entries > 0) line(level);
    out.push_back(brackets[1]);
  };
  if (is_null()) {
    out += "null";
  } else if (is_bool()) {
    out += boolean() ? "true" : "false";
  } else if (is_integer()) {
    out += std::to_string(integer());
  } else if (is_number()) {
    dump_double(out, number());
  } else if (is_string()) {
    dump_string(out, string());
  } else if (is_array()) {
    list("[]", array().size(),
         [&](std::size_t i) { array()[i].dump_to(out, indent, sorted, level + 1); });
  } else {
    std::vector<const Object::value_type*> entries;
    for (const auto& entry : object()) entries.push_back(&entry);
    if (sorted) {
      std::sort(entries.begin(), entries.end(),
                [](const auto* a, const auto* b) { return a->first < b->first; });
    }
    list("{}", entries.size(), [&](std::size_t i) {
      dump_string(out, entries[i]->first);
      out += ": ";
      entries[i]->second.dump_to(out, indent, sorted, level + 1);
    });
  }
}

}  // namespace mlxtape::formats
