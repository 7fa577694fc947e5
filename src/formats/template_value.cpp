#include "formats/template_value.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "formats/utf8.h"
#include "mlxtape/base/quote.h"

namespace mlxtape::formats::jinja {
namespace {

void grow(Extent& all, const Extent& item) {
  all.nesting = std::max(all.nesting, item.nesting + 1);
  all.elements += 1 + item.elements;
  if (all.nesting > kMaxNesting)
    throw Fault("lists and dicts must be at most " + std::to_string(kMaxNesting) + " deep");
  if (all.elements > kMaxElements)
    throw Fault("a list or dict must have at most " + std::to_string(kMaxElements) + " elements");
}

// Steps that comparing two texts takes at the most.
std::size_t common_bytes(const Value& a, const Value& b) {
  return copied(std::min(a.string().size(), b.string().size()));
}

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
  const std::size_t bytes = s.size() * static_cast<std::size_t>(times);
  spend(copied(bytes));
  std::string out;
  out.reserve(bytes);
  for (out = s; out.size() < bytes;) out.append(out, 0, std::min(out.size(), bytes - out.size()));
  return out;
}

}  // namespace

std::size_t weight(const Dict& items) {
  std::size_t steps = 2 * items.size();
  for (const auto& item : items) steps += copied(item.first.size());
  return steps;
}

const Value* find_in(const Dict& items, const std::string& key) {
  std::size_t compared = 0;
  const auto found = std::find_if(items.begin(), items.end(), [&](const auto& item) {
    if (item.first.size() != key.size()) return false;
    compared += key.size();
    return item.first == key;
  });
  spend(static_cast<std::size_t>(found - items.begin()) / 8 + copied(compared));
  return found != items.end() ? &found->second : nullptr;
}

void set_in(Dict& items, const std::string& key, Value value) {
  if (Value* found = const_cast<Value*>(find_in(items, key))) {
    *found = std::move(value);
  } else {
    spend(copied(key.size()));
    items.emplace_back(key, std::move(value));
  }
}

Value::Value(std::string s) {
  check_length(s.size());
  spend(2 + copied(s.size()));
  data_ = std::make_shared<const std::string>(std::move(s));
}

Value Value::undefined(std::string name) {
  spend(2 + copied(name.size()));
  Value v;
  v.data_ = Undefined{std::make_shared<const std::string>(std::move(name))};
  return v;
}

Value Value::list(List items, bool tuple) {
  spend(4 + items.size());
  Extent extent{1, 0};
  for (const Value& item : items) grow(extent, item.extent());
  Value v;
  v.data_ = std::make_shared<const Sequence>(Sequence{std::move(items), tuple, extent});
  return v;
}

Value Value::dict(Dict items) {
  spend(4 + jinja::weight(items));
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
  spend(4);
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

std::int64_t Value::integer() const {
  if (is_bool()) return std::get<bool>(data_) ? 1 : 0;
  if (is_int()) return std::get<std::int64_t>(data_);
  if (const auto* u = std::get_if<Undefined>(&data_))
    throw Fault("'" + (u->name ? shown(*u->name) : "") + "' is undefined");
  throw Fault(std::string("an integer is needed, got a value of type ") + type());
}

double Value::number() const {
  return is_float() ? std::get<double>(data_) : static_cast<double>(integer());
}

const Value* Value::find(const std::string& key) const {
  const Namespace* n = name_space();
  return find_in(n != nullptr ? n->members : dict(), key);
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

List Value::iterate() const {
  List out;
  if (is_undefined()) return out;
  if (is_list()) return spend(list().size()), list();
  if (is_dict()) {
    for (const auto& item : dict()) out.emplace_back(item.first);
  } else if (is_string()) {
    const std::string& s = string();
    if (s.size() > kMaxElements)
      throw Fault("a text of more than " + std::to_string(kMaxElements) +
                  " bytes cannot be taken apart");
    spend(s.size());
    for (std::size_t at = 0; at < s.size();) {
      const std::size_t begin = std::exchange(at, forward(s, at, 1));
      out.emplace_back(s.substr(begin, at - begin));
    }
  } else {
    throw Fault(std::string("a value of type ") + type() + " cannot be iterated over");
  }
  return out;
}

bool equal(const Value& a, const Value& b) {
  spend(1 + (a.is_string() && b.is_string() ? common_bytes(a, b) : 0));
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
  spend(1 + (a.is_string() && b.is_string() ? common_bytes(a, b) : 0));
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
    return find_first(container.string(), item.string()) != std::string::npos;
  }
  if (container.is_dict()) return item.is_string() && container.find(item.string()) != nullptr;
  if (container.is_undefined()) return false;
  if (!container.is_list()) no_operator("in", item, container);
  return std::any_of(container.list().begin(), container.list().end(),
                     [&](const Value& v) { return equal(v, item); });
}

Value arithmetic(const std::string& op, const Value& a, const Value& b) {
  if (a.is_number() && b.is_number()) {
    if (op == "/" || a.is_float() || b.is_float())
      return float_arithmetic(op, a.number(), b.number());
    return integer_arithmetic(op, a.integer(), b.integer());
  }
  if (op == "+" && a.is_string() && b.is_string()) {
    TextBuilder both;
    both.append(a.string());
    both.append(b.string());
    return both.take();
  }
  if (op == "+" && a.is_list() && b.is_list() && a.is_tuple() == b.is_tuple()) {
    spend(a.list().size() + b.list().size());
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

}  // namespace mlxtape::formats::jinja
