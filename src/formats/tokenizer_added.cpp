#include "formats/tokenizer_added.h"

#include "formats/regex.h"
#include "formats/tokenizer_json.h"
#include "formats/utf8.h"

namespace mlxtape::formats {
namespace {

// What has to Unicode a place in a word (UTS 18, \w).
bool is_word(std::string_view character) {
  if (!is_valid_utf8(character)) return false;
  static const Regex kWord("[\\p{Alphabetic}\\p{M}\\p{Nd}\\p{Pc}\\p{Join_Control}]");
  std::vector<Regex::Match> found;
  kWord.find_all(character, found);
  return !found.empty();
}

std::size_t last_begin(std::string_view text) { return backward(text, text.size(), 1); }

}  // namespace

std::vector<AddedToken> read_added_tokens(const Json& json, const std::string& who) {
  std::vector<AddedToken> out;
  for (const Json& t : json.array()) {
    out.push_back({member(t, "id", who).integer(), member(t, "content", who).string(),
                   flag(t, "single_word", false), flag(t, "lstrip", false),
                   flag(t, "rstrip", false), flag(t, "normalized", true),
                   flag(t, "special", false)});
  }
  return out;
}

void AddedMatcher::add(const AddedToken& token, std::string content) {
  if (content.empty()) return;
  by_first_[static_cast<unsigned char>(content[0])].push_back({std::move(content), token});
}

void AddedMatcher::prepare() {
  for (std::vector<Entry>& entries : by_first_) {
    std::stable_sort(entries.begin(), entries.end(),
                     [](const Entry& a, const Entry& b) { return a.content < b.content; });
    // Of those that become the same in normal form the first one counts.
    entries.erase(
        std::unique(entries.begin(), entries.end(),
                    [](const Entry& a, const Entry& b) { return a.content == b.content; }),
        entries.end());
  }
}

// Those with a common beginning lie side by side, and each byte of the text narrows them down.
const AddedMatcher::Entry* AddedMatcher::longest(const std::vector<Entry>& entries,
                                                 std::string_view text) const {
  const Entry* best = nullptr;
  auto low = entries.begin(), high = entries.end();
  for (std::size_t length = 1; low != high; ++length) {
    if (low->content.size() == length) best = &*low++;
    if (length == text.size()) break;
    const auto byte_at = [&](const Entry& e) {
      return static_cast<unsigned char>(e.content[length]);
    };
    const auto next = static_cast<unsigned char>(text[length]);
    low = std::partition_point(low, high, [&](const Entry& e) { return byte_at(e) < next; });
    high = std::partition_point(low, high, [&](const Entry& e) { return byte_at(e) == next; });
  }
  return best;
}

std::size_t AddedMatcher::prefix_length(std::string_view text) const {
  const Entry* found = longest(by_first_[static_cast<unsigned char>(text[0])], text);
  return found != nullptr ? found->content.size() : 0;
}

const AddedToken* AddedMatcher::next(std::string_view text, std::size_t& begin,
                                     std::size_t& end) const {
  for (; begin < text.size(); ++begin) {
    const std::vector<Entry>& entries = by_first_[static_cast<unsigned char>(text[begin])];
    if (entries.empty()) continue;
    const Entry* found = longest(entries, text.substr(begin));
    if (found == nullptr) continue;
    end = begin + found->content.size();
    return &found->token;
  }
  return nullptr;
}

bool AddedMatcher::widen(const AddedToken& token, std::string_view text, std::size_t done,
                         std::size_t& begin, std::size_t& end) {
  if (token.single_word) {
    const std::size_t left = begin > 0 ? last_begin(text.substr(0, begin)) : 0;
    std::size_t right = end;
    if (right < text.size()) next_code_point(text, right);
    if (is_word(text.substr(left, begin - left)) || is_word(text.substr(end, right - end)))
      return false;
  }
  while (token.lstrip && begin > done) {
    const std::size_t before = last_begin(text.substr(0, begin));
    std::size_t at = before;
    if (!is_white_space(next_code_point(text, at))) break;
    begin = std::max(before, done);
  }
  for (std::size_t at = end;
       token.rstrip && at < text.size() && is_white_space(next_code_point(text, at));)
    end = at;
  return true;
}

}  // namespace mlxtape::formats
