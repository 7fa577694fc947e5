// From Metal's language to C++. Only what C++ does not know is rewritten: address spaces, attributes, kernels, threadgroup
// variables, function constants, literals. Everything else is left as it stands, in its line.
#include "backends/metal/emulator/bind/kernels.h"

#include <cstdio>
#include <map>
#include <set>
#include <vector>

#include "backends/metal/emulator/bind/rules.h"
#include "backends/metal/emulator/bind/tokens.h"

namespace mlxtape::metal_bind {
namespace {

const std::map<std::string, std::string> kPositions = {
    {"thread_position_in_grid", "kThreadPositionInGrid"},
    {"thread_position_in_threadgroup", "kThreadPositionInThreadgroup"},
    {"threadgroup_position_in_grid", "kThreadgroupPositionInGrid"},
    {"thread_index_in_threadgroup", "kThreadIndexInThreadgroup"},
    {"threads_per_threadgroup", "kThreadsPerThreadgroup"},
    {"dispatch_threads_per_threadgroup", "kDispatchThreadsPerThreadgroup"},
    {"threads_per_grid", "kThreadsPerGrid"},
    {"threadgroups_per_grid", "kThreadgroupsPerGrid"},
    {"thread_index_in_simdgroup", "kThreadIndexInSimdgroup"},
    {"simdgroup_index_in_threadgroup", "kSimdgroupIndexInThreadgroup"},
    {"simdgroups_per_threadgroup", "kSimdgroupsPerThreadgroup"},
    {"threads_per_simdgroup", "kThreadsPerSimdgroup"},
};
// Of which there are vectors.
const std::set<std::string> kElements = {"float",  "half", "bfloat", "char", "uchar", "short",
                                         "ushort", "int",  "uint",   "long", "ulong", "bool"};

struct Kernel {
  std::vector<std::string> slots;
  std::string max_threads = "0";
  bool is_template = false;
};
struct Instance {
  std::string host_name, function;  // quoted; with template arguments
};

std::string trimmed(std::string s) {
  while (!s.empty() && s.back() == ' ') s.pop_back();
  return s;
}

class Binder {
 public:
  // is_strict: with address spaces as types, for Clang; else for the emulator.
  Binder(const std::string& text, bool is_strict) : t_(text), is_strict_(is_strict) {
    for (std::size_t i = first(); i < t_.size(); i = t_.next(i)) i = step(i);
  }

 private:
  enum class Scope { kNamespace, kClass, kKernel, kFunction, kBlock };

  std::size_t first() const { return t_.size() != 0 && t_.is_space(0) ? t_.next(0) : 0; }
  bool at_namespace() const { return scopes_.empty() || scopes_.back() == Scope::kNamespace; }
  bool in_function() const { return !at_namespace() && scopes_.back() != Scope::kClass; }

  // Rewrites what stands at i; the last token that it has dealt with.
  std::size_t step(std::size_t i) {
    if (fresh_) {
      statement_ = i;
      fresh_ = false;
      seen_parameters_ = false;
    }
    if (t_.is(i, "{")) return open(i);
    if (t_.is(i, "}")) {
      if (!scopes_.empty()) scopes_.pop_back();
      fresh_ = true;
      return i;
    }
    if (t_.is(i, ";")) {
      fresh_ = true;
      pending_ = Scope::kBlock;
      is_template_ = false;
      return i;
    }
    if (t_.is(i, ":") && !scopes_.empty() && scopes_.back() == Scope::kClass) fresh_ = true;
    if (t_.is(i, "[[")) return attribute(i);
    if (t_.is(i, "(") && !in_function() && !seen_parameters_ && t_.is_word(t_.previous(i))) {
      seen_parameters_ = true;
      check_parameters(t_, i);
      if (is_strict_ && !scopes_.empty() && scopes_.back() == Scope::kClass) qualify_member(i);
    }
    if (t_.is_number(i)) return number(i);
    if (t_.is_word(i)) return t_.is(t_.previous(i), ".") ? member(i) : word(i);
    return i;
  }

