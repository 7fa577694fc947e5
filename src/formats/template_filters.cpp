// The filters and tests of chat templates: a table of each, by name.
#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <optional>

#include "formats/template_run.h"
#include "formats/utf8.h"
#include "mlxtape/base/quote.h"

namespace mlxtape::formats::jinja {
namespace {

bool given(const Value& v) { return !v.is_undefined() && !v.is_none(); }

// A path such as "function.name" or "0".
Value member(Value of, const Value& path) {
  if (path.is_int()) return item(of, path);
  const std::string& text = text_of(path, "an attribute");
  for (std::size_t begin = 0; begin <= text.size();) {
    const std::size_t end = std::min(text.find('.', begin), text.size());
    const std::string part = text.substr(begin, end - begin);
    const bool number =
        !part.empty() && part.size() < 18 && part.find_first_not_of("0123456789") == part.npos;
    of = item(of, number ? Value(static_cast<std::int64_t>(std::stoll(part))) : Value(part));
    begin = end + 1;
  }
  return of;
}

// What strings are compared by where case does not count.
Value key_of(const Value& v, const Value& attribute, bool case_sensitive) {
  Value key = given(attribute) ? member(v, attribute) : v;
  return key.is_string() && !case_sensitive ? Value(changed_case(key.string(), false)) : key;
}

Value length(const Value& v) {
  std::size_t n = 0;
  if (v.is_string()) {
    spend(copied(v.string().size()));
    n = count_code_points(v.string());
  } else if (v.is_list()) {
    n = v.list().size();
  } else if (v.is_dict()) {
    n = v.dict().size();
  } else if (!v.is_undefined()) {
    throw Fault(std::string("length: a value of type ") + v.type() + " has none");
  }
  return static_cast<std::int64_t>(n);
}

Value pairs(const Value& v) {
  if (v.is_undefined()) return Value::list({});
  if (!v.is_dict())
    throw Fault(std::string("items: must be of a dict, got a value of type ") + v.type());
  List out;
  for (const auto& [key, value] : v.dict()) out.push_back(Value::list({Value(key), value}, true));
  return Value::list(std::move(out));
}

Value join(const Value& in, const Value& separator, const Value& attribute) {
  const Value between = separator.str();
  TextBuilder out;
  bool first = true;
  for (const Value& v : in.iterate()) {
    if (!first) out.append(between.string());
    first = false;
    out.append((given(attribute) ? member(v, attribute) : v).str().string());
  }
  return out.take();
}

Value indented(std::string_view s, const Value& width, bool first, bool blank) {
  const std::int64_t spaces = width.is_string() || width.is_undefined() ? 4 : width.integer();
  TextBuilder out;
  const auto indent = [&] {
    if (width.is_string()) {
      out.append(width.string());
    } else {
      out.append(static_cast<std::size_t>(std::max<std::int64_t>(spaces, 0)), ' ');
    }
  };
  if (first) indent();
  bool begin = true;
  TextBuilder closed;  // the last line has an end too
  closed.append(s);
  closed.append("\n");
  each_line(closed.take(), [&](std::string_view line) {
    if (!begin) out.append("\n");
    if (!begin && (blank || !line.empty())) indent();
    out.append(line);
    begin = false;
  });
  return out.take();
}

// Each word's first letter is large, what follows small; words begin behind spaces and opening brackets.
Value title(std::string_view s) {
  spend(walked(s.size()));
  std::string out;
  bool begins = true;
  for (std::size_t at = 0; at < s.size();) {
    const char32_t c = next_code_point(s, at);
    append_utf8(out, begins ? to_upper(c) : to_lower(c));
    begins = is_space(c) || c == '-' || c == '(' || c == '{' || c == '[' || c == '<';
  }
  return out;
}

std::optional<double> parsed(const Value& v) {
  if (v.is_number()) return v.number();
  if (!v.is_string()) return std::nullopt;
  spend(walked(v.string().size()));
  const std::string text(trim_left(trim_right(v.string())));
  char* end = nullptr;
  const double d = std::strtod(text.c_str(), &end);
  if (text.empty() || *end != 0 || text.find_first_of("xX") != text.npos) return std::nullopt;
  return d;
}

Value to_int(const Value& v, const Value& otherwise) {
  if (v.is_int() || v.is_bool()) return v.integer();
  const Value fallback = otherwise.is_undefined() ? Value(std::int64_t{0}) : otherwise;
  if (v.is_string()) {
    spend(walked(v.string().size()));
    const std::string text(trim_left(trim_right(v.string())));
    char* end = nullptr;
    errno = 0;
    const long long i = std::strtoll(text.c_str(), &end, 10);
    if (!text.empty() && *end == 0 && errno == 0) return static_cast<std::int64_t>(i);
  }
  const std::optional<double> d = parsed(v);
  if (!d || !(std::abs(*d) < 9e18)) return fallback;
  return static_cast<std::int64_t>(*d);
}

Value tojson(const List& p) {
  JsonStyle style;
  style.ascii = p[0].truth();
  style.sorted = p[3].truth();
  if (given(p[1])) {
    style.indent = static_cast<std::size_t>(std::max<std::int64_t>(p[1].integer(), 0));
    style.comma = ",";
  }
  if (given(p[2])) {
    const List parts = p[2].iterate();
    if (parts.size() != 2) throw Fault("tojson: separators must be two texts");
    const std::string &comma = text_of(parts[0], "a separator"),
                      &colon = text_of(parts[1], "a separator");
    spend(copied(comma.size() + colon.size()));
    style.comma = comma;
    style.colon = colon;
  }
  return to_json(p[4], style);
}

Value sorted(const Value& in, bool reverse, bool case_sensitive, const Value& attribute) {
  List items = in.iterate();
  spend(items.size() * 4);
  std::vector<std::pair<Value, Value>> keyed;
  for (Value& v : items) keyed.emplace_back(key_of(v, attribute, case_sensitive), v);
  std::stable_sort(keyed.begin(), keyed.end(), [&](const auto& a, const auto& b) {
    return reverse ? less(b.first, a.first) : less(a.first, b.first);
  });
  for (std::size_t i = 0; i < items.size(); ++i) items[i] = std::move(keyed[i].second);
  return Value::list(std::move(items));
}

Value unique(const Value& in, bool case_sensitive, const Value& attribute) {
  List seen, out;
  for (const Value& v : in.iterate()) {
    Value key = key_of(v, attribute, case_sensitive);
    if (std::any_of(seen.begin(), seen.end(), [&](const Value& s) { return equal(s, key); }))
      continue;
    seen.push_back(std::move(key));
    out.push_back(v);
  }
  return Value::list(std::move(out));
}

Value extreme(const Value& in, bool largest, const Value& attribute) {
  const List items = in.iterate();
  if (items.empty()) return Value::undefined("the extreme of nothing");
  const auto before = [&](const Value& a, const Value& b) {
    return less(key_of(a, attribute, false), key_of(b, attribute, false));
  };
  return largest ? *std::max_element(items.begin(), items.end(), before)
                 : *std::min_element(items.begin(), items.end(), before);
}

Value end_of(const Value& in, bool last) {
  const Value sequence = in.is_dict() ? Value::list(in.iterate()) : in;
  if (sequence.is_undefined()) return in;
  if (!sequence.is_list() && !sequence.is_string()) sequence.iterate();  // says what it is
  return item(sequence, Value(std::int64_t{last ? -1 : 0}));
}

Value reversed(const Value& in) {
  if (!in.is_string()) {
    List items = in.iterate();
    std::reverse(items.begin(), items.end());
    return Value::list(std::move(items));
  }
  const std::string& s = in.string();
  spend(walked(s.size()));
  std::string out;
  out.reserve(s.size());
  for (std::size_t end = s.size(), begin; end > 0; end = begin) {
    begin = backward(s, end, 1);
    out.append(s, begin, end - begin);
  }
  return out;
}

struct Filter {
  const char* name;
  std::initializer_list<const char*> parameters;
  Value (*apply)(const Value& in, const List& p);
};

#define MT_FILTER(...)                          \
  [](const Value& in, const List& p) -> Value { \
    (void)in, (void)p;                          \
    return __VA_ARGS__;                         \
  }
const Filter kFilters[] = {
    {"abs", {}, MT_FILTER(in.number() < 0 ? arithmetic("*", in, Value(std::int64_t{-1})) : in)},
    {"capitalize", {}, MT_FILTER(capitalized(in.str().string()))},
    {"count", {}, MT_FILTER(length(in))},
    {"d",
     {"default_value", "boolean"},
     MT_FILTER(in.is_undefined() || (p[1].truth() && !in.truth())
                   ? (p[0].is_undefined() ? Value("") : p[0])
                   : in)},
    {"default",
     {"default_value", "boolean"},
     MT_FILTER(in.is_undefined() || (p[1].truth() && !in.truth())
                   ? (p[0].is_undefined() ? Value("") : p[0])
                   : in)},
    {"dictsort",
     {"case_sensitive", "by", "reverse"},
     MT_FILTER(sorted(pairs(in), p[2].truth(), p[0].truth(),
                      Value(std::int64_t{p[1].is_string() && p[1].string() == "value" ? 1 : 0})))},
    {"first", {}, MT_FILTER(end_of(in, false))},
    {"float",
     {"default"},
     MT_FILTER(parsed(in)            ? Value(*parsed(in))
               : p[0].is_undefined() ? Value(0.0)
                                     : p[0])},
    {"indent",
     {"width", "first", "blank"},
     MT_FILTER(indented(in.str().string(), p[0], p[1].truth(), p[2].truth()))},
    {"int", {"default"}, MT_FILTER(to_int(in, p[0]))},
    {"items", {}, MT_FILTER(pairs(in))},
    {"join", {"d", "attribute"}, MT_FILTER(join(in, p[0], p[1]))},
    {"last", {}, MT_FILTER(end_of(in, true))},
    {"length", {}, MT_FILTER(length(in))},
    {"list", {}, MT_FILTER(Value::list(in.iterate()))},
    {"lower", {}, MT_FILTER(changed_case(in.str().string(), false))},
    {"max", {"case_sensitive", "attribute"}, MT_FILTER(extreme(in, true, p[1]))},
    {"min", {"case_sensitive", "attribute"}, MT_FILTER(extreme(in, false, p[1]))},
    {"replace", {"old", "new", "count"}, MT_FILTER(replaced(in.str().string(), p[0], p[1], p[2]))},
    {"reverse", {}, MT_FILTER(reversed(in))},
    {"safe", {}, MT_FILTER(in.str())},
    {"sort",
     {"reverse", "case_sensitive", "attribute"},
     MT_FILTER(sorted(in, p[0].truth(), p[1].truth(), p[2]))},
    {"string", {}, MT_FILTER(in.str())},
    {"title", {}, MT_FILTER(title(in.str().string()))},
    {"trim", {"chars"}, MT_FILTER(trimmed(in.str().string(), p[0], true, true))},
    {"unique", {"case_sensitive", "attribute"}, MT_FILTER(unique(in, p[0].truth(), p[1]))},
    {"upper", {}, MT_FILTER(changed_case(in.str().string(), true))},
};
#undef MT_FILTER

Args without_first(const Args& args) {
  Args rest = args;
  rest.values.erase(rest.values.begin());
  return rest;
}

// map(attribute=..., default=...) or map("filter", arguments...)
Value map(const Value& in, const Args& args) {
  List out;
  if (args.values.empty()) {
    const List p = args.bind("map", {"attribute", "default"});
    if (p[0].is_undefined()) throw Fault("map: a filter or an attribute must be given");
    for (const Value& v : in.iterate()) {
      Value m = member(v, p[0]);
      out.push_back(m.is_undefined() && !p[1].is_undefined() ? p[1] : std::move(m));
    }
  } else {
    const Args rest = without_first(args);
    for (const Value& v : in.iterate())
      out.push_back(apply_filter(text_of(args.values[0], "a filter"), v, rest));
  }
  return Value::list(std::move(out));
}

// select, reject (a test), selectattr, rejectattr (an attribute, then a test); without a test, the truth.
Value select(const std::string& who, const Value& in, Args args) {
  Value path;
  if (who.ends_with("attr")) {
    if (args.values.empty()) throw Fault(who + ": an attribute must be given");
    path = args.values[0];
    args = without_first(args);
  }
  const bool has_test = !args.values.empty();
  const Value test = has_test ? args.values[0] : Value("");  // shared: its text can be long
  const std::string& name = text_of(test, "a test");
  if (has_test) args = without_first(args);
  List out;
  for (const Value& v : in.iterate()) {
    const Value of = path.is_undefined() ? v : member(v, path);
    if ((has_test ? apply_test(name, of, args) : of.truth()) == who.starts_with("select"))
      out.push_back(v);
  }
  return Value::list(std::move(out));
}

bool is_case(const Value& v, bool upper) {
  const Value text = v.str();
  return text.string() == changed_case(text.string(), upper) &&
         text.string() != changed_case(text.string(), !upper);
}

struct Test {
  const char* name;
  bool (*holds)(const Value& v);
};
const Test kTests[] = {
    {"boolean",
     [](const Value& v) {
       return v.is_bool();
     }},
    {"callable",
     [](const Value& v) {
       return v.is_callable();
     }},
    {"defined",
     [](const Value& v) {
       return !v.is_undefined();
     }},
    {"even",
     [](const Value& v) {
       return v.integer() % 2 == 0;
     }},
    {"false",
     [](const Value& v) {
       return v.is_bool() && !v.truth();
     }},
    {"float",
     [](const Value& v) {
       return v.is_float();
     }},
    {"integer",
     [](const Value& v) {
       return v.is_int();
     }},
    {"iterable",
     [](const Value& v) {
       return v.is_list() || v.is_dict() || v.is_string() || v.is_undefined();
     }},
    {"lower",
     [](const Value& v) {
       return is_case(v, false);
     }},
    {"mapping",
     [](const Value& v) {
       return v.is_dict();
     }},
    {"none",
     [](const Value& v) {
       return v.is_none();
     }},
    {"number",
     [](const Value& v) {
       return v.is_number();
     }},
    {"odd",
     [](const Value& v) {
       return v.integer() % 2 != 0;
     }},
    {"sequence",
     [](const Value& v) {
       return v.is_list() || v.is_dict() || v.is_string() || v.is_undefined();
     }},
    {"string",
     [](const Value& v) {
       return v.is_string();
     }},
    {"true",
     [](const Value& v) {
       return v.is_bool() && v.truth();
     }},
    {"undefined",
     [](const Value& v) {
       return v.is_undefined();
     }},
    {"upper",
     [](const Value& v) {
       return is_case(v, true);
     }},
};

struct Comparison {
  const char* name;
  bool (*holds)(const Value& v, const Value& other);
};
const Comparison kComparisons[] = {
    {"==", equal},
    {"eq", equal},
    {"equalto", equal},
    {"!=",
     [](const Value& v, const Value& o) {
       return !equal(v, o);
     }},
    {"ne",
     [](const Value& v, const Value& o) {
       return !equal(v, o);
     }},
    {"<", less},
    {"lt", less},
    {"lessthan", less},
    {">",
     [](const Value& v, const Value& o) {
       return less(o, v);
     }},
    {"gt",
     [](const Value& v, const Value& o) {
       return less(o, v);
     }},
    {"greaterthan",
     [](const Value& v, const Value& o) {
       return less(o, v);
     }},
    {"<=",
     [](const Value& v, const Value& o) {
       return !less(o, v);
     }},
    {"le",
     [](const Value& v, const Value& o) {
       return !less(o, v);
     }},
    {">=",
     [](const Value& v, const Value& o) {
       return !less(v, o);
     }},
    {"ge",
     [](const Value& v, const Value& o) {
       return !less(v, o);
     }},
    {"in",
     [](const Value& v, const Value& o) {
       return contains(o, v);
     }},
    {"divisibleby",
     [](const Value& v, const Value& o) {
       return arithmetic("%", v, o).integer() == 0;
     }},
};

}  // namespace

Value apply_filter(const std::string& name, const Value& in, const Args& args) {
  spend(4);
  if (name == "map") return map(in, args);
  if (name == "select" || name == "reject" || name == "selectattr" || name == "rejectattr")
    return select(name, in, args);
  if (name == "tojson") {
    List p = args.bind(name, {"ensure_ascii", "indent", "separators", "sort_keys"});
    p.push_back(in);
    return tojson(p);
  }
  for (const Filter& f : kFilters) {
    if (name == f.name) return f.apply(in, args.bind(name, f.parameters));
  }
  throw Fault("the filter '" + shown(name) + "' is not supported");
}

bool apply_test(const std::string& name, const Value& in, const Args& args) {
  spend(2);
  for (const Test& t : kTests) {
    if (name == t.name) return args.bind(name, {}), t.holds(in);
  }
  for (const Comparison& c : kComparisons) {
    if (name == c.name) return c.holds(in, args.bind(name, {"other"})[0]);
  }
  throw Fault("the test '" + shown(name) + "' is not supported");
}

}  // namespace mlxtape::formats::jinja
