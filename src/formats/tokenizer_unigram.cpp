#include "formats/tokenizer_unigram.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "formats/utf8.h"
#include "mlxtape/base/error.h"
#include "mlxtape/base/quote.h"

namespace mlxtape::formats {
namespace {

constexpr double kUnknownPenalty = 10;  // below the lowest score
constexpr double kBonus = 0.1;          // of each further byte of a piece that is always taken
constexpr double kLargestSum = 100000;

unsigned char at_depth(std::string_view token, std::size_t depth) {
  return static_cast<unsigned char>(token[depth]);
}

}  // namespace

void Unigram::prepare(bool /*byte_level*/) {
  least_ = std::numeric_limits<double>::infinity();
  for (TokenId id = 0; id < static_cast<TokenId>(pieces.size()); ++id) {
    const Piece& piece = pieces[static_cast<std::size_t>(id)];
    if (!vocabulary_.has(id)) continue;
    if (piece.normal) least_ = std::min(least_, piece.score);
    if (piece.use == Use::kNever || vocabulary_.name(id).empty()) continue;
    sorted_.push_back(id);
    longest_ = std::max(longest_, vocabulary_.name(id).size());
  }
  std::sort(sorted_.begin(), sorted_.end(),
            [&](TokenId a, TokenId b) { return vocabulary_.name(a) < vocabulary_.name(b); });
  for (unsigned byte = 0; byte <= 256; ++byte) {
    by_first_.push_back(static_cast<std::uint32_t>(
        std::partition_point(sorted_.begin(), sorted_.end(),
                             [&](TokenId id) { return at_depth(vocabulary_.name(id), 0) < byte; }) -
        sorted_.begin()));
  }
  if (!options.byte_fallback) return;
  for (int b = 0; b < 256; ++b)
    bytes_.push_back(vocabulary_.find_in_model(byte_token(static_cast<unsigned char>(b))));
}

void Unigram::offer(Node& node, TokenId id, std::size_t begin, double sum) const {
  sum = rounded(sum);
  if (node.begin != kNowhere && !(sum > node.sum)) return;
  node = {id, static_cast<std::uint32_t>(begin), sum};
}

// Offers every piece that begins at `begin`. The pieces with a common beginning lie side by side, and each byte narrows
// them down. Returns whether one of them is the first character alone.
bool Unigram::extend(std::string_view word, std::size_t begin, std::size_t character, double sum,
                     std::vector<Node>& nodes) const {
  bool has_character = false;
  const std::size_t first = static_cast<unsigned char>(word[begin]);
  auto low = sorted_.begin() + by_first_[first], high = sorted_.begin() + by_first_[first + 1];
  for (std::size_t length = 1; low != high; ++length) {
    if (const TokenId id = *low; vocabulary_.name(id).size() == length) {
      const Piece& piece = pieces[static_cast<std::size_t>(id)];
      const double score = piece.use == Use::kAlways
                               ? rounded(kBonus * static_cast<double>(length - 1))
                               : piece.score;
      offer(nodes[begin + length], id, begin, score + sum);
      has_character = has_character || length == character;
      ++low;
    }
    if (begin + length == word.size()) break;
    const unsigned char next = at_depth(word, begin + length);
    low = std::partition_point(
        low, high, [&](TokenId id) { return at_depth(vocabulary_.name(id), length) < next; });
    high = std::partition_point(
        low, high, [&](TokenId id) { return at_depth(vocabulary_.name(id), length) == next; });
  }
  return has_character;
}

// Takes what the best way to here sums up to from all sums that are still compared: in large ones floats lose scores.
void Unigram::lower(std::vector<Node>& nodes, std::size_t begin) const {
  const double sum = nodes[begin].sum;
  const std::size_t end = std::min(nodes.size(), begin + longest_ + 1);
  for (std::size_t i = begin; i < end; ++i) {
    if (nodes[i].begin != kNowhere) nodes[i].sum = rounded(nodes[i].sum - sum);
  }
}

void Unigram::encode(std::string_view word, std::vector<TokenId>& out) const {
  std::vector<Node> nodes(word.size() + 1);
  nodes[0].begin = 0;
  for (std::size_t begin = 0; begin < word.size();) {
    const std::size_t end = forward(word, begin, 1);
    if (options.single && std::abs(nodes[begin].sum) > kLargestSum) lower(nodes, begin);
    const double sum = nodes[begin].sum;
    if (!extend(word, begin, end - begin, sum, nodes))
      offer(nodes[end], options.unknown, begin, rounded(least_ - kUnknownPenalty) + sum);
    begin = end;
  }
  std::vector<std::pair<std::uint32_t, std::uint32_t>> cuts;  // from the last one on
  for (auto end = static_cast<std::uint32_t>(word.size()); end > 0; end = nodes[end].begin)
    cuts.emplace_back(nodes[end].begin, end);
  for (std::size_t i = cuts.size(); i-- > 0;) {
    const auto [begin, end] = cuts[i];
    const TokenId id = nodes[end].id;
    if (id >= 0 && id != options.unknown) {
      out.push_back(id);
      continue;
    }
    // Neighbours that are unknown are one.
    while (i > 0 && nodes[cuts[i - 1].second].id == id) --i;
    append_unknown(word.substr(begin, cuts[i].second - begin), out);
  }
}

void Unigram::append_unknown(std::string_view text, std::vector<TokenId>& out) const {
  const std::size_t before = out.size();
  for (const char c : text) {
    const TokenId id = bytes_.empty() ? -1 : bytes_[static_cast<unsigned char>(c)];
    if (id < 0) break;
    out.push_back(id);
  }
  if (out.size() - before == text.size()) return;
  out.resize(before);
  if (options.unknown < 0)
    throw Error(Errc::kArgument,
                "tokenizer: the model has no unknown token, and none for '" + shown(text) + "'");
  out.push_back(options.unknown);
}

}  // namespace mlxtape::formats