  // v.zw, read or assigned to.
  std::size_t member(std::size_t i) {
    const std::string& name = t_[i];
    if (is_strict_) return i;
    if (name.size() < 2 || name.size() > 4 || name.find_first_not_of("xyzw") != std::string::npos)
      return i;
    std::string places;
    for (const char c : name)
      places += (places.empty() ? "" : ", ") + std::to_string(c == 'w' ? 3 : c - 'x');
    std::size_t k = t_.next(i);
    if (t_.is(k, "+") || t_.is(k, "-") || t_.is(k, "*")) k = t_.next(k);
    t_.replace(
        i, std::string("template ") + (t_.is(k, "=") ? "places<" : "swizzle<") + places + ">()");
    return i;
  }

  std::size_t open(std::size_t i) {
    Scope scope = in_function() ? Scope::kBlock : pending_;
    bool has_parameters = false;
    for (std::size_t k = statement_; k < i; k = t_.next(k)) {
      if (t_.is(k, "namespace")) scope = Scope::kNamespace;
      if (t_.is(k, ")")) has_parameters = true;
      if (!in_function() && !has_parameters && t_.is_word(k) &&
          (t_.is(k, "struct") || t_.is(k, "class") || t_.is(k, "union") || t_.is(k, "enum"))) {
        scope = Scope::kClass;
        class_ = t_[t_.next(k)];
      }
    }
    if (scope == Scope::kBlock && !in_function() && has_parameters) scope = Scope::kFunction;
    scopes_.push_back(scope);
    pending_ = Scope::kBlock;
    is_template_ = false;
    fresh_ = true;
    return i;
  }

  // An object on which a member function is called lies in the thread's memory, unless the function says otherwise.
  void qualify_member(std::size_t open) {
    const std::size_t name = t_.previous(open);
    if (t_.is(name, class_)) return;  // a constructor
    for (std::size_t k = statement_; k < name; k = t_.next(k)) {
      if (t_.is(k, "static")) return;
    }
    const std::size_t shut = t_.closing(open);
    std::size_t after = t_.next(shut);
    if (t_.is(after, "const")) after = t_.next(after);
    if (t_.is(after, "{") || t_.is(after, ";")) t_.replace(shut, ") __private");
  }

  std::size_t word(std::size_t i) {
    const std::string& w = t_[i];
    check_word(t_, i);
    if (w == "template") return template_word(i);
    if (w == "kernel") return kernel(i, i);
    if (w == "static" && in_function() && !t_.is(t_.next(i), "constexpr")) {
      t_.fail(i, "a static variable in a function: Metal has only constants there");
    }
    if (i == statement_) check_declaration(t_, i);
    if (w == "constant") return constant(i);
    if (w == "threadgroup") return threadgroup(i);
    if (is_address_space(w)) t_.replace(i, space_word(i));
    if (is_strict_) make_vector(i);
    return i;
  }

  std::string space_word(std::size_t i) const {
    const std::string& w = t_[i];
    if (w == "constant") {
      const std::size_t before = t_.previous(i);
      const bool is_const =
          t_.is(t_.next(i), "const") || (before != t_.size() && t_.is(before, "const"));
      return std::string(is_strict_ ? "__constant " : "") + (is_const ? "" : "const");
    }
    if (!is_strict_) return "";
    return w == "device" ? "__global" : w == "threadgroup" ? "__local" : "__private";
  }

  // float4(a, b) and vec<T, 4>(a, b): Clang's own vectors are not made so.
  void make_vector(std::size_t i) {
    if (t_.is(i, "vec") && t_.is(t_.next(i), "<")) {
      const std::size_t end = t_.closing(t_.next(i));
      if (!t_.is(t_.next(end), "(")) return;
      t_.replace(i, "::metal::made_of<vec");
      t_.replace(end, "> >");
    } else if (t_.is(t_.next(i), "(")) {
      const std::string& w = t_[i];
      const bool counted = w.size() > 3 && w.back() >= '2' && w.back() <= '4';
      if (counted && kElements.count(w.substr(0, w.size() - 1)) != 0)
        t_.replace(i, "::metal::made_of<" + w + ">");
    }
  }

