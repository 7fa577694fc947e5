#include "formats/template_run.h"

#include <algorithm>

#include "formats/utf8.h"
#include "mlxtape/base/quote.h"

namespace mlxtape::formats::jinja {
namespace {

constexpr int kMaxCalls =
    600;  // evaluations inside of each other: half a megabyte of stack, ten with sanitizers

// Places of n: `count` of them from `begin` on, each `step` further.
struct Slice {
  std::int64_t begin, step;
  std::size_t count;
};

// Python's rules for bounds that are absent, negative or outside.
Slice slice_of(std::int64_t n, const Value& from, const Value& to, const Value& by) {
  const auto given = [](const Value& v) {
    return !v.is_undefined() && !v.is_none();
  };
  const std::int64_t step = given(by) ? by.integer() : 1;
  if (step == 0) throw Fault("the step of a slice must not be 0");
  const auto bound = [&](const Value& v, std::int64_t otherwise) {
    if (!given(v)) return otherwise;
    std::int64_t i = v.integer();
    if (i < 0) i = i < -n ? -1 : i + n;
    return std::clamp<std::int64_t>(i, step < 0 ? -1 : 0, step < 0 ? n - 1 : n);
  };
  const std::int64_t begin = bound(from, step < 0 ? n - 1 : 0), end = bound(to, step < 0 ? -1 : n);
  const std::int64_t span = step < 0 ? begin - end : end - begin;
  if (span <= 0) return {0, 1, 0};
  const auto size = static_cast<std::uint64_t>(step < 0 ? -(step + 1) : step - 1) + 1;
  return {begin, step, static_cast<std::size_t>((static_cast<std::uint64_t>(span) - 1) / size + 1)};
}

std::string sliced(std::string_view s, const Slice& slice) {
  std::size_t at = forward(s, 0, static_cast<std::size_t>(slice.begin));
  if (slice.step == 1) return std::string(s.substr(at, forward(s, at, slice.count) - at));
  // A step further than the text is long is never taken.
  const auto far = static_cast<std::int64_t>(s.size());
  const std::int64_t step = std::clamp(slice.step, -far, far);
  std::string out;
  for (std::size_t i = 0; i < slice.count; ++i) {
    out += s.substr(at, forward(s, at, 1) - at);
    at = step < 0 ? backward(s, at, static_cast<std::size_t>(-step))
                  : forward(s, at, static_cast<std::size_t>(step));
  }
  return out;
}

Value loop_variable(const LoopPlace& loop) {
  const auto& [items, i] = loop;
  const auto number = [](std::size_t n) {
    return Value(static_cast<std::int64_t>(n));
  };
  const std::size_t n = items.size();
  // Undefined ones are left out: asking for them gives the same.
  Dict d{{"index0", number(i)},           {"index", number(i + 1)}, {"first", Value(i == 0)},
         {"last", Value(i + 1 == n)},     {"length", number(n)},    {"revindex", number(n - i)},
         {"revindex0", number(n - i - 1)}};
  if (i > 0) d.emplace_back("previtem", items[i - 1]);
  if (i + 1 < n) d.emplace_back("nextitem", items[i + 1]);
  return Value::dict(std::move(d));
}

bool holds(const std::string& op, const Value& a, const Value& b) {
  if (op == "==") return equal(a, b);
  if (op == "!=") return !equal(a, b);
  if (op == "<") return less(a, b);
  if (op == ">") return less(b, a);
  if (op == "<=") return less(a, b) || equal(a, b);
  if (op == ">=") return less(b, a) || equal(a, b);
  return contains(b, a) == (op == "in");
}

}  // namespace

List Args::bind(const std::string& who, std::initializer_list<const char*> parameters) const {
  if (values.size() > parameters.size()) {
    throw Fault(who + ": must be given at most " + std::to_string(parameters.size()) +
                " arguments, got " + std::to_string(values.size()));
  }
  List out(parameters.size());
  std::copy(values.begin(), values.end(), out.begin());
  for (const auto& [key, value] : named) {
    const auto* at = std::find(parameters.begin(), parameters.end(), key);
    if (at == parameters.end()) throw Fault(who + ": has no parameter '" + shown(key) + "'");
    const auto i = static_cast<std::size_t>(at - parameters.begin());
    if (i < values.size()) throw Fault(who + ": the parameter '" + key + "' is given twice");
    out[i] = value;
  }
  return out;
}

const Value* Scope::find(const std::string& name) {
  for (Scope* s = this; s != nullptr; s = s->parent) {
    if (const Value* found = find_in(s->names, name)) return found;
    if (s->loop == nullptr || name != "loop") continue;
    s->names.emplace_back(name, loop_variable(*s->loop));
    return &s->names.back().second;
  }
  return nullptr;
}

void Scope::set(const std::string& name, Value value) { set_in(names, name, std::move(value)); }

std::string Runner::run(const Body& body, Dict globals) {
  Scope root{nullptr, std::move(globals)};
  root_ = &root;
  TextBuilder out;
  execute(body, root, out);
  return out.take();
}

// ---- statements ----

Runner::Flow Runner::execute(const Body& body, Scope& scope, TextBuilder& out) {
  for (const Stmt& s : body) {
    if (const Flow flow = execute(s, scope, out); flow != Flow::kNext) return flow;
  }
  return Flow::kNext;
}

Runner::Flow Runner::execute(const Stmt& s, Scope& scope, TextBuilder& out) {
  line_ = s.line;
  spend(1);
  switch (s.kind) {
    case Stmt::Kind::kText: out.append(s.name); break;
    case Stmt::Kind::kPrint: out.append(evaluate(*s.exprs[0], scope).str().string()); break;
    case Stmt::Kind::kIf:
      for (std::size_t i = 0; i < s.exprs.size(); ++i) {
        if (evaluate(*s.exprs[i], scope).truth()) return execute(s.bodies[i], scope, out);
      }
      if (s.bodies.size() > s.exprs.size()) return execute(s.bodies.back(), scope, out);
      break;
    case Stmt::Kind::kFor: return loop(s, scope, out);
    case Stmt::Kind::kSet: assign(s.targets, evaluate(*s.exprs[0], scope), scope); break;
    case Stmt::Kind::kSetMember: set_member(s, scope); break;
    case Stmt::Kind::kSetBlock: {
      Scope inner{&scope};
      TextBuilder text;
      execute(s.bodies[0], inner, text);
      inner.set(s.name, Value(text.take()));
      scope.set(s.targets[0], evaluate(*s.exprs[0], inner));
      break;
    }
    case Stmt::Kind::kMacro: scope.set(s.name, Value::callable({s.name, nullptr, &s})); break;
    case Stmt::Kind::kGeneration: {
      Scope inner{&scope};
      return execute(s.bodies[0], inner, out);
    }
    case Stmt::Kind::kBreak: return Flow::kBreak;
    case Stmt::Kind::kContinue: return Flow::kContinue;
  }
  return Flow::kNext;
}

Runner::Flow Runner::loop(const Stmt& s, Scope& scope, TextBuilder& out) {
  Value all = evaluate(*s.exprs[0], scope);
  if (!all.is_list()) all = Value::list(all.iterate());
  if (s.exprs.size() > 1) {
    List kept;
    for (const Value& item : all.list()) {
      Scope inner{&scope};
      assign(s.targets, item, inner);
      if (evaluate(*s.exprs[1], inner).truth()) kept.push_back(item);
    }
    all = Value::list(std::move(kept));
  }
  const List& items = all.list();
  for (std::size_t i = 0; i < items.size(); ++i) {
    spend(2);
    const LoopPlace place{items, i};
    Scope inner{&scope, {}, &place};
    assign(s.targets, items[i], inner);
    if (execute(s.bodies[0], inner, out) == Flow::kBreak) break;
  }
  if (items.empty() && s.bodies.size() > 1) {
    Scope inner{&scope};
    return execute(s.bodies[1], inner, out);
  }
  return Flow::kNext;
}

void Runner::assign(const std::vector<std::string>& targets, const Value& value, Scope& scope) {
  if (targets.size() == 1) {
    scope.set(targets[0], value);
    return;
  }
  List parts = value.iterate();
  if (parts.size() != targets.size()) {
    throw Fault(std::to_string(targets.size()) + " values are needed, one for each name, got " +
                std::to_string(parts.size()));
  }
  for (std::size_t i = 0; i < parts.size(); ++i) scope.set(targets[i], std::move(parts[i]));
}

void Runner::set_member(const Stmt& s, Scope& scope) {
  const Value* of = scope.find(s.targets[0]);
  Namespace* members = of != nullptr ? of->name_space() : nullptr;
  if (members == nullptr)
    throw Fault("only a namespace's members can be set, and '" + shown(s.targets[0]) + "' is none");
  Value value = evaluate(*s.exprs[0], scope);
  // In a list for its check: what holds itself would never go.
  Value::list({value});
  set_in(members->members, s.name, std::move(value));
}

// ---- expressions ----

Value Runner::name(const std::string& name, Scope& scope) {
  if (const Value* found = scope.find(name)) return *found;
  if (is_function(name)) return Value::callable({name, nullptr});
  return Value::undefined(name);
}

Value Runner::evaluate(const Expr& e, Scope& scope) {
  struct Depth {
    int& depth;
    explicit Depth(int& d) : depth(d) {
      if (++depth > kMaxCalls)
        --depth, throw Fault("expressions and macros are too deep in each other");
    }
    ~Depth() { --depth; }
  };
  const Depth depth(depth_);
  line_ = e.line;
  spend(1 + copied(e.name.size()));
  const auto arg = [&](std::size_t i) {
    return evaluate(*e.args[i], scope);
  };
  switch (e.op) {
    case Expr::Op::kConst: return e.value;
    case Expr::Op::kName: return name(e.name, scope);
    case Expr::Op::kList:
    case Expr::Op::kTuple: {
      List items;
      for (const ExprPtr& a : e.args) items.push_back(evaluate(*a, scope));
      return Value::list(std::move(items), e.op == Expr::Op::kTuple);
    }
    case Expr::Op::kDict: {
      Scope items{nullptr};  // the last of equal keys counts
      for (std::size_t i = 0; i < e.args.size(); i += 2)
        items.set(text_of(arg(i), "a key of a dict"), arg(i + 1));
      return Value::dict(std::move(items.names));
    }
    case Expr::Op::kAttr: return attribute(arg(0), e.name);
    case Expr::Op::kItem: {
      const Value of = arg(0);
      return item(of, arg(1));
    }
    case Expr::Op::kSlice: return slice(e, scope);
    case Expr::Op::kCall: return call(e, scope);
    case Expr::Op::kFilter: {
      const Value in = arg(0);
      return apply_filter(e.name, in, arguments(e, scope));
    }
    case Expr::Op::kTest: {
      const Value in = arg(0);
      return apply_test(e.name, in, arguments(e, scope));
    }
    case Expr::Op::kNot: return !arg(0).truth();
    case Expr::Op::kNegate:
    case Expr::Op::kPlus: {
      const Value v = arg(0);
      v.number();  // refuses what is none
      return arithmetic("*", Value(std::int64_t{e.op == Expr::Op::kNegate ? -1 : 1}), v);
    }
    case Expr::Op::kAnd: {
      Value left = arg(0);
      return left.truth() ? arg(1) : left;
    }
    case Expr::Op::kOr: {
      Value left = arg(0);
      return left.truth() ? left : arg(1);
    }
    case Expr::Op::kIf:
      if (arg(1).truth()) return arg(0);
      return e.args[2] ? arg(2) : Value::undefined("inline if without else");
    case Expr::Op::kCompare: return compare(e, scope);
    case Expr::Op::kBinary: {
      const Value left = arg(0);
      return arithmetic(e.name, left, arg(1));
    }
    case Expr::Op::kConcat: {
      TextBuilder out;
      for (const ExprPtr& a : e.args) out.append(evaluate(*a, scope).str().string());
      return out.take();
    }
  }
  return {};
}

Value Runner::compare(const Expr& e, Scope& scope) {
  Value left = evaluate(*e.args[0], scope);
  for (std::size_t i = 0; i < e.names.size(); ++i) {
    Value right = evaluate(*e.args[i + 1], scope);
    if (!holds(e.names[i], left, right)) return false;
    left = std::move(right);
  }
  return true;
}

Value Runner::slice(const Expr& e, Scope& scope) {
  const Value of = evaluate(*e.args[0], scope);
  Value bounds[3];
  for (std::size_t i = 0; i < 3; ++i) {
    if (e.args[i + 1]) bounds[i] = evaluate(*e.args[i + 1], scope);
  }
  if (of.is_list()) {
    const List& items = of.list();
    const Slice slice =
        slice_of(static_cast<std::int64_t>(items.size()), bounds[0], bounds[1], bounds[2]);
    spend(slice.count);
    List out;
    out.reserve(slice.count);
    for (std::size_t i = 0; i < slice.count; ++i) {
      out.push_back(
          items[static_cast<std::size_t>(slice.begin + static_cast<std::int64_t>(i) * slice.step)]);
    }
    return Value::list(std::move(out), of.is_tuple());
  }
  if (of.is_undefined()) of.number();  // says which
  const std::string& text = text_of(of, "what is sliced");
  spend(walked(text.size()));
  return sliced(text, slice_of(static_cast<std::int64_t>(count_code_points(text)), bounds[0],
                               bounds[1], bounds[2]));
}

Args Runner::arguments(const Expr& e, Scope& scope) {
  Args args;
  for (std::size_t i = 1; i < e.args.size(); ++i)
    args.values.push_back(evaluate(*e.args[i], scope));
  for (const auto& [key, value] : e.named) args.named.emplace_back(key, evaluate(*value, scope));
  return args;
}

Value Runner::call(const Expr& e, Scope& scope) {
  const Value callee = evaluate(*e.args[0], scope);
  const Args args = arguments(e, scope);
  line_ = e.line;
  if (!callee.is_callable()) {
    if (callee.is_undefined()) callee.number();  // says which
    throw Fault(std::string("a value of type ") + callee.type() + " cannot be called");
  }
  const Callable& c = callee.callable();
  if (c.macro != nullptr) return call_macro(*c.macro, args);
  return c.self ? call_method(*c.self, c.name, args) : call_function(*this, c.name, args);
}

Value Runner::call_macro(const Stmt& macro, const Args& args) {
  if (args.values.size() > macro.targets.size()) {
    throw Fault("macro '" + shown(macro.name) + "': must be given at most " +
                std::to_string(macro.targets.size()) + " arguments, got " +
                std::to_string(args.values.size()));
  }
  spend(macro.targets.size() * (1 + args.named.size()));
  Scope scope{root_};
  const std::size_t first_default = macro.targets.size() - macro.exprs.size();
  for (std::size_t i = 0; i < macro.targets.size(); ++i) {
    const std::string& parameter = macro.targets[i];
    const auto named = std::find_if(args.named.begin(), args.named.end(),
                                    [&](const auto& n) { return n.first == parameter; });
    if (i < args.values.size()) {
      scope.set(parameter, args.values[i]);
    } else if (named != args.named.end()) {
      scope.set(parameter, named->second);
    } else {
      scope.set(parameter, i >= first_default ? evaluate(*macro.exprs[i - first_default], scope)
                                              : Value::undefined(parameter));
    }
  }
  for (const auto& [key, value] : args.named) {
    const auto at = std::find(macro.targets.begin(), macro.targets.end(), key);
    if (at == macro.targets.end())
      throw Fault("macro '" + shown(macro.name) + "': has no parameter '" + shown(key) + "'");
  }
  TextBuilder out;
  execute(macro.bodies[0], scope, out);
  return out.take();
}

}  // namespace mlxtape::formats::jinja
