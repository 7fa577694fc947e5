#include "formats/template_value.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdio>

#include <utf8proc.h>

#include "formats/utf8.h"

namespace mlxtape::formats::jinja {
namespace {

void check_length(std::size_t bytes) {
  if (bytes > kMaxText)
    throw Fault("a text must be at most " + std::to_string(kMaxText) + " bytes long");
}

void grow(Extent& all, const Extent& item) {
  all.nesting = std::max(all.nesting, item.nesting + 1);
  all.elements += 1 + item.elements;
  if (all.nesting > kMaxNesting)
    throw Fault("lists and dicts must be at most " + std::to_string(kMaxNesting) + " deep");
  if (all.elements > kMaxElements)
    throw Fault("a list or dict must have at most " + std::to_string(kMaxElements) + " elements");
}

// The shortest digits that round-trip, written as Python does: an exponent below 1e-4 and from 1e16 on.
std::string float_text(double d) {
  if (std::isnan(d)) return "nan";
  if (std::isinf(d)) return d < 0 ? "-inf" : "inf";
  char text[40];
  const double size = std::abs(d);
  const bool plain = size == 0 || (size >= 1e-4 && size < 1e16);
  const auto end = std::to_chars(text, text + sizeof text, d,
                                 plain ? std::chars_format::fixed : std::chars_format::scientific);
  std::string out(text, end.ptr);
  if (plain && out.find('.') == std::string::npos) out += ".0";
  return out;
}

bool printable(char32_t c) {
  const utf8proc_category_t category = utf8proc_category(static_cast<utf8proc_int32_t>(c));
  return c == ' ' || (category < UTF8PROC_CATEGORY_ZS && category != UTF8PROC_CATEGORY_CN);
}

void append_repr(std::string& out, const std::string& s) {
  const char quote =
      s.find('\'') != std::string::npos && s.find('"') == std::string::npos ? '"' : '\'';
  out += quote;
  for (std::size_t at = 0; at < s.size();) {
    const std::size_t begin = at;
    const char32_t c = next_code_point(s, at);
    char hex[12];
    if (c == static_cast<char32_t>(quote) || c == '\\') {
      out += '\\', out += static_cast<char>(c);
    } else if (c == '\n' || c == '\r' || c == '\t') {
      out += c == '\n' ? "\\n" : c == '\r' ? "\\r" : "\\t";
    } else if (!printable(c)) {
      std::snprintf(hex, sizeof hex,
                    c < 0x100     ? "\\x%02x"
                    : c < 0x10000 ? "\\u%04x"
                                  : "\\U%08x",
                    static_cast<unsigned>(c));
      out += hex;
    } else {
      out.append(s, begin, at - begin);
    }
  }
  out += quote;
}

void append_json_string(std::string& out, const std::string& s, bool ascii) {
  out += '"';
  for (std::size_t at = 0; at < s.size();) {
    const std::size_t begin = at;
    const char32_t c = next_code_point(s, at);
    char hex[16];
    switch (c) {
      case '"': out += "\\\""; continue;
      case '\\': out += "\\\\"; continue;
      case '\n': out += "\\n"; continue;
      case '\r': out += "\\r"; continue;
      case '\t': out += "\\t"; continue;
      case '\b': out += "\\b"; continue;
      case '\f': out += "\\f"; continue;
      default: break;
    }
    if (c < 0x20 || (ascii && c > 0x7E && c < 0x10000)) {
      std::snprintf(hex, sizeof hex, "\\u%04x", static_cast<unsigned>(c));
      out += hex;
    } else if (ascii && c >= 0x10000) {
      const auto v = static_cast<unsigned>(c - 0x10000);
      std::snprintf(hex, sizeof hex, "\\u%04x\\u%04x", 0xD800U + (v >> 10), 0xDC00U + (v & 0x3FFU));
      out += hex;
    } else {
      out.append(s, begin, at - begin);
    }
  }
  out += '"';
}

struct JsonWriter {
  const JsonStyle& style;
  std::string out{};

