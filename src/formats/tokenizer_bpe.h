// Byte-level byte pair encoding: tokens by name and by id, pairs that are merged, and a word's way to its ids.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "mlxtape/formats/json.h"
#include "mlxtape/formats/tokenizer.h"

namespace mlxtape::formats {

// Names lie one behind the other in one string; a flat table finds them. A hole (an id without a token) has no name.
class Vocabulary {
 public:
  static constexpr TokenId kMaxIds = 1 << 24;

  Vocabulary();
  void add(std::string_view token, TokenId id,
           const JsonReader& reader);                   // fails where either is taken
  TokenId find(std::string_view token) const;           // -1: there is none
  void end_model() { model_end_ = text_.size(); }       // what comes now are added tokens
  TokenId find_in_model(std::string_view token) const;  // -1: there is none, or it was added
  bool has(TokenId id) const {
    return id >= 0 && id < size() && names_[static_cast<std::size_t>(id)].begin != kHole;
  }
  std::string_view name(TokenId id) const;  // of one that is there
  TokenId size() const { return static_cast<TokenId>(names_.size()); }

 private:
  static constexpr std::uint32_t kHole = 0xFFFFFFFF;
  struct Name {
    std::uint32_t begin = kHole, length = 0;
  };
  std::size_t slot(std::string_view token) const;  // where it is or would be
  void grow();

  std::string text_;
  std::vector<Name> names_;     // by id
  std::vector<TokenId> slots_;  // a power of two of them, at most half full; -1: free
  std::size_t count_ = 0, model_end_ = 0;
};

// pair of ids -> how early it is merged, and into what
class Merges {
 public:
  struct Merge {
    std::uint64_t pair = kFree;
    std::uint32_t rank = 0;
    TokenId id = -1;
  };
  Merges();
  void add(TokenId left, TokenId right,
           TokenId merged);  // later ones have a higher rank; a pair's last rank counts
  const Merge* find(TokenId left, TokenId right) const;

 private:
  static constexpr std::uint64_t kFree = ~std::uint64_t{0};
  std::size_t slot(std::uint64_t pair) const;
  std::vector<Merge> slots_;
  std::size_t count_ = 0;
  std::uint32_t next_rank_ = 0;
};

class Bpe {
 public:
  void read(JsonReader& reader);  // the object "model" of tokenizer.json

  // Appends the ids of a word, which is bytes.
  void encode(std::string_view word, std::vector<TokenId>& out) const;

  Vocabulary vocabulary;

 private:
  void read_merges(JsonReader& reader);
  void merge_short(std::vector<TokenId>& ids, std::size_t begin) const;
  void merge_long(std::vector<TokenId>& ids, std::size_t begin) const;

  Merges merges_;
  std::array<TokenId, 256> bytes_{};
  bool ignore_merges_ = false;  // a word that is a token is not taken apart
};

// In tokenizer.json each byte is a letter: those that can be printed are themselves, the others U+0100 and on.
std::string letters_of(std::string_view bytes);
// The bytes of a token; its own UTF-8 where one of its letters stands for none.
void append_bytes(std::string& out, std::string_view letters);

}  // namespace mlxtape::formats