  // template <...> before something, or template [[host_name("x")]] [[kernel]] decltype(f<A>) f<A>;
  std::size_t template_word(std::size_t i) {
    const std::size_t after = t_.next(i);
    if (t_.is(after, "<")) {
      is_template_ = true;
      const std::size_t end = t_.closing(after);
      statement_ = t_.next(end);
      return end;
    }
    std::string name;
    std::size_t k = after;
    while (t_.is(k, "[[")) {
      const std::size_t end = t_.closing(k);
      const std::size_t what = t_.next(k);
      if (t_.is(what, "host_name")) {  // neighbouring literals are one
        for (std::size_t s = t_.next(t_.next(what)); t_[s].front() == '"'; s = t_.next(s)) {
          name += t_[s];
        }
      }
      k = t_.next(end);
    }
    if (name.empty()) t_.fail(i, "an instantiation without host_name");
    if (is_strict_) {
      t_.blank(i + 1, k);
      return t_.previous(k);
    }
    if (t_.is(k, "decltype")) k = t_.next(t_.closing(t_.next(k)));
    std::size_t end = k;
    while (end < t_.size() && !t_.is(end, ";")) end = t_.next(end);
    instances_.push_back({name, t_.text(k, end)});
    t_.blank(i, end + 1);
    fresh_ = true;
    return end;
  }

  std::size_t attribute(std::size_t i) {
    const std::size_t end = t_.closing(i);
    for (std::size_t k = t_.next(i); k < end; k = t_.next(k)) {
      if (t_.is(k, "kernel")) return kernel(i, end);
    }
    return end;
  }

  // Number of threads that [[max_total_threads_per_threadgroup(n)]] names, wherever it stands before the name.
  void read_attribute(std::size_t i, Kernel& kernel) {
    const std::size_t end = t_.closing(i);
    for (std::size_t k = t_.next(i); k < end; k = t_.next(k)) {
      if (!t_.is(k, "max_total_threads_per_threadgroup")) continue;
      const std::size_t open = t_.next(k);
      kernel.max_threads = t_.text(open + 1, t_.closing(open));
    }
  }

  // From [[kernel]] or kernel to the end of the parameters.
  std::size_t kernel(std::size_t begin, std::size_t end) {
    Kernel made;
    made.is_template = is_template_;
    std::size_t k = begin;
    if (t_.is(k, "[[")) read_attribute(k, made);
    k = t_.next(end);
    while (t_.is(k, "[[")) {
      read_attribute(k, made);
      k = t_.next(t_.closing(k));
    }
    if (!t_.is(k, "void")) t_.fail(k, "a kernel returns void");
    t_.blank(begin, k);
    const std::size_t name = t_.next(k);
    const std::size_t open = t_.next(name);
    if (!t_.is(open, "(")) t_.fail(name, "a kernel without parameters");
    const std::size_t shut = t_.closing(open);
    check_parameters(t_, open);
    parameters(open, shut, made);
    if (!made.is_template) instances_.push_back({"\"" + t_[name] + "\"", t_[name]});
    if (!kernels_.emplace(t_[name], made).second)
      t_.fail(name, "kernel " + t_[name] + " is there twice");
    pending_ = Scope::kKernel;
    seen_parameters_ = true;
    return shut;
  }

  // One slot for each parameter, which says where it comes from.
  void parameters(std::size_t open, std::size_t shut, Kernel& kernel) {
    std::size_t begin = t_.next(open);
    while (begin < shut) {
      std::size_t end = begin;
      std::string slot;
      std::string condition;
      for (; end < shut && !t_.is(end, ","); end = t_.next(end)) {
        if (t_.is(end, "<") || t_.is(end, "(")) {
          end = t_.closing(end);
        } else if (t_.is(end, "[[")) {
          const std::size_t attribute = end;
          end = t_.closing(end);
          read_slot(attribute, end, slot, condition);
          t_.blank(attribute, end + 1);
        } else if (is_address_space(t_[end])) {
          t_.replace(end, space_word(end));
        }
      }
      if (slot.empty())
        t_.fail(begin,
                "a parameter of a kernel without an attribute that says where it comes from");
      kernel.slots.push_back("{" + slot + (condition.empty() ? "" : ", " + condition) + "}");
      begin = end < shut ? t_.next(end) : shut;
    }
  }

