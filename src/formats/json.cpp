#include "mlxtape/formats/json.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <unordered_set>

#include "formats/utf8.h"
#include "mlxtape/base/error.h"
#include "mlxtape/base/files.h"
#include "mlxtape/base/quote.h"

namespace mlxtape::formats {

Json Json::parse(std::string_view text, const std::string& source) {
  JsonReader reader(text, source);
  Json value = read(reader);
  reader.end();
  return value;
}

Json Json::read_file(const std::string& path, const char* who) {
  return parse(read_whole(path, who, kMaxJsonFile), std::string(who) + ": " + path);
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
    if (!seen.insert(key).second)
      reader.fail("each key must come once, got \"" + shown(key) + "\" twice");
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
    constexpr std::string_view kSpecial = "\"\\\b\f\n\r\t";
    if (const std::size_t i = kSpecial.find(c); i != std::string_view::npos) {
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
