// JSON as RFC 8259 has it, nothing more: no comments, no NaN, no comma before a bracket. Text is UTF-8 and is
// checked to be. A lone surrogate (\ud800 without its other half) has no form in UTF-8 and is an error.
//
//   JsonReader   walks over text in memory and keeps nothing: for large files (a vocabulary).
//   Json         a value as a tree: for small ones (a configuration).
//
// Both go at most kJsonDepth levels deep. Errors are kIo, "source: byte 123: what must hold, got what came".
//
// Threads    A JsonReader is one thread's; a Json is a value, like a std::vector.
#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

namespace mlxtape::formats {

inline constexpr int kJsonDepth = 128;
inline constexpr std::size_t kMaxJsonFile = std::size_t{16} << 20U;

// Each value is asked for by what it must be; anything else there is an error. Values are read in the order of the
// text, and each before the next key or element is asked for:
//
//   for (reader.begin_object(); reader.next_key(key);) { if (key == "a") a = reader.integer(); else reader.skip(); }
//   reader.end();
class JsonReader {
 public:
  enum class Kind : std::uint8_t { kNull, kBool, kNumber, kString, kArray, kObject };

  JsonReader(std::string_view text, std::string source);  // text outlives the reader

  Kind peek();  // of the value that comes next
  void begin_object();
  bool next_key(std::string& key);  // false: the object has ended. The same key may come twice.
  void begin_array();
  bool next_element();                 // false: the array has ended
  void read_string(std::string& out);  // decoded; the memory of out is used again
  std::string string();
  std::int64_t integer();  // digits alone: neither 1.0 nor 1e3 is one
  double
  number();  // rounded to nearest; one beyond the range of double, or too near 0, is an error
  bool boolean();
  void null();
  void skip();  // any value, checked like one that is read
  void end();   // nothing but white space is left

  [[noreturn]] void fail(const std::string& what) const;
  std::size_t position() const { return at_; }

 private:
  friend class Json;
  [[noreturn]] void fail_at(std::size_t at, const std::string& what) const;
  [[noreturn]] void expected(const char* what);
  char next();  // behind white space; 0 at the end
  void open(char bracket, const char* what);
  bool close(char bracket);
  void read_escape(std::string& out);
  unsigned hex4();
  std::string_view number_text();
  double to_double(std::string_view digits) const;
  void literal(std::string_view word, const char* what);

  std::string_view text_;
  std::string source_;
  std::string skipped_;
  std::size_t at_ = 0;
  int depth_ = 0;
  bool first_ = false;  // nothing was read yet of the array or object that was opened last
};

class Json {
 public:
  using Array = std::vector<Json>;
  using Object = std::vector<std::pair<std::string, Json>>;  // in the order of the text

  Json() = default;  // null
  Json(std::nullptr_t) {}
  template <std::same_as<bool> T>  // no pointer becomes a bool
  Json(T value) : value_(value) {}
  template <std::integral T>
    requires(!std::same_as<T, bool> && (std::signed_integral<T> || sizeof(T) < 8))
  Json(T value) : value_(static_cast<std::int64_t>(value)) {}
  Json(double value) : value_(value) {}
  Json(std::string value) : value_(std::move(value)) {}
  Json(std::string_view value) : value_(std::string(value)) {}
  Json(const char* value) : value_(std::string(value)) {}
  Json(Array value) : value_(std::move(value)) {}
  Json(Object value) : value_(std::move(value)) {}  // Json::Object{} is one without keys

  // A key that comes twice is an error. A number without fraction and exponent that fits is an integer.
  static Json parse(std::string_view text, const std::string& source);
  static Json read(JsonReader& reader);
  // Of a file of at most kMaxJsonFile bytes: a tree takes many times as much. Errors begin with "who: path".
  static Json read_file(const std::string& path, const char* who);

  bool is_null() const { return std::holds_alternative<std::nullptr_t>(value_); }
  bool is_bool() const { return std::holds_alternative<bool>(value_); }
  bool is_integer() const { return std::holds_alternative<std::int64_t>(value_); }
  bool is_number() const { return is_integer() || std::holds_alternative<double>(value_); }
  bool is_string() const { return std::holds_alternative<std::string>(value_); }
  bool is_array() const { return std::holds_alternative<Array>(value_); }
  bool is_object() const { return std::holds_alternative<Object>(value_); }

  // Throw kIo, with what was expected and what is there.
  bool boolean() const;
  std::int64_t integer() const;
  double number() const;
  const std::string& string() const;
  const Array& array() const;
  Array& array();
  const Object& object() const;
  Object& object();

  const Json* find(std::string_view key) const;  // null where there is none, or this is no object
  void set(std::string_view key, Json value);    // replaces or appends
  void erase(std::string_view key);

  // As Python's json.dumps(ensure_ascii=False) lays it out; -1 is one line. Numbers are read back the same, bit
  // by bit. sorted: keys by their bytes. Throws kArgument for text that is not UTF-8 and for NaN and infinities.
  std::string dump(int indent = -1, bool sorted = false) const;

  friend bool operator==(const Json&, const Json&) = default;  // 1 and 1.0 differ

 private:
  void dump_to(std::string& out, int indent, bool sorted, int level) const;

  std::variant<std::nullptr_t, bool, std::int64_t, double, std::string, Array, Object> value_;
};

}  // namespace mlxtape::formats