  void read_slot(std::size_t begin, std::size_t end, std::string& slot, std::string& condition) {
    const std::string kind = "::mlxtape::emulator::Kind::";
    for (std::size_t k = t_.next(begin); k < end; k = t_.next(k)) {
      const std::string& name = t_[k];
      if (name == ",") continue;
      std::string value;
      std::size_t last = k;
      if (t_.is(t_.next(k), "(")) {
        last = t_.closing(t_.next(k));
        value = t_.text(t_.next(k) + 1, last);
      }
      if (name == "buffer") {
        slot = kind + "kBuffer, " + value;
      } else if (name == "threadgroup") {
        slot = kind + "kThreadgroupArgument, " + value;
      } else if (name == "function_constant") {
        const auto constant = constants_.find(value);
        if (constant == constants_.end()) t_.fail(k, "'" + value + "' is no function constant");
        condition = constant->second + " + 1";
      } else if (const auto position = kPositions.find(name); position != kPositions.end()) {
        slot = kind + position->second + ", 0";
      } else if (name != "maybe_unused") {
        t_.fail(k, "an attribute that the emulator does not know: " + name);
      }
      k = last;
    }
  }

  // constant bool x [[function_constant(0)]]; becomes an object; everything else in constant memory is const.
  std::size_t constant(std::size_t i) {
    if (at_namespace()) {
      for (std::size_t k = t_.next(i); k < t_.size() && !t_.is(k, ";") && !t_.is(k, "(");
           k = t_.next(k)) {
        if (t_.is(k, "is_function_constant_defined") || constants_.count(t_[k]) != 0) {
          t_.fail(
              k, "a constant made from a function constant: write the expression where it is used");
        }
        if (!t_.is(k, "[[") || !t_.is(t_.next(k), "function_constant")) continue;
        const std::size_t end = t_.closing(k);
        const std::size_t open = t_.next(t_.next(k));
        const std::string index = t_.text(open + 1, t_.closing(open));
        const std::size_t name = t_.previous(k);
        const std::string type = t_.text(t_.next(i), name);
        if (!t_.is(t_.next(end), ";")) t_.fail(end, "a function constant has no other value");
        const std::string text =
            is_strict_ ? "extern __constant const " + type + " " + t_[name]
                       : "[[maybe_unused]] constexpr ::mlxtape::emulator::FunctionConstant<" +
                             type + ", " + index + "> " + t_[name] + "{}";
        constants_[t_[name]] = index;
        constant_rows_ += "    {" + index + ", \"" + trimmed(type) + "\"},\n";
        t_.blank(i, end + 1);
        t_.replace(i, text);
        return end;
      }
    }
    t_.replace(i, space_word(i));
    return i;
  }

  // threadgroup float sums[2][32], last; becomes references to the threadgroup's memory. Of pointers only the word goes.
  std::size_t threadgroup(std::size_t i) {
    std::size_t k = t_.next(i);
    std::size_t name = i;
    for (; k < t_.size(); k = t_.next(k)) {
      if (t_.is(k, "<")) {
        k = t_.closing(k);
        continue;
      }
      if (t_.is(k, "*") || t_.is(k, "&") || t_.is(k, ")") || t_.is(k, ">")) {
        t_.replace(i, space_word(i));
        return i;
      }
      if (!t_.is_word(k) && !t_.is(k, "::")) break;
      name = k;
    }
    if (scopes_.empty() || scopes_.back() != Scope::kKernel) {
      t_.fail(i, "a threadgroup variable must be in the outermost block of a kernel");
    }
    const std::string type = t_.text(t_.next(i), name);
    std::size_t end = name;
    while (!t_.is(end, ";")) end = t_.next(end);
    std::string made;
    for (k = name; k < end;) {
      const std::size_t dimensions = t_.next(k);
      std::size_t after = dimensions;
      while (t_.is(after, "[")) after = t_.next(t_.closing(after));
      if (after < end && !t_.is(after, ","))
        t_.fail(after, "a threadgroup variable has no initial value");
      const std::string whole =
          type + (dimensions < after ? t_.text(dimensions, after < end ? after : end) : "");
      made += is_strict_ ? "__local auto& " + t_[k] + " = ::metal::room_of<" + whole + ">(); "
                         : "auto& " + t_[k] + " = ::mlxtape::emulator::variable<" + whole + ", " +
                               std::to_string(++variables_) + ">(\"" + t_[k] + "\"); ";
      k = after < end ? t_.next(after) : end;
    }
    t_.blank(i, end + 1);
    t_.replace(i, made);
    fresh_ = true;
    return end;
  }

