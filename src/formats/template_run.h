// Evaluates the tree of a chat template.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "formats/template_syntax.h"

namespace mlxtape::formats::jinja {

struct Args {
  List values;
  Dict named;

  // In the order of the parameters; undefined where none was given. Throws Fault for more, or other names.
  List bind(const std::string& who, std::initializer_list<const char*> parameters) const;
};

struct Scope {
  Scope* parent;
  Dict names{};

  const Value* find(const std::string& name) const;
  void set(const std::string& name, Value value);  // here, whatever the parents hold
};

class Runner {
 public:
  Runner(std::int64_t max_steps, std::int64_t now) : steps_left_(max_steps), now_(now) {}

  std::string run(const Body& body, Dict globals);

  void spend(std::size_t steps);  // throws Fault when none are left
  std::int64_t now() const { return now_; }
  int line() const { return line_; }  // that was evaluated last

 private:
  enum class Flow { kNext, kBreak, kContinue };

  Flow execute(const Body& body, Scope& scope, std::string& out);
  Flow execute(const Stmt& s, Scope& scope, std::string& out);
  Flow loop(const Stmt& s, Scope& scope, std::string& out);
  void assign(const std::vector<std::string>& targets, const Value& value, Scope& scope);
  void set_member(const Stmt& s, Scope& scope);
  void append(std::string& out, const std::string& text);

  Value evaluate(const Expr& e, Scope& scope);
  Value compare(const Expr& e, Scope& scope);
  Value slice(const Expr& e, Scope& scope);
  Value call(const Expr& e, Scope& scope);
  Value call_macro(const Stmt& macro, const Args& args);
  Args arguments(const Expr& e, Scope& scope);
  Value name(const std::string& name, const Scope& scope) const;

  std::int64_t steps_left_, now_;
  int line_ = 0, depth_ = 0;
  Scope* root_ = nullptr;
};

// template_filters.cpp
Value apply_filter(Runner& runner, const std::string& name, const Value& in, const Args& args);
bool apply_test(const std::string& name, const Value& in, const Args& args);

// template_calls.cpp
bool is_function(const std::string& name);
Value call_function(Runner& runner, const std::string& name, const Args& args);
Value call_method(Runner& runner, const Value& self, const std::string& name, const Args& args);
Value attribute(const Value& of, const std::string& name);  // of.name: a method before a member
Value item(const Value& of, const Value& key);              // of[key]: a member before a method
std::string trimmed(const std::string& s, const Value& chars, bool left, bool right);
std::string replaced(const std::string& s, const Value& from, const Value& to, const Value& count);
std::string capitalized(const std::string& s);
std::vector<std::string> split_lines(const std::string& s);
const std::string& text_of(const Value& v, const char* what);  // throws Fault where v is no string

}  // namespace mlxtape::formats::jinja
