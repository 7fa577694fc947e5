#include "formats/tokenizer_vocabulary.h"

#include <algorithm>
#include <bit>
#include <functional>

#include "mlxtape/base/quote.h"

namespace mlxtape::formats {
namespace {

constexpr std::size_t kFewSlots = std::size_t{1} << 12;

}  // namespace

// ---- Vocabulary ----

Vocabulary::Vocabulary() : slots_(kFewSlots) {}

void Vocabulary::reserve(std::size_t tokens, std::size_t bytes) {
  tokens = std::min(tokens, static_cast<std::size_t>(kMaxIds));
  names_.reserve(tokens);
  text_.reserve(bytes);
  const std::size_t slots = std::bit_ceil(tokens * 2 + 2);
  if (slots > slots_.size()) resize(slots);
}

std::size_t Vocabulary::slot(std::string_view token, std::uint64_t hash) const {
  const auto upper = static_cast<std::uint32_t>(hash >> 32);
  std::size_t at = hash & (slots_.size() - 1);
  for (; slots_[at].id >= 0; at = (at + 1) & (slots_.size() - 1)) {
    if (slots_[at].hash == upper && name(slots_[at].id) == token) break;
  }
  return at;
}

std::string_view Vocabulary::name(TokenId id) const {
  const Name& n = names_[static_cast<std::size_t>(id)];
  return std::string_view(text_).substr(n.begin, n.length);
}

TokenId Vocabulary::find(std::string_view token) const {
  return slots_[slot(token, std::hash<std::string_view>{}(token))].id;
}

TokenId Vocabulary::find_in_model(std::string_view token) const {
  const TokenId id = find(token);
  return id >= 0 && names_[static_cast<std::size_t>(id)].begin < model_end_ ? id : -1;
}

void Vocabulary::resize(std::size_t slots) {
  const std::vector<Slot> old = std::exchange(slots_, std::vector<Slot>(slots));
  for (const Slot& s : old) {
    if (s.id < 0) continue;
    std::size_t at = std::hash<std::string_view>{}(name(s.id)) & (slots - 1);
    while (slots_[at].id >= 0) at = (at + 1) & (slots - 1);
    slots_[at] = s;
  }
}

std::string Vocabulary::add(std::string_view token, std::int64_t id) {
  if (id < 0 || id >= kMaxIds)
    return "an id must be at least 0 and less than " + std::to_string(kMaxIds) + ", got " +
           std::to_string(id) + " for '" + shown(token) + "'";
  if (text_.size() + token.size() >= kHole) return "the tokens must have less than 4 GiB together";
  if (static_cast<std::size_t>(id) >= names_.size())
    names_.resize(static_cast<std::size_t>(id) + 1);
  Name& n = names_[static_cast<std::size_t>(id)];
  if (n.begin != kHole)
    return "each id must have one token, got '" + shown(name(static_cast<TokenId>(id))) +
           "' and '" + shown(token) + "' for " + std::to_string(id);
  const std::uint64_t hash = std::hash<std::string_view>{}(token);
  Slot& s = slots_[slot(token, hash)];
  if (s.id >= 0) return "each token must be there once, got '" + shown(token) + "' twice";
  n = {static_cast<std::uint32_t>(text_.size()), static_cast<std::uint32_t>(token.size())};
  text_ += token;
  s = {static_cast<TokenId>(id), static_cast<std::uint32_t>(hash >> 32)};
  if (++count_ * 2 > slots_.size()) resize(slots_.size() * 4);
  return {};
}

// ---- Merges ----

Merges::Merges() : slots_(kFewSlots) {}

void Merges::reserve(std::size_t pairs) {
  const std::size_t slots = std::bit_ceil(pairs * 2 + 2);
  if (slots > slots_.size()) resize(slots);
}

void Merges::resize(std::size_t slots) {
  const std::vector<Merge> old = std::exchange(slots_, std::vector<Merge>(slots));
  for (const Merge& o : old) {
    if (o.pair != kFree) slots_[slot(o.pair)] = o;
  }
}

void Merges::add(TokenId left, TokenId right, TokenId merged, std::uint32_t rank) {
  const std::uint64_t pair = key(left, right);
  Merge& m = slots_[slot(pair)];
  count_ += m.pair == kFree ? 1 : 0;
  m = {pair, rank, merged};
  if (count_ * 2 > slots_.size()) resize(slots_.size() * 4);
}

}  // namespace mlxtape::formats
