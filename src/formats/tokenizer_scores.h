// Which pairs are merged where a vocabulary says only how good each token is, or how early it was found.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "mlxtape/formats/tokenizer.h"

namespace mlxtape::formats {

class Vocabulary;

struct ScoredMerge {
  TokenId left, right, merged;
  std::uint32_t rank;  // of equal rank: those that give tokens of the same score
};

// All ways in which a token is two others, the highest score first. joins: by id, whether a token may be merged, and be
// what comes of it (normal tokens do, control tokens and bytes do not). Both are as long as the vocabulary.
std::vector<ScoredMerge> merges_by_score(const Vocabulary& vocabulary,
                                         std::span<const float> scores,
                                         std::span<const std::uint8_t> joins);
// The same for tokens that were found in the order of their ids; in letters, a byte each.
std::vector<ScoredMerge> merges_by_rank(const Vocabulary& vocabulary,
                                        std::span<const std::uint8_t> joins);

}  // namespace mlxtape::formats
