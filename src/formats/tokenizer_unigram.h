// Unigram: of all ways to cut a word into tokens, the one whose scores have the highest sum.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "formats/tokenizer_model.h"

namespace mlxtape::formats {

struct UnigramOptions {
  TokenId unknown = -1;        // -1: what is unknown is an error
  bool byte_fallback = false;  // what is unknown becomes its bytes, as tokens <0xNN>
  bool single = false;         // sums are rounded to float, as SentencePiece keeps them
};

class Unigram final : public Model {
 public:
  enum class Use : std::uint8_t { kNever, kPiece, kAlways };  // kAlways: cut out wherever it is
  struct Piece {
    double score = 0;
    Use use = Use::kNever;  // what a word is cut into
    bool normal = true;     // counts for the lowest score, which what is unknown lies below
  };

  explicit Unigram(const Vocabulary& vocabulary) : vocabulary_(vocabulary) {}

  UnigramOptions options;
  std::vector<Piece> pieces;  // by id

  void prepare(bool byte_level) override;
  void encode(std::string_view word, std::vector<TokenId>& out) const override;

 private:
  struct Node {
    TokenId id = -1;
    std::uint32_t begin = kNowhere;  // of the token that ends here, in bytes
    double sum = 0;
  };
  static constexpr std::uint32_t kNowhere = 0xFFFFFFFF;
  double rounded(double sum) const {
    return options.single ? static_cast<double>(static_cast<float>(sum)) : sum;
  }
  void offer(Node& node, TokenId id, std::size_t begin, double sum) const;
  bool extend(std::string_view word, std::size_t begin, std::size_t character, double sum,
              std::vector<Node>& nodes) const;
  void lower(std::vector<Node>& nodes, std::size_t begin) const;
  void append_unknown(std::string_view text, std::vector<TokenId>& out) const;

  const Vocabulary& vocabulary_;
  std::vector<TokenId> sorted_;          // pieces by their bytes
  std::vector<std::uint32_t> by_first_;  // where in sorted_ those of each first byte begin
  std::vector<TokenId> bytes_;           // the token of each byte; empty without byte_fallback
  double least_ = 0;                     // of all scores
  std::size_t longest_ = 4;              // piece or character, in bytes
};

}  // namespace mlxtape::formats
