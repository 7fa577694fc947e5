// The functions and methods that chat templates call, and how members are found.
#include <algorithm>
#include <ctime>
#include <string_view>

#include "formats/template_run.h"
#include "formats/utf8.h"
#include "mlxtape/base/quote.h"

namespace mlxtape::formats::jinja {
namespace {

constexpr std::string_view kFunctions[] = {"namespace", "range", "dict", "raise_exception",
                                           "strftime_now"};
constexpr std::int64_t kMaxRange = 100'000;

// Python's methods by type: all of them, since a method hides a member of that name. Those that are not in
// call_method are refused when they are called.
constexpr std::string_view kDictMethods[] = {"items",   "keys",       "values",   "get",
                                             "clear",   "copy",       "fromkeys", "pop",
                                             "popitem", "setdefault", "update"};
constexpr std::string_view kListMethods[] = {"append", "clear",   "copy",   "count",
                                             "extend", "index",   "insert", "pop",
                                             "remove", "reverse", "sort"};
constexpr std::string_view kStringMethods[] = {
    "capitalize",   "casefold",    "center",    "count",      "encode",       "endswith",
    "expandtabs",   "find",        "format",    "format_map", "index",        "isalnum",
    "isalpha",      "isascii",     "isdecimal", "isdigit",    "isidentifier", "islower",
    "isnumeric",    "isprintable", "isspace",   "istitle",    "isupper",      "join",
    "ljust",        "lower",       "lstrip",    "maketrans",  "partition",    "removeprefix",
    "removesuffix", "replace",     "rfind",     "rindex",     "rjust",        "rpartition",
    "rsplit",       "rstrip",      "split",     "splitlines", "startswith",   "strip",
    "swapcase",     "title",       "translate", "upper",      "zfill"};

template <std::size_t N>
bool among(const std::string_view (&names)[N], std::string_view name) {
  return std::find(std::begin(names), std::end(names), name) != std::end(names);
}

bool is_method(const Value& of, const std::string& name) {
  return (of.is_dict() && among(kDictMethods, name)) ||
         (of.is_string() && among(kStringMethods, name)) ||
         (of.is_list() && among(kListMethods, name));
}

// Parts of a text, as many as a list may have.
void add_part(List& parts, std::string_view part) {
  if (parts.size() == kMaxElements)
    throw Fault("a text must have at most " + std::to_string(kMaxElements) + " parts");
  parts.emplace_back(std::string(part));
}

Value range(const Args& args) {
  const List p = args.bind("range", {"start", "stop", "step"});
  const std::int64_t from = args.values.size() < 2 ? 0 : p[0].integer();
  const std::int64_t to = p[args.values.size() < 2 ? 0 : 1].integer();
  const std::int64_t step = p[2].is_undefined() ? 1 : p[2].integer();
  if (step == 0) throw Fault("range: the step must not be 0");
  List out;
  for (std::int64_t i = from; step > 0 ? i < to : i > to;) {
    if (static_cast<std::int64_t>(out.size()) == kMaxRange)
      throw Fault("range: must have at most " + std::to_string(kMaxRange) + " elements");
    spend(1);
    out.emplace_back(i);
    if (__builtin_add_overflow(i, step, &i)) break;
  }
  return Value::list(std::move(out));
}

std::string formatted_time(std::int64_t seconds, const std::string& format) {
  constexpr std::size_t kMost =
      4096;  // bytes of a format and of what it gives: a date has a few dozen
  const auto time = static_cast<std::time_t>(seconds);
  std::tm parts{};
  localtime_r(&time, &parts);
  std::string out(kMost, '\0');
  // With a space behind it: strftime gives 0 for what is too long, and for what is empty.
  const std::size_t length =
      format.size() < kMost ? std::strftime(out.data(), out.size(), (format + " ").c_str(), &parts)
                            : 0;
  if (length == 0) {
    throw Fault("strftime_now: a format and the time by it must be less than " +
                std::to_string(kMost) + " bytes long, got '" + shown(format) + "'");
  }
  spend(walked(length));
  out.resize(length - 1);
  return out;
}

// Python's split without a separator: runs of white space, none at the ends.
List split_spaces(std::string_view s, std::int64_t most) {
  spend(walked(s.size()));
  List out;
  for (s = trim_left(s); !s.empty(); s = trim_left(s)) {
    if (most >= 0 && static_cast<std::int64_t>(out.size()) == most) {
      add_part(out, trim_right(s));
      break;
    }
    std::size_t end = 0;
    for (std::size_t at = 0; at < s.size() && !is_space(next_code_point(s, at));) end = at;
    add_part(out, s.substr(0, end));
    s.remove_prefix(end);
  }
  return out;
}

List split(const std::string& s, const Value& separator, const Value& most_value, bool from_right) {
  const std::int64_t most = most_value.is_undefined() ? -1 : most_value.integer();
  if (separator.is_undefined() || separator.is_none()) {
    if (from_right && most >= 0) throw Fault("rsplit: must be given a separator where maxsplit is");
    return split_spaces(s, most);
  }
  const std::string& by = text_of(separator, "a separator");
  if (by.empty()) throw Fault("split: the separator must not be empty");
  List out;
  std::string_view rest = s;
  for (;;) {
    if (most >= 0 && static_cast<std::int64_t>(out.size()) >= most) break;
    const std::size_t at = from_right ? find_last(rest, by) : find_first(rest, by);
    if (at == rest.npos) break;
    add_part(out, from_right ? rest.substr(at + by.size()) : rest.substr(0, at));
    rest = from_right ? rest.substr(0, at) : rest.substr(at + by.size());
  }
  add_part(out, rest);
  if (from_right) std::reverse(out.begin(), out.end());
  return out;
}

// prefix: a text, or several in a tuple
bool begins_or_ends(const std::string& s, const Value& part, bool begins) {
  if (part.is_tuple()) {
    return std::any_of(part.list().begin(), part.list().end(),
                       [&](const Value& p) { return begins_or_ends(s, p, begins); });
  }
  const std::string& text = text_of(part, begins ? "a beginning" : "an end");
  spend(1 + copied(text.size()));
  return begins ? s.starts_with(text) : s.ends_with(text);
}

// The place of a byte as a number of code points; -1 where there is none.
Value place(const std::string& s, std::size_t at) {
  spend(copied(s.size()));
  return at == s.npos
             ? std::int64_t{-1}
             : static_cast<std::int64_t>(count_code_points(std::string_view(s).substr(0, at)));
}

std::int64_t occurrences(const std::string& s, const std::string& part) {
  if (part.empty()) throw Fault("count: the text must not be empty");
  std::int64_t n = 0;
  for (std::size_t at = 0; (at = find_first(s, part, at)) != s.npos; at += part.size()) ++n;
  return n;
}

// A letter is large where the one before is none, else small.
std::string titled(std::string_view s) {
  spend(walked(s.size()));
  std::string out;
  bool inside = false;
  for (std::size_t at = 0; at < s.size();) {
    const char32_t letter = next_code_point(s, at), lower = to_lower(letter),
                   upper = to_upper(letter);
    append_utf8(out, inside ? lower : upper);
    inside = lower != upper;
  }
  return out;
}

bool all_points(std::string_view s, bool (*holds)(char32_t)) {
  spend(walked(s.size()));
  for (std::size_t at = 0; at < s.size();) {
    if (!holds(next_code_point(s, at))) return false;
  }
  return !s.empty();
}

Value call_string_method(const std::string& s, const std::string& name, const Args& args) {
  if (name == "strip" || name == "lstrip" || name == "rstrip") {
    return trimmed(s, args.bind(name, {"chars"})[0], name != "rstrip", name != "lstrip");
  }
  if (name == "split" || name == "rsplit") {
    const List p = args.bind(name, {"sep", "maxsplit"});
    return Value::list(split(s, p[0], p[1], name == "rsplit"));
  }
  if (name == "startswith" || name == "endswith")
    return begins_or_ends(s, args.bind(name, {"text"})[0], name == "startswith");
  if (name == "upper" || name == "lower")
    return args.bind(name, {}), changed_case(s, name == "upper");
  if (name == "title") return args.bind(name, {}), titled(s);
  if (name == "capitalize") return args.bind(name, {}), capitalized(s);
  if (name == "splitlines") {
    args.bind(name, {});
    List out;
    each_line(s, [&](std::string_view line) { add_part(out, line); });
    return Value::list(std::move(out));
  }
  if (name == "isspace") return args.bind(name, {}), all_points(s, is_space);
  if (name == "isdigit")
    return args.bind(name, {}), all_points(s, [](char32_t c) { return c >= '0' && c <= '9'; });
  if (name == "replace") {
    const List p = args.bind(name, {"old", "new", "count"});
    return replaced(s, p[0], p[1], p[2]);
  }
  if (name == "find")
    return place(s, find_first(s, text_of(args.bind(name, {"text"})[0], "what is looked for")));
  if (name == "rfind")
    return place(s, find_last(s, text_of(args.bind(name, {"text"})[0], "what is looked for")));
  if (name == "count")
    return occurrences(s, text_of(args.bind(name, {"text"})[0], "what is counted"));
  if (name == "removeprefix" || name == "removesuffix") {
    const bool front = name == "removeprefix";
    const Value given = args.bind(name, {"text"})[0];
    const std::string& part = text_of(given, "what is removed");
    if (!(front ? s.starts_with(part) : s.ends_with(part))) return s;
    return front ? s.substr(part.size()) : s.substr(0, s.size() - part.size());
  }
  if (name == "join") {
    TextBuilder out;
    bool first = true;
    for (const Value& v : args.bind(name, {"parts"})[0].iterate()) {
      if (!first) out.append(s);
      out.append(text_of(v, "what is joined"));
      first = false;
    }
    return out.take();
  }
  throw Fault("the method '" + name + "' of str is not supported");
}

Value call_dict_method(const Value& self, const std::string& name, const Args& args) {
  if (name == "get") {
    const List p = args.bind(name, {"key", "default"});
    const Value* found = p[0].is_string() ? self.find(p[0].string()) : nullptr;
    if (found != nullptr) return *found;
    return args.values.size() + args.named.size() > 1 ? p[1] : Value(nullptr);
  }
  if (name != "items" && name != "keys" && name != "values")
    throw Fault("the method '" + name + "' of dict is not supported");
  args.bind(name, {});
  List out;
  for (const auto& [key, value] : self.dict()) {
    out.push_back(name == "keys"     ? Value(key)
                  : name == "values" ? value
                                     : Value::list({Value(key), value}, true));
  }
  return Value::list(std::move(out));
}

}  // namespace

const std::string& text_of(const Value& v, const char* what) {
  if (v.is_undefined()) v.number();  // says which
  if (!v.is_string())
    throw Fault(std::string(what) + " must be a text, got a value of type " + v.type());
  return v.string();
}

std::string trimmed(std::string_view s, const Value& chars, bool left, bool right) {
  spend(walked(s.size()));
  if (chars.is_undefined() || chars.is_none()) {
    if (left) s = trim_left(s);
    return std::string(right ? trim_right(s) : s);
  }
  const std::string& given = text_of(chars, "the characters to strip");
  // Each of the text's letters is looked for in them. What is there twice counts once: a set has no more than Unicode.
  spend(given.size() * 4);
  std::u32string set = to_code_points(given);
  std::sort(set.begin(), set.end());
  const auto stripped = [&](std::size_t from, std::size_t to) {
    spend(1);
    const std::string_view letter = s.substr(from, to - from);
    std::size_t at = 0;
    return std::binary_search(set.begin(), set.end(), next_code_point(letter, at));
  };
  for (std::size_t end; right && !s.empty() && stripped(end = backward(s, s.size(), 1), s.size());)
    s = s.substr(0, end);
  for (std::size_t end; left && !s.empty() && stripped(0, end = forward(s, 0, 1));)
    s = s.substr(end);
  return std::string(s);
}

std::string replaced(std::string_view s, const Value& from_value, const Value& to_value,
                     const Value& count) {
  const std::string &from = text_of(from_value, "what is replaced"),
                    &to = text_of(to_value, "what is put in its place");
  if (from.empty()) throw Fault("replace: what is replaced must not be empty");
  std::int64_t left = count.is_undefined() || count.is_none() ? -1 : count.integer();
  TextBuilder out;
  std::size_t at = 0;
  for (std::size_t next; left != 0 && (next = find_first(s, from, at)) != s.npos;
       at = next + from.size(), --left) {
    out.append(s.substr(at, next - at));
    out.append(to);
  }
  out.append(s.substr(at));
  return out.take();
}

std::string changed_case(std::string_view s, bool upper) {
  spend(walked(s.size()));
  return upper ? to_upper(s) : to_lower(s);
}

std::string capitalized(std::string_view s) {
  const std::size_t first = forward(s, 0, 1);
  return changed_case(s.substr(0, first), true) + changed_case(s.substr(first), false);
}

void each_line(std::string_view s, FunctionRef<void(std::string_view)> line) {
  spend(walked(s.size()));
  std::size_t begin = 0;
  for (std::size_t at = 0; at < s.size();) {
    const std::size_t here = at;
    const char32_t c = next_code_point(s, at);
    if (!((c >= '\n' && c <= '\r') || (c >= 0x1C && c <= 0x1E) || c == 0x85 || c == 0x2028 ||
          c == 0x2029))
      continue;
    if (c == '\r' && at < s.size() && s[at] == '\n') ++at;
    spend(2);
    line(s.substr(begin, here - begin));
    begin = at;
  }
  if (begin < s.size()) line(s.substr(begin));
}

bool is_function(const std::string& name) { return among(kFunctions, name); }

Value call_function(Runner& runner, const std::string& name, const Args& args) {
  if (name == "raise_exception") throw Fault(args.bind(name, {"message"})[0].str().string());
  if (name == "range") return range(args);
  if (name == "strftime_now")
    return formatted_time(runner.now(), text_of(args.bind(name, {"format"})[0], "a format"));
  // dict and namespace: from a dict, from names
  Dict members;
  if (!args.values.empty()) {
    if (args.values.size() > 1 || !args.values[0].is_dict())
      throw Fault(name + ": must be given one dict, or names with values");
    spend(weight(args.values[0].dict()));
    members = args.values[0].dict();
  }
  Scope scope{nullptr, std::move(members)};
  for (const auto& [key, value] : args.named) scope.set(key, value);
  Value all = Value::dict(scope.names);  // checks what it holds
  return name == "dict" ? all : Value::name_space(std::move(scope.names));
}

Value call_method(const Value& self, const std::string& name, const Args& args) {
  spend(4);
  if (self.is_string()) return call_string_method(self.string(), name, args);
  if (self.is_dict()) return call_dict_method(self, name, args);
  throw Fault("the method '" + name + "' of " + self.type() + " is not supported");
}

Value attribute(const Value& of, const std::string& name) {
  if (of.is_undefined()) of.number();  // says which
  if (is_method(of, name)) return Value::callable({name, std::make_shared<const Value>(of)});
  if (of.is_dict() || of.name_space() != nullptr) {
    if (const Value* found = of.find(name)) return *found;
  }
  return Value::undefined(name);
}

Value item(const Value& of, const Value& key) {
  if (of.is_undefined()) of.number();  // says which
  if (key.is_string()) {
    const Value* found = of.is_dict() ? of.find(key.string()) : nullptr;
    return found != nullptr ? *found : attribute(of, key.string());
  }
  if (of.is_list() && (key.is_int() || key.is_bool())) {
    const auto n = static_cast<std::int64_t>(of.list().size());
    const std::int64_t i = key.integer() < 0 ? key.integer() + n : key.integer();
    if (i >= 0 && i < n) return of.list()[static_cast<std::size_t>(i)];
  }
  if (of.is_string() && (key.is_int() || key.is_bool())) {
    const std::string& s = of.string();
    const std::int64_t i = key.integer();
    const auto steps = static_cast<std::size_t>(i < 0 ? -(i + 1) : i);
    spend(walked(std::min(steps, s.size())));
    // From the end, where that is what is counted from: the last letter of a long text is near.
    const std::size_t end = i < 0 ? backward(s, s.size(), steps) : 0;
    const std::size_t begin = i < 0 ? backward(s, end, 1) : forward(s, 0, steps);
    const std::size_t behind = i < 0 ? end : forward(s, begin, 1);
    if (begin < behind) return s.substr(begin, behind - begin);
  }
  return Value::undefined(key.str().string());
}

}  // namespace mlxtape::formats::jinja
