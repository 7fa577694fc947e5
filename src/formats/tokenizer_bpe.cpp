#include "formats/tokenizer_bpe.h"

#include <algorithm>
#include <functional>
#include <optional>
#include <queue>

#include "formats/utf8.h"
#include "mlxtape/base/quote.h"

namespace mlxtape::formats {
namespace {

struct Letters {
  std::array<char32_t, 256> of_byte{};
  std::array<int, 0x200> of_letter{};  // -1: none
  Letters() {
    of_letter.fill(-1);
    char32_t next = 0x100;
    for (unsigned b = 0; b < 256; ++b) {
      const bool printed = (b >= 0x21 && b <= 0x7E) || (b >= 0xA1 && b <= 0xAC) || b >= 0xAE;
      of_byte[b] = printed ? b : next++;
      of_letter[of_byte[b]] = static_cast<int>(b);
    }
  }
};
const Letters& letters() {
  static const Letters table;
  return table;
}

std::uint64_t mixed(std::uint64_t x) {
  x ^= x >> 32, x *= 0x9E3779B97F4A7C15U;
  return x ^ x >> 29;
}

}  // namespace

std::string letters_of(std::string_view bytes) {
  std::string out;
  for (const char c : bytes) append_utf8(out, letters().of_byte[static_cast<unsigned char>(c)]);
  return out;
}

void append_bytes(std::string& out, std::string_view token) {
  const std::size_t before = out.size();
  for (std::size_t at = 0; at < token.size();) {
    const char32_t c = next_code_point(token, at);
    const int b = c < 0x200 ? letters().of_letter[c] : -1;
    if (b < 0) {
      out.resize(before);
      out += token;
      return;
    }
    out.push_back(static_cast<char>(b));
  }
}

// ---- Vocabulary ----

Vocabulary::Vocabulary() : slots_(std::size_t{1} << 12, -1) {}

std::size_t Vocabulary::slot(std::string_view token) const {
  std::size_t at = mixed(std::hash<std::string_view>{}(token)) & (slots_.size() - 1);
  while (slots_[at] >= 0 && name(slots_[at]) != token) at = (at + 1) & (slots_.size() - 1);
  return at;
}

std::string_view Vocabulary::name(TokenId id) const {
  const Name& n = names_[static_cast<std::size_t>(id)];
  return std::string_view(text_).substr(n.begin, n.length);
}

TokenId Vocabulary::find(std::string_view token) const { return slots_[slot(token)]; }

TokenId Vocabulary::find_in_model(std::string_view token) const {
  const TokenId id = find(token);
  return id >= 0 && names_[static_cast<std::size_t>(id)].begin < model_end_ ? id : -1;
}

void Vocabulary::grow() {
  const std::vector<TokenId> old = std::move(slots_);
  slots_.assign(old.size() * 4, -1);
  for (const TokenId id : old) {
    if (id >= 0) slots_[slot(name(id))] = id;
  }
}

void Vocabulary::add(std::string_view token, TokenId id, const JsonReader& reader) {
  if (text_.size() + token.size() >= kHole)
    reader.fail("the tokens must have less than 4 GiB together");
  if (static_cast<std::size_t>(id) >= names_.size())
    names_.resize(static_cast<std::size_t>(id) + 1);
  Name& n = names_[static_cast<std::size_t>(id)];
  if (n.begin != kHole)
    reader.fail("each id must have one token, got '" + shown(name(id)) + "' and '" + shown(token) +
                "' for " + std::to_string(id));
  const std::size_t at = slot(token);
  if (slots_[at] >= 0)
    reader.fail("each token must be there once, got '" + shown(token) + "' twice");
  n = {static_cast<std::uint32_t>(text_.size()), static_cast<std::uint32_t>(token.size())};
  text_ += token;
  slots_[at] = id;
  if (++count_ * 2 > slots_.size()) grow();
}

// ---- Merges ----

Merges::Merges() : slots_(std::size_t{1} << 12) {}

std::size_t Merges::slot(std::uint64_t pair) const {
  std::size_t at = mixed(pair) & (slots_.size() - 1);
  while (slots_[at].pair != kFree && slots_[at].pair != pair) at = (at + 1) & (slots_.size() - 1);
  return at;
}

void Merges::add(TokenId left, TokenId right, TokenId merged) {
  const std::uint64_t pair =
      static_cast<std::uint64_t>(left) << 32 | static_cast<std::uint32_t>(right);
  Merge& m = slots_[slot(pair)];
  count_ += m.pair == kFree ? 1 : 0;
  m = {pair, next_rank_++, merged};
  if (count_ * 2 <= slots_.size()) return;
  const std::vector<Merge> old = std::move(slots_);
  slots_.assign(old.size() * 4, {});
  for (const Merge& o : old) {
    if (o.pair != kFree) slots_[slot(o.pair)] = o;
  }
}

const Merges::Merge* Merges::find(TokenId left, TokenId right) const {
  const Merge& m =
      slots_[slot(static_cast<std::uint64_t>(left) << 32 | static_cast<std::uint32_t>(right))];
  return m.pair == kFree ? nullptr : &m;
}

// ---- Bpe ----

void Bpe::read(JsonReader& reader) {
  std::string key, token;
  bool has_vocabulary = false, has_merges = false;
  std::optional<JsonReader> merges;  // where they begin, if they come before the tokens
  for (reader.begin_object(); reader.next_key(key);) {
    if (key == "type") {
      reader.read_string(token);
      if (token != "BPE") reader.fail("the model must be of type BPE, got " + shown(token));
    } else if (key == "vocab") {
      for (reader.begin_object(); reader.next_key(token);) {
        const std::int64_t id = reader.integer();
        if (id < 0 || id >= Vocabulary::kMaxIds)
          reader.fail("an id must be at least 0 and less than " +
                      std::to_string(Vocabulary::kMaxIds) + ", got " + std::to_string(id));
        vocabulary.add(token, static_cast<TokenId>(id), reader);
      }
      has_vocabulary = true;
    } else if (key == "merges") {
      has_merges = true;
      if (has_vocabulary) {
        read_merges(reader);
      } else {
        merges = reader;
        reader.skip();
      }
    } else if (key == "ignore_merges") {
      ignore_merges_ = reader.boolean();
    } else if (key == "byte_fallback") {
      if (reader.boolean())
        reader.fail("byte_fallback is not supported: the model must be byte-level");
    } else if (key == "dropout") {
      const Json value = Json::read(reader);
      if (!value.is_null() && value.number() != 0)
        reader.fail("dropout must be null or 0, got " + shown(value.dump()));
    } else if (key == "continuing_subword_prefix" || key == "end_of_word_suffix") {
      const Json value = Json::read(reader);
      if (!value.is_null() && !value.string().empty())
        reader.fail(key + " is not supported, got " + shown(value.dump()));
    } else {
      reader.skip();  // unk_token, fuse_unk: every byte has its token, so nothing is unknown
    }
  }
  if (!has_vocabulary || !has_merges) reader.fail("the model must have vocab and merges");
  if (merges) read_merges(*merges);
  vocabulary.end_model();
  for (int b = 0; b < 256; ++b) {
    const char byte = static_cast<char>(b);
    const std::string letter = letters_of({&byte, 1});
    bytes_[static_cast<std::size_t>(b)] = vocabulary.find(letter);
    if (bytes_[static_cast<std::size_t>(b)] < 0)
      reader.fail("the model must be byte-level, with a token for each byte; there is none for " +
                  std::to_string(b) + " ('" + letter + "')");
  }
}

void Bpe::read_merges(JsonReader& reader) {
  std::string both, right;
  for (reader.begin_array(); reader.next_element();) {
    std::size_t cut = 0;
    if (reader.peek() == JsonReader::Kind::kArray) {
      reader.begin_array();
      if (!reader.next_element()) reader.fail("a merge must be two tokens, got none");
      reader.read_string(both);
      cut = both.size();
      if (!reader.next_element()) reader.fail("a merge must be two tokens, got one");
      reader.read_string(right);
      if (reader.next_element()) reader.fail("a merge must be two tokens, got more");
      both += right;
    } else {
      reader.read_string(both);
      cut = both.find(' ');
      if (cut == both.npos || both.find(' ', cut + 1) != both.npos)
        reader.fail("a merge must be two tokens with a space between, got '" + shown(both) + "'");
      both.erase(cut, 1);
    }
    const std::string_view view = both;
    const TokenId a = vocabulary.find(view.substr(0, cut)), b = vocabulary.find(view.substr(cut)),
                  c = vocabulary.find(view);
    if (a < 0 || b < 0 || c < 0)
      reader.fail("a merge must be of tokens and give a token, got '" + shown(view.substr(0, cut)) +
                  "' and '" + shown(view.substr(cut)) + "'");
    merges_.add(a, b, c);
  }
}

void Bpe::encode(std::string_view word, std::vector<TokenId>& out) const {
  if (ignore_merges_) {
    if (const TokenId whole = vocabulary.find_in_model(letters_of(word)); whole >= 0) {
      out.push_back(whole);
      return;
    }
  }
  const std::size_t begin = out.size();
  for (const char c : word) out.push_back(bytes_[static_cast<unsigned char>(c)]);
  // Below this length looking at every pair again costs less than keeping a heap.
  constexpr std::size_t kShort = 48;
  word.size() <= kShort ? merge_short(out, begin) : merge_long(out, begin);
}

// The pair with the lowest rank, the leftmost of those, until there is none.
void Bpe::merge_short(std::vector<TokenId>& ids, std::size_t begin) const {
  std::array<const Merges::Merge*, 48> merges{};  // of element i and its right neighbour
  TokenId* const p = ids.data() + begin;
  std::size_t n = ids.size() - begin;
  for (std::size_t i = 0; i + 1 < n; ++i) merges[i] = merges_.find(p[i], p[i + 1]);
  while (n > 1) {
    std::size_t best = n;
    for (std::size_t i = 0; i + 1 < n; ++i) {
      if (merges[i] != nullptr && (best == n || merges[i]->rank < merges[best]->rank)) best = i;
    }
    if (best == n) break;
    p[best] = merges[best]->id;
    std::copy(p + best + 2, p + n, p + best + 1);
    std::copy(merges.begin() + static_cast<std::ptrdiff_t>(best) + 1,
              merges.begin() + static_cast<std::ptrdiff_t>(n) - 1,
              merges.begin() + static_cast<std::ptrdiff_t>(best));
    --n;
    if (best + 1 < n) merges[best] = merges_.find(p[best], p[best + 1]);
    if (best > 0) merges[best - 1] = merges_.find(p[best - 1], p[best]);
  }
  ids.resize(begin + n);
}

// The same with a heap of pairs and a list of what is left. A pair whose elements have changed since is passed over.
void Bpe::merge_long(std::vector<TokenId>& ids, std::size_t begin) const {
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
    if (const Merges::Merge* m = merges_.find(p[left], p[right])) heap.push({m->rank, left, m->id});
  };
  for (std::uint32_t i = 0; i + 1 < n; ++i) push(i);
  while (!heap.empty()) {
    const Pair top = heap.top();
    heap.pop();
    const std::uint32_t right = links[top.left].after;
    if (p[top.left] < 0 || right >= n) continue;
    const Merges::Merge* m = merges_.find(p[top.left], p[right]);
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
