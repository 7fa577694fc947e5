#include "formats/tokenizer_scores.h"

#include <algorithm>
#include <numeric>

#include "formats/tokenizer_vocabulary.h"
#include "formats/utf8.h"

namespace mlxtape::formats {
namespace {

// Longer tokens have no merges here: looking at all their cuts takes a time that is quadratic in their length.
constexpr std::size_t kMostCuts = 4096;

void append_cuts(const Vocabulary& vocabulary, std::span<const std::uint8_t> joins, TokenId id,
                 std::uint32_t rank, std::vector<ScoredMerge>& out) {
  const std::string_view token = vocabulary.name(id);
  if (token.size() > kMostCuts) return;
  for (std::size_t cut = forward(token, 0, 1); cut < token.size(); cut = forward(token, cut, 1)) {
    const TokenId left = vocabulary.find(token.substr(0, cut));
    if (left < 0 || joins[static_cast<std::size_t>(left)] == 0) continue;
    const TokenId right = vocabulary.find(token.substr(cut));
    if (right < 0 || joins[static_cast<std::size_t>(right)] == 0) continue;
    out.push_back({left, right, id, rank});
  }
}

std::vector<TokenId> joining(const Vocabulary& vocabulary, std::span<const std::uint8_t> joins) {
  std::vector<TokenId> out;
  for (TokenId id = 0; id < vocabulary.size(); ++id) {
    if (vocabulary.has(id) && joins[static_cast<std::size_t>(id)] != 0) out.push_back(id);
  }
  return out;
}

}  // namespace

std::vector<ScoredMerge> merges_by_score(const Vocabulary& vocabulary,
                                         std::span<const float> scores,
                                         std::span<const std::uint8_t> joins) {
  std::vector<TokenId> order = joining(vocabulary, joins);
  const auto score = [&](TokenId id) {
    return scores[static_cast<std::size_t>(id)];
  };
  std::stable_sort(order.begin(), order.end(),
                   [&](TokenId a, TokenId b) { return score(a) > score(b); });
  std::vector<ScoredMerge> out;
  std::uint32_t rank = 0;
  for (std::size_t i = 0; i < order.size(); ++i) {
    if (i > 0 && score(order[i]) != score(order[i - 1])) ++rank;
    append_cuts(vocabulary, joins, order[i], rank, out);
  }
  return out;
}

std::vector<ScoredMerge> merges_by_rank(const Vocabulary& vocabulary,
                                        std::span<const std::uint8_t> joins) {
  std::vector<ScoredMerge> out;
  for (const TokenId id : joining(vocabulary, joins))
    append_cuts(vocabulary, joins, id, static_cast<std::uint32_t>(id), out);
  return out;
}

}  // namespace mlxtape::formats
