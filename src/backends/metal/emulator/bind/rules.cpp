#include "backends/metal/emulator/bind/rules.h"

#include <map>
#include <set>
#include <string>

namespace mlxtape::metal_bind {
namespace {

const std::set<std::string> kSpaces = {"device", "constant", "threadgroup", "thread"};
const std::map<std::string, std::string> kRefused = {
    {"double", "Metal has no double"},
    {"goto", "Metal has no goto"},
    {"new", "Metal has no new"},
    {"delete", "Metal has no delete"},
    {"throw", "Metal has no exceptions"},
    {"try", "Metal has no exceptions"},
    {"virtual", "Metal has no virtual functions"},
    {"typeid", "Metal has no typeid"},
    {"dynamic_cast", "Metal has no dynamic_cast"},
    {"thread_local", "Metal has no thread_local"},
    {"std", "Metal has no std::, its library is metal::"},
};

}  // namespace

bool is_address_space(const std::string& word) { return kSpaces.count(word) != 0; }

void check_word(const Tokens& t, std::size_t word) {
  const auto refused = kRefused.find(t[word]);
  if (refused != kRefused.end()) t.fail(word, refused->second);
}

void check_parameters(const Tokens& t, std::size_t open) {
  const std::size_t shut = t.closing(open);
  std::size_t begin = t.next(open);
  while (begin < shut) {
    bool has_space = false;
    std::size_t points = 0;
    std::size_t end = begin;
    for (; end < shut && !t.is(end, ","); end = t.next(end)) {
      if (t.is(end, "<") || t.is(end, "(") || t.is(end, "[[")) {
        end = t.closing(end);
      } else if (t.is(end, "=")) {  // a default
        while (end < shut && !t.is(end, ","))
          end = t.is(end, "(") ? t.next(t.closing(end)) : t.next(end);
        break;
      } else if (is_address_space(t[end])) {
        has_space = true;
      } else if (t.is(end, "*") || t.is(end, "&")) {
        points = end;
      }
    }
    if (points != 0 && !has_space)
      t.fail(points, "a pointer or reference without an address space");
    begin = end < shut ? t.next(end) : shut;
  }
}

void check_declaration(const Tokens& t, std::size_t statement) {
  std::size_t k = statement;
  while (t.is(k, "const") || t.is(k, "constexpr") || t.is(k, "static") || t.is(k, "inline"))
    k = t.next(k);
  if (!t.is_word(k) || is_address_space(t[k]) || t.is(k, "return") || t.is(k, "using")) return;
  k = t.next(k);
  while (t.is(k, "::") && t.is_word(t.next(k))) k = t.next(t.next(k));
  if (t.is(k, "<")) {
    std::size_t depth = 0;  // an expression's < is not closed before the end of the statement
    for (std::size_t e = k; e < t.size() && !t.is(e, ";") && !t.is(e, "{"); e = t.next(e)) {
      if (t.is(e, "<")) ++depth;
      if (t.is(e, ">") && --depth == 0) {
        k = t.next(e);
        break;
      }
    }
  }
  if (t.is(k, "const")) k = t.next(k);
  if (!t.is(k, "*") && !t.is(k, "&")) return;
  const std::size_t name = t.next(k);
  const std::size_t after = t.next(name);
  if (t.is_word(name) && (t.is(after, "=") || t.is(after, ";") || t.is(after, ","))) {
    t.fail(k, "a pointer or reference without an address space");
  }
}

}  // namespace mlxtape::metal_bind
