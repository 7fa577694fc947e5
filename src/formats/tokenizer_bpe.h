// Byte pair encoding, of bytes or of characters.
#pragma once

#include <array>
#include <bitset>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "formats/tokenizer_model.h"

namespace mlxtape::formats {

struct BpeOptions {
  bool ignore_merges = false;  // a word that is a token is not taken apart
  bool byte_fallback = false;  // a character that is no token becomes its bytes, as tokens <0xNN>
  bool fuse_unknown = false;   // neighbours that are unknown become one
  TokenId unknown = -1;        // -1: what is unknown is left out
  std::string
      missing;  // the name of an unknown token that is no token: what is unknown is an error
};

class Bpe final : public Model {
 public:
  explicit Bpe(const Vocabulary& vocabulary) : vocabulary_(vocabulary) {}

  BpeOptions options;
  Merges merges;

  void prepare(bool byte_level) override;
  bool takes_bytes() const override { return true; }
  void encode(std::string_view word, std::vector<TokenId>& out) const override;
  std::size_t part_end(std::string_view word) const override;

 private:
  using Ids = std::vector<TokenId>;
  TokenId symbol_of(char32_t c, std::string_view text) const;
  void prepare_parts();
  void append_known_and_unknown(std::string_view word, Ids& out) const;
  void merge_short(Ids& ids, std::size_t begin) const;
  void merge_long(Ids& ids, std::size_t begin) const;

  // Which symbols are neighbours in a token: a hashed set, whose mistakes join what need not be.
  static constexpr std::size_t kNeighbours = std::size_t{1} << 21;
  static std::size_t neighbours(TokenId a, TokenId b) {
    const std::uint64_t pair = static_cast<std::uint64_t>(a) << 32 | static_cast<std::uint32_t>(b);
    return pair * 0x9E3779B97F4A7C15U >> 43;
  }
  bool joins(TokenId a, TokenId b) const { return joined_[neighbours(a, b)]; }

  const Vocabulary& vocabulary_;
  std::array<TokenId, 256> bytes_{};  // the token of each byte, -1 where there is none
  bool byte_level_ = true, all_bytes_ = false;
  std::vector<TokenId> characters_;  // of the first 65536 code points
  std::vector<bool> joined_;         // empty: words have no parts
};

}  // namespace mlxtape::formats
