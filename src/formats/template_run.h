// Evaluates the tree of a chat template.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "formats/template_syntax.h"
#include "mlxtape/base/function_ref.h"

namespace mlxtape::formats::jinja {

struct Args {
  List values;
  Dict named;

  // In the order of the parameters; undefined where none was given. Throws Fault for more, or other names.
  List bind(const std::string& who, std::initializer_list<const char*> parameters) const;
};

// Where a loop is: what `loop` is made of when somebody asks for it.
struct LoopPlace {
  const List& items;
  std::size_t i;
};

struct Scope {
  Scope* parent;
  Dict names{};
  const LoopPlace* loop = nullptr;

  const Value* find(const std::string& name);
  void set(const std::string& name, Value value);  // here, whatever the parents hold
};

class Runner {
 public:
  explicit Runner(std::int64_t now) : now_(now) {}

  std::string run(const Body& body, Dict globals);

  std::int64_t now() const { return now_; }
  int line() const { return line_; }  // that was evaluated last

 private:
  enum class Flow { kNext, kBreak, kContinue };

  Flow execute(const Body& body, Scope& scope, TextBuilder& out);
  Flow execute(const Stmt& s, Scope& scope, TextBuilder& out);
  Flow loop(const Stmt& s, Scope& scope, TextBuilder& out);
  void assign(const std::vector<std::string>& targets, const Value& value, Scope& scope);
  void set_member(const Stmt& s, Scope& scope);

  Value evaluate(const Expr& e, Scope& scope);
  Value compare(const Expr& e, Scope& scope);
  Value slice(const Expr& e, Scope& scope);
  Value call(const Expr& e, Scope& scope);
  Value call_macro(const Stmt& macro, const Args& args);
  Args arguments(const Expr& e, Scope& scope);
  static Value name(const std::string& name, Scope& scope);

  std::int64_t now_;
  int line_ = 0, depth_ = 0;
  Scope* root_ = nullptr;
};

// template_filters.cpp
Value apply_filter(const std::string& name, const Value& in, const Args& args);
bool apply_test(const std::string& name, const Value& in, const Args& args);

// template_calls.cpp
bool is_function(const std::string& name);
Value call_function(Runner& runner, const std::string& name, const Args& args);
Value call_method(const Value& self, const std::string& name, const Args& args);
Value attribute(const Value& of, const std::string& name);  // of.name: a method before a member
Value item(const Value& of, const Value& key);              // of[key]: a member before a method
std::string trimmed(std::string_view s, const Value& chars, bool left, bool right);
std::string replaced(std::string_view s, const Value& from, const Value& to, const Value& count);
std::string capitalized(std::string_view s);
std::string changed_case(std::string_view s, bool upper);
void each_line(std::string_view s, FunctionRef<void(std::string_view)> line);  // as splitlines
const std::string& text_of(const Value& v, const char* what);  // throws Fault where v is no string

}  // namespace mlxtape::formats::jinja