  void line(int depth) {
    if (style.indent >= 0)
      out += '\n',
          out.append(static_cast<std::size_t>(style.indent) * static_cast<std::size_t>(depth), ' ');
  }
  void separator(bool first, int depth) {
    if (!first) out += style.comma;
    line(depth);
  }
  void write(const Value& v, int depth) {
    check_length(out.size());
    if (v.is_none()) {
      out += "null";
    } else if (v.is_bool()) {
      out += v.truth() ? "true" : "false";
    } else if (v.is_string()) {
      append_json_string(out, v.string(), style.ascii);
    } else if (v.is_float() && !std::isfinite(v.number())) {
      out += std::isnan(v.number()) ? "NaN" : v.number() < 0 ? "-Infinity" : "Infinity";
    } else if (v.is_number()) {
      out += v.str();
    } else if (v.is_list()) {
      out += '[';
      bool first = true;
      for (const Value& item : v.list())
        separator(first, depth + 1), first = false, write(item, depth + 1);
      if (!first) line(depth);
      out += ']';
    } else if (v.is_dict()) {
      Dict items = v.dict();
      if (style.sorted)
        std::sort(items.begin(), items.end(),
                  [](const auto& a, const auto& b) { return a.first < b.first; });
      out += '{';
      bool first = true;
      for (const auto& [key, item] : items) {
        separator(first, depth + 1), first = false;
        append_json_string(out, key, style.ascii);
        out += style.colon;
        write(item, depth + 1);
      }
      if (!first) line(depth);
      out += '}';
    } else {
      throw Fault(std::string("tojson: a value of type ") + v.type() + " has no JSON form");
    }
  }
};

[[noreturn]] void no_operator(const std::string& op, const Value& a, const Value& b) {
  for (const Value* v : {&a, &b}) {
    if (v->is_undefined()) v->number();  // says which
  }
  throw Fault("'" + op + "' is not defined between " + a.type() + " and " + b.type());
}

Value integer_arithmetic(const std::string& op, std::int64_t a, std::int64_t b) {
  std::int64_t out = 0;
  bool overflow = false;
  if (op == "+") {
    overflow = __builtin_add_overflow(a, b, &out);
  } else if (op == "-") {
    overflow = __builtin_sub_overflow(a, b, &out);
  } else if (op == "*") {
    overflow = __builtin_mul_overflow(a, b, &out);
  } else {  // // and %: towards minus infinity
    if (b == 0) throw Fault("division by zero");
    if (b == -1) {
      overflow = op == "//" && __builtin_sub_overflow(std::int64_t{0}, a, &out);
    } else {
      const std::int64_t q = a / b, r = a % b;
      const bool down = r != 0 && (r < 0) != (b < 0);
      out = op == "//" ? q - (down ? 1 : 0) : r + (down ? b : 0);
    }
  }
  if (overflow)
    throw Fault("an integer must fit 64 bits: " + std::to_string(a) + " " + op + " " +
                std::to_string(b));
  return out;
}

Value float_arithmetic(const std::string& op, double a, double b) {
  if (op == "+") return a + b;
  if (op == "-") return a - b;
  if (op == "*") return a * b;
  if (b == 0) throw Fault("division by zero");
  if (op == "/") return a / b;
  double r = std::fmod(a, b);
  if (r != 0 && (r < 0) != (b < 0)) r += b;
  return op == "%" ? r : std::floor(a / b);
}

std::string repeated(const std::string& s, std::int64_t times) {
  if (times <= 0 || s.empty()) return {};
  if (static_cast<std::uint64_t>(times) > kMaxText / s.size()) check_length(kMaxText + 1);
  std::string out;
  for (; times > 0; --times) out += s;
  return out;
}

}  // namespace

Value::Value(std::string s) {
  check_length(s.size());
  data_ = std::make_shared<const std::string>(std::move(s));
}

Value Value::undefined(std::string name) {
  Value v;
  v.data_ = Undefined{std::move(name)};
  return v;
}

Value Value::list(List items, bool tuple) {
  Extent extent{1, 0};
  for (const Value& item : items) grow(extent, item.extent());
  Value v;
  v.data_ = std::make_shared<const Sequence>(Sequence{std::move(items), tuple, extent});
  return v;
}

Value Value::dict(Dict items) {
  Extent extent{1, 0};
  for (const auto& [key, item] : items) grow(extent, item.extent());
  Value v;
  v.data_ = std::make_shared<const Mapping>(Mapping{std::move(items), extent});
  return v;
}

Value Value::name_space(Dict members) {
  Value v;
  v.data_ = std::make_shared<Namespace>(Namespace{std::move(members)});
  return v;
}

Value Value::callable(Callable callable) {
  Value v;
  v.data_ = std::make_shared<const Callable>(std::move(callable));
  return v;
}

Value Value::from(const Json& json) {
  if (json.is_null()) return nullptr;
  if (json.is_bool()) return json.boolean();
  if (json.is_integer()) return json.integer();
  if (json.is_number()) return json.number();
  if (json.is_string()) return json.string();
  if (json.is_array()) {
    List items;
    for (const Json& item : json.array()) items.push_back(from(item));
    return list(std::move(items));
  }
  Dict items;
  for (const auto& [key, item] : json.object()) items.emplace_back(key, from(item));
  return dict(std::move(items));
}

Namespace* Value::name_space() const {
  const auto* p = std::get_if<NamespacePtr>(&data_);
  return p != nullptr ? p->get() : nullptr;
}

// Of what a list or dict may hold. A namespace can change, so one inside of a value could come to hold itself;
// a method holds its value.
Extent Value::extent() const {
  if (is_list()) return std::get<ListPtr>(data_)->extent;
  if (is_dict()) return std::get<DictPtr>(data_)->extent;
  if (name_space() != nullptr || is_callable())
    throw Fault(std::string("a list or dict must hold values only, got a ") + type());
  return {};
}

std::size_t Value::weight() const {
  if (is_string()) return string().size() / 64;
  return is_list() || is_dict() ? extent().elements : 0;
}

std::int64_t Value::integer() const {
  if (is_bool()) return std::get<bool>(data_) ? 1 : 0;
  if (is_int()) return std::get<std::int64_t>(data_);
  if (const auto* u = std::get_if<Undefined>(&data_)) throw Fault("'" + u->name + "' is undefined");
  throw Fault(std::string("an integer is needed, got a value of type ") + type());
}

double Value::number() const {
  return is_float() ? std::get<double>(data_) : static_cast<double>(integer());
}

const Value* Value::find(const std::string& key) const {
  const Namespace* n = name_space();
  const Dict& items = n != nullptr ? n->members : dict();
  for (const auto& item : items) {
    if (item.first == key) return &item.second;
  }
  return nullptr;
}

bool Value::truth() const {
  if (is_number()) return number() != 0;
  if (is_string()) return !string().empty();
  if (is_list()) return !list().empty();
  if (is_dict()) return !dict().empty();
  return !is_undefined() && !is_none();
}

const char* Value::type() const {
  if (is_tuple()) return "tuple";
  static constexpr const char* kNames[] = {"Undefined", "NoneType", "bool", "int",
                                           "float",     "str",      "list", "dict",
                                           "Namespace", "function"};
  return kNames[data_.index()];
}

void Value::repr(std::string& out) const {
  check_length(out.size());
  if (is_none()) {
    out += "None";
  } else if (is_bool()) {
    out += truth() ? "True" : "False";
  } else if (is_int()) {
    out += std::to_string(integer());
  } else if (is_float()) {
    out += float_text(number());
  } else if (is_string()) {
    append_repr(out, string());
  } else if (is_list()) {
    out += is_tuple() ? '(' : '[';
    const char* comma = "";
    for (const Value& item : list()) out += comma, item.repr(out), comma = ", ";
    if (is_tuple() && list().size() == 1) out += ',';
    out += is_tuple() ? ')' : ']';
  } else if (is_dict()) {
    out += '{';
    const char* comma = "";
    for (const auto& [key, item] : dict()) {
      out += comma, append_repr(out, key), out += ": ", item.repr(out), comma = ", ";
    }
    out += '}';
  } else if (is_undefined()) {
    out += "Undefined";
  } else {
    throw Fault(std::string("a ") + type() + " cannot be printed");
  }
}

std::string Value::repr() const {
  std::string out;
  repr(out);
  return out;
}

std::string Value::str() const {
  if (is_string()) return string();
  return is_undefined() ? std::string() : repr();
}

List Value::iterate() const {
  List out;
  if (is_undefined()) return out;
  if (is_list()) return list();
  if (is_dict()) {
    for (const auto& item : dict()) out.emplace_back(item.first);
  } else if (is_string()) {
    const std::string& s = string();
    if (s.size() > kMaxElements)
      throw Fault("a text of more than " + std::to_string(kMaxElements) +
                  " bytes cannot be taken apart");
    for (std::size_t at = 0; at < s.size();) {
      const std::size_t begin = at;
      next_code_point(s, at);
      out.emplace_back(s.substr(begin, at - begin));
    }
  } else {
    throw Fault(std::string("a value of type ") + type() + " cannot be iterated over");
  }
  return out;
}

bool equal(const Value& a, const Value& b) {
  if (a.is_number() && b.is_number()) {
    if (a.is_float() || b.is_float()) return a.number() == b.number();
    return a.integer() == b.integer();
  }
  if (a.is_string() && b.is_string()) return a.string() == b.string();
  if (a.is_list() && b.is_list()) {
    return a.is_tuple() == b.is_tuple() &&
           std::equal(a.list().begin(), a.list().end(), b.list().begin(), b.list().end(), equal);
  }
  if (a.is_dict() && b.is_dict()) {
    return a.dict().size() == b.dict().size() &&
           std::all_of(a.dict().begin(), a.dict().end(), [&](const auto& item) {
             const Value* other = b.find(item.first);
             return other != nullptr && equal(item.second, *other);
           });
  }
  return (a.is_none() && b.is_none()) || (a.is_undefined() && b.is_undefined());
}

bool less(const Value& a, const Value& b) {
  if (a.is_number() && b.is_number()) {
    if (a.is_float() || b.is_float()) return a.number() < b.number();
    return a.integer() < b.integer();
  }
  if (a.is_string() && b.is_string())
    return a.string() < b.string();  // the order of code points is that of bytes
  if (a.is_list() && b.is_list() && a.is_tuple() == b.is_tuple()) {
    return std::lexicographical_compare(a.list().begin(), a.list().end(), b.list().begin(),
                                        b.list().end(), less);
  }
  no_operator("<", a, b);
}

bool contains(const Value& container, const Value& item) {
  if (container.is_string()) {
    if (!item.is_string()) no_operator("in", item, container);
    return container.string().find(item.string()) != std::string::npos;
  }
  if (container.is_dict()) return item.is_string() && container.find(item.string()) != nullptr;
  if (container.is_undefined()) return false;
  if (!container.is_list()) no_operator("in", item, container);
  return std::any_of(container.list().begin(), container.list().end(),
                     [&](const Value& v) { return equal(v, item); });
}

std::string concat(const std::string& a, const std::string& b) {
  check_length(a.size() + b.size());
  return a + b;
}

Value arithmetic(const std::string& op, const Value& a, const Value& b) {
  if (a.is_number() && b.is_number()) {
    if (op == "/" || a.is_float() || b.is_float())
      return float_arithmetic(op, a.number(), b.number());
    return integer_arithmetic(op, a.integer(), b.integer());
  }
  if (op == "+" && a.is_string() && b.is_string()) return concat(a.string(), b.string());
  if (op == "+" && a.is_list() && b.is_list() && a.is_tuple() == b.is_tuple()) {
    List all = a.list();
    all.insert(all.end(), b.list().begin(), b.list().end());
    return Value::list(std::move(all), a.is_tuple());
  }
  if (op == "*" && a.is_string() && (b.is_int() || b.is_bool()))
    return repeated(a.string(), b.integer());
  if (op == "*" && b.is_string() && (a.is_int() || a.is_bool()))
    return repeated(b.string(), a.integer());
  no_operator(op, a, b);
}

std::string to_json(const Value& value, const JsonStyle& style) {
  JsonWriter writer{style};
  writer.write(value, 0);
  return std::move(writer.out);
}

}  // namespace mlxtape::formats::jinja
