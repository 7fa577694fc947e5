// What the expressions of a chat template evaluate to, with the meaning that Python gives to it.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "formats/template_text.h"
#include "mlxtape/formats/json.h"

namespace mlxtape::formats::jinja {

constexpr int kMaxNesting = 128;  // of lists and dicts
constexpr std::size_t kMaxElements = std::size_t{1}
                                     << 20;  // of a list or dict, with those inside of it

class Value;
using List = std::vector<Value>;
using Dict = std::vector<std::pair<std::string, Value>>;
std::size_t weight(const Dict& items);                            // steps that a copy takes
const Value* find_in(const Dict& items, const std::string& key);  // null where there is none
void set_in(Dict& items, const std::string& key, Value value);    // replaces or appends

// What was asked for, for the error that says it is not there; shared, as every text is: null for an empty one.
struct Undefined {
  std::shared_ptr<const std::string> name{};
};
// How deep and how large a value is, elements that are there twice counted twice.
struct Extent {
  int nesting = 0;
  std::size_t elements = 0;
};
// Lists and dicts never change, and know their extent: nothing holds itself, and whatever walks through
// one (printing, comparing, the destructor) ends soon and needs little stack.
struct Sequence {
  List items;
  bool tuple = false;
  Extent extent{};
};
struct Mapping {
  Dict items;
  Extent extent{};
};
struct Namespace {
  Dict members;
};
// A function, a macro of the template (a Stmt), or a method with the value it is of.
struct Callable {
  std::string name;
  std::shared_ptr<const Value> self;
  const struct Stmt* macro = nullptr;
};

class Value {
 public:
  Value() : data_(Undefined{}) {}
  Value(std::nullptr_t) : data_(nullptr) {}
  Value(bool b) : data_(b) {}
  Value(std::int64_t i) : data_(i) {}
  Value(double d) : data_(d) {}
  Value(std::string s);  // throws Fault where it is longer than kMaxText
  Value(const char* s) : Value(std::string(s)) {}
  static Value undefined(std::string name);
  static Value list(List items, bool tuple = false);
  static Value dict(Dict items);
  static Value name_space(Dict members);
  static Value callable(Callable callable);
  static Value from(const Json& json);

  bool is_undefined() const { return std::holds_alternative<Undefined>(data_); }
  bool is_none() const { return std::holds_alternative<std::nullptr_t>(data_); }
  bool is_bool() const { return std::holds_alternative<bool>(data_); }
  bool is_int() const { return std::holds_alternative<std::int64_t>(data_); }  // not a bool
  bool is_float() const { return std::holds_alternative<double>(data_); }
  bool is_number() const { return is_bool() || is_int() || is_float(); }
  bool is_string() const { return std::holds_alternative<StringPtr>(data_); }
  bool is_list() const { return std::holds_alternative<ListPtr>(data_); }  // or tuple
  bool is_dict() const { return std::holds_alternative<DictPtr>(data_); }
  bool is_callable() const { return std::holds_alternative<CallablePtr>(data_); }

  const std::string& string() const { return *std::get<StringPtr>(data_); }
  const List& list() const { return std::get<ListPtr>(data_)->items; }
  bool is_tuple() const { return is_list() && std::get<ListPtr>(data_)->tuple; }
  const Dict& dict() const { return std::get<DictPtr>(data_)->items; }
  Namespace* name_space() const;  // null where it is none
  const Callable& callable() const { return *std::get<CallablePtr>(data_); }

  std::int64_t integer() const;  // of an int or bool; throws Fault
  double number() const;         // throws Fault
  const Value* find(
      const std::string& key) const;  // of a dict or namespace; null where there is none

  bool truth() const;
  Value str() const;         // the text that is printed
  const char* type() const;  // Python's name of it
  List iterate() const;      // elements, keys or characters; throws Fault

 private:
  using StringPtr = std::shared_ptr<const std::string>;
  using ListPtr = std::shared_ptr<const Sequence>;
  using DictPtr = std::shared_ptr<const Mapping>;
  using NamespacePtr = std::shared_ptr<Namespace>;
  using CallablePtr = std::shared_ptr<const Callable>;

  void repr(TextBuilder& out) const;  // as printed inside of a list
  Extent extent() const;

  std::variant<Undefined, std::nullptr_t, bool, std::int64_t, double, StringPtr, ListPtr, DictPtr,
               NamespacePtr, CallablePtr>
      data_;
};

bool equal(const Value& a, const Value& b);
bool less(const Value& a, const Value& b);                 // throws Fault where there is no order
bool contains(const Value& container, const Value& item);  // `item in container`
Value arithmetic(const std::string& op, const Value& a, const Value& b);

struct JsonStyle {
  std::optional<std::size_t> indent{};  // none: all on one line
  bool ascii = false, sorted = false;
  std::string comma = ", ", colon = ": ";
};
std::string to_json(const Value& value, const JsonStyle& style);  // as Python's json.dumps

}  // namespace mlxtape::formats::jinja