  // Without a suffix it is a float, not a double; and a float is what the library says (msl/counted.h).
  std::size_t number(std::size_t i) {
    std::string n = t_[i];
    const bool hex = n.size() > 1 && (n[1] == 'x' || n[1] == 'X');
    const bool real =
        n.find('.') != std::string::npos || n.find_first_of(hex ? "pP" : "eE") != std::string::npos;
    const auto ends = [&n](const std::string& suffix) {
      return n.size() > suffix.size() &&
             n.compare(n.size() - suffix.size(), suffix.size(), suffix) == 0;
    };
    if (!hex && (ends("bf") || ends("BF"))) {
      t_.replace(i, "bfloat(" + n.substr(0, n.size() - 2) + "f)");
    } else if (!hex && (ends("h") || ends("H"))) {
      t_.replace(i, "half(" + n.substr(0, n.size() - 1) + "f)");
    } else if (real) {
      t_.replace(i, "float(" + n + (ends("f") || ends("F") ? ")" : "f)"));
    }
    return i;
  }

  // ---- what comes out ----

 public:
  std::string strict() const {
    return "#include \"backends/metal/emulator/msl/strict.h\"\n" + t_.text(0, t_.size()) + "\n";
  }
  std::string bound(const std::string& stem, std::uint64_t text_hash) {
    std::string out = "// Generated from " + stem +
                      ".metal.\n#include \"backends/metal/emulator/msl/metal.h\"\nnamespace {\n" +
                      t_.text(0, t_.size()) + "\n#line 1 \"" + stem + ".kernels\"\n";
    std::string rows;
    for (const Instance& instance : instances_) {
      std::string base = instance.function.substr(0, instance.function.find('<'));
      base = trimmed(base);
      if (const std::size_t colon = base.rfind(':'); colon != std::string::npos)
        base = base.substr(colon + 1);
      const auto kernel = kernels_.find(base);
      if (kernel == kernels_.end())
        throw Error(stem + ".metal: " + instance.host_name + " is made from '" + base +
                    "', no kernel");
      rows += "    ::mlxtape::emulator::Call<&" + instance.function;
      for (const std::string& slot : kernel->second.slots)
        rows += ", ::mlxtape::emulator::Slot" + slot;
      rows += ">::info(" + instance.host_name + ", " + kernel->second.max_threads + "),\n";
    }
    if (rows.empty()) throw Error(stem + ".metal: no kernel");
    char hash[32];
    std::snprintf(hash, sizeof hash, "0x%016llXu", static_cast<unsigned long long>(text_hash));
    return out + "constexpr ::mlxtape::emulator::KernelInfo kKernels[] = {\n" + rows + "};\n" +
           "constexpr ::mlxtape::emulator::ConstantInfo kConstants[] = {\n" + constant_rows_ +
           "    {-1, \"\"}};\n}  // namespace\n" +
           "namespace mlxtape::emulator::files {\nextern const KernelFile " + stem +
           ";\nconst KernelFile " + stem + "{\"" + stem + "\", " + hash + ", kKernels, " +
           std::to_string(instances_.size()) + ", kConstants, " +
           std::to_string(constants_.size()) + "};\n}  // namespace mlxtape::emulator::files\n";
  }

 private:
  Tokens t_;
  bool is_strict_;
  std::string class_;  // the last that was opened
  std::vector<Scope> scopes_;
  Scope pending_ = Scope::kBlock;  // what the next brace opens
  std::size_t statement_ = 0;      // its first token
  bool fresh_ = true;              // the next token begins one
  bool seen_parameters_ = false;
  bool is_template_ = false;
  std::map<std::string, Kernel> kernels_;
  std::vector<Instance> instances_;
  std::map<std::string, std::string> constants_;  // name -> index
  std::string constant_rows_;
  int variables_ = 0;
};

}  // namespace

std::string bind_kernels(const std::string& stem, const std::string& preprocessed,
                         std::uint64_t text_hash) {
  return Binder(preprocessed, false).bound(stem, text_hash);
}

std::string bind_strictly(const std::string& preprocessed) {
  return Binder(preprocessed, true).strict();
}

}  // namespace mlxtape::metal_bind
