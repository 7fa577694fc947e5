#include "formats/tokenizer_bpe.h"

#include <algorithm>
#include <functional>
#include <queue>

#include "formats/utf8.h"
#include "mlxtape/base/error.h"
#include "mlxtape/base/quote.h"

namespace mlxtape::formats {
namespace {

constexpr char32_t kTableEnd = 0x10000;
// Below this length looking at every pair again costs less than keeping a heap.
constexpr std::size_t kShort = 48;

// The first character, and the last one, of a token that is not empty.
std::string_view first_character(std::string_view token) {
  return token.substr(0, forward(token, 0, 1));
}
std::string_view last_character(std::string_view token) {
  return token.substr(backward(token, token.size(), 1));
}

}  // namespace

void Bpe::prepare(bool byte_level) {
  byte_level_ = byte_level;
  all_bytes_ = true;
  for (int b = 0; b < 256; ++b) {
    const char byte = static_cast<char>(b);
    TokenId& id = bytes_[static_cast<std::size_t>(b)];
    id = vocabulary_.find_in_model(byte_level ? letters_of({&byte, 1})
                                              : byte_token(static_cast<unsigned char>(b)));
    all_bytes_ = all_bytes_ && id >= 0;
  }
  if (byte_level) return;
  characters_.assign(kTableEnd, -1);
  for (TokenId id = 0; id < vocabulary_.size(); ++id) {
    if (!vocabulary_.has(id)) continue;
    const std::string_view token = vocabulary_.name(id);
    if (token.empty() || token.size() > 3 || vocabulary_.find_in_model(token) != id) continue;
    std::size_t at = 0;
    const char32_t c = next_code_point(token, at);
    if (at == token.size()) characters_[c] = id;
  }
  // What is unknown may be fused with its neighbours, or left out, so that these meet. With a token for each byte nothing is.
  if (options.byte_fallback && all_bytes_) prepare_parts();
}

// A merge joins the last symbol of its left side with the first one of its right side. Between symbols that no merge
// joins a word can be cut: what is on one side never changes the other.
void Bpe::prepare_parts() {
  joined_.assign(kNeighbours, false);
  merges.each([&](TokenId left, TokenId right, TokenId) {
    if (joined_.empty()) return;
    const std::string_view a = vocabulary_.name(left), b = vocabulary_.name(right);
    if (a.empty() || b.empty()) return joined_.clear();
    const TokenId ends[2] = {vocabulary_.find_in_model(last_character(a)),
                             byte_of(a) >= 0 ? left : -1};
    const TokenId begins[2] = {vocabulary_.find_in_model(first_character(b)),
                               byte_of(b) >= 0 ? right : -1};
    for (const TokenId end : ends) {
      for (const TokenId begin : begins) {
        if (end >= 0 && begin >= 0) joined_[neighbours(end, begin)] = true;
      }
    }
    // Made of a character that is itself no token: how it came about cannot be seen.
    if ((ends[0] < 0 && ends[1] < 0) || (begins[0] < 0 && begins[1] < 0)) joined_.clear();
  });
}

TokenId Bpe::symbol_of(char32_t c, std::string_view text) const {
  return c < kTableEnd ? characters_[c] : vocabulary_.find_in_model(text);
}

std::size_t Bpe::part_end(std::string_view word) const {
  if (joined_.empty()) return word.size();
  TokenId before = -1;
  for (std::size_t at = 0; at < word.size();) {
    const std::size_t here = at;
    const char32_t c = next_code_point(word, at);
    TokenId first = symbol_of(c, word.substr(here, at - here)), last = first;
    if (first < 0 && options.byte_fallback) {
      first = bytes_[static_cast<unsigned char>(word[here])];
      last = bytes_[static_cast<unsigned char>(word[at - 1])];
    }
    if (here > 0 && (first < 0 || before < 0 || !joins(before, first))) return here;
    before = last;
  }
  return word.size();
}

void Bpe::encode(std::string_view word, Ids& out) const {
  if (options.ignore_merges) {
    const TokenId whole =
        byte_level_ ? vocabulary_.find_in_model(letters_of(word)) : vocabulary_.find_in_model(word);
    if (whole >= 0) return out.push_back(whole);
  }
  const std::size_t begin = out.size();
  if (byte_level_ && all_bytes_) {
    for (const char c : word) out.push_back(bytes_[static_cast<unsigned char>(c)]);
  } else {
    append_known_and_unknown(word, out);
  }
  out.size() - begin <= kShort ? merge_short(out, begin) : merge_long(out, begin);
}

// As Hugging Face orders them: what is unknown waits for the next symbol that is a token of its own, which bytes that
// stand for a character are not.
void Bpe::append_known_and_unknown(std::string_view word, Ids& out) const {
  bool waiting = false;
  for (std::size_t at = 0; at < word.size();) {
    const std::size_t here = at;
    TokenId id = -1;
    if (byte_level_) {
      id = bytes_[static_cast<unsigned char>(word[at++])];
    } else {
      const char32_t c = next_code_point(word, at);
      id = symbol_of(c, word.substr(here, at - here));
    }
    if (id >= 0) {
      if (std::exchange(waiting, false)) out.push_back(options.unknown);
      out.push_back(id);
      continue;
    }
    const std::string_view bytes = word.substr(here, at - here);
    const auto has_token = [&](char b) {
      return bytes_[static_cast<unsigned char>(b)] >= 0;
    };
    if (!byte_level_ && options.byte_fallback &&
        (all_bytes_ || std::all_of(bytes.begin(), bytes.end(), has_token))) {
      for (const char b : bytes) out.push_back(bytes_[static_cast<unsigned char>(b)]);
      continue;
    }
    if (!options.missing.empty())
      throw Error(Errc::kArgument, "tokenizer: the model has no token for '" + shown(bytes) +
                                       "', nor its unk_token '" + shown(options.missing) + "'");
    if (options.unknown < 0) continue;
    if (waiting && !options.fuse_unknown) out.push_back(options.unknown);
    waiting = true;
  }
  if (waiting) out.push_back(options.unknown);
}

// The pair with the lowest rank, the leftmost of those, until there is none.
void Bpe::merge_short(Ids& ids, std::size_t begin) const {
  std::array<const Merges::Merge*, kShort> found{};  // of element i and its right neighbour
  TokenId* const p = ids.data() + begin;
  std::size_t n = ids.size() - begin;
  for (std::size_t i = 0; i + 1 < n; ++i) found[i] = merges.find(p[i], p[i + 1]);
  while (n > 1) {
    std::size_t best = n;
    for (std::size_t i = 0; i + 1 < n; ++i) {
      if (found[i] != nullptr && (best == n || found[i]->rank < found[best]->rank)) best = i;
    }
    if (best == n) break;
    p[best] = found[best]->id;
    std::copy(p + best + 2, p + n, p + best + 1);
    std::copy(found.begin() + static_cast<std::ptrdiff_t>(best) + 1,
              found.begin() + static_cast<std::ptrdiff_t>(n) - 1,
              found.begin() + static_cast<std::ptrdiff_t>(best));
    --n;
    if (best + 1 < n) found[best] = merges.find(p[best], p[best + 1]);
    if (best > 0) found[best - 1] = merges.find(p[best - 1], p[best]);
  }
  ids.resize(begin + n);
}

// The same with a heap of pairs and a list of what is left. A pair whose elements have changed since is passed over.
void Bpe::merge_long(Ids& ids, std::size_t begin) const {
  struct Pair {
    std::uint32_t rank, left;
    TokenId id;
    bool operator>(const Pair& o) const { return rank != o.rank ? rank > o.rank : left > o.left; }
  };
  struct Link {
    std::uint32_t before, after;
  };
  const auto n = static_cast<std::uint32_t>(ids.size() - begin);
  TokenId* const p = ids.data() + begin;
  std::vector<Link> links(n);
  for (std::uint32_t i = 0; i < n; ++i) links[i] = {i - 1, i + 1};
  std::priority_queue<Pair, std::vector<Pair>, std::greater<>> heap;
  const auto push = [&](std::uint32_t left) {
    const std::uint32_t right = links[left].after;
    if (right >= n) return;
    if (const Merges::Merge* m = merges.find(p[left], p[right])) heap.push({m->rank, left, m->id});
  };
  for (std::uint32_t i = 0; i + 1 < n; ++i) push(i);
  while (!heap.empty()) {
    const Pair top = heap.top();
    heap.pop();
    const std::uint32_t right = links[top.left].after;
    if (p[top.left] < 0 || right >= n) continue;
    const Merges::Merge* m = merges.find(p[top.left], p[right]);
    if (m == nullptr || m->id != top.id) continue;
    p[top.left] = top.id;
    p[right] = -1;
    links[top.left].after = links[right].after;
    if (links[right].after < n) links[links[right].after].before = top.left;
    if (links[top.left].before < n) push(links[top.left].before);
    push(top.left);
  }
  ids.erase(std::remove(ids.begin() + static_cast<std::ptrdiff_t>(begin), ids.end(), -1),
            ids.end());
}

}  // namespace mlxtape::formats
