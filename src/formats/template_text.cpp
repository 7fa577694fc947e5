#include "formats/template_text.h"

#include <algorithm>
#include <utility>

namespace mlxtape::formats::jinja {
namespace {

thread_local Budget* current = nullptr;

// A part of a text that is looked for by its first byte, at one place after the other.
struct Search {
  std::string_view text, part;
  std::size_t places = 0;

  // For the way to the next place, and for looking there: four times, a step.
  void pay(std::size_t distance) { spend(copied(distance) + (places++ % 4 == 0 ? 1 : 0)); }

  // The rest of a long part is looked at, and paid for, where its beginning is there.
  bool matches(std::size_t at) const {
    constexpr std::size_t kBeginning = 64;
    if (text.substr(at, std::min(part.size(), kBeginning)) != part.substr(0, kBeginning))
      return false;
    spend(copied(part.size()));
    return text.substr(at, part.size()) == part;
  }
};

}  // namespace

Budget::Budget(std::int64_t steps) : left_(steps), before_(std::exchange(current, this)) {}

Budget::~Budget() { current = before_; }

void spend(std::size_t steps) {
  if (current == nullptr) return;
  current->left_ -= static_cast<std::int64_t>(steps);
  if (current->left_ < 0) throw Fault("the template takes too many steps");
}

void check_length(std::size_t bytes) {
  if (bytes > kMaxText)
    throw Fault("a text must be at most " + std::to_string(kMaxText) + " bytes long");
}

void TextBuilder::grow(std::size_t bytes) {
  check_length(bytes);  // first: the sum of both could not be held
  check_length(text_.size() + bytes);
  spend(copied(bytes));
}

std::size_t find_first(std::string_view text, std::string_view part, std::size_t from) {
  if (part.empty() || from > text.size()) return from > text.size() ? text.npos : from;
  Search search{text, part};
  for (std::size_t at = from;; ++at) {
    const std::size_t before = at;
    at = text.find(part[0], at);
    search.pay(std::min(at, text.size()) - before);
    if (at == text.npos || text.size() - at < part.size()) return text.npos;
    if (search.matches(at)) return at;
  }
}

std::size_t find_last(std::string_view text, std::string_view part) {
  if (part.empty() || part.size() > text.size()) return part.empty() ? text.size() : text.npos;
  Search search{text, part};
  for (std::size_t at = text.size() - part.size();; --at) {
    const std::size_t before = at;
    at = text.rfind(part[0], at);
    search.pay(before - (at == text.npos ? 0 : at));
    if (at == text.npos || search.matches(at)) return at;
    if (at == 0) return text.npos;
  }
}

}  // namespace mlxtape::formats::jinja
