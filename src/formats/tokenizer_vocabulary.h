// Tokens by name and by id, and pairs of tokens that are merged: what the models of a tokenizer are made of.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "mlxtape/formats/tokenizer.h"

namespace mlxtape::formats {

// Names lie one behind the other in one string; a flat table finds them. A hole (an id without a token) has no name.
class Vocabulary {
 public:
  static constexpr TokenId kMaxIds = 1 << 24;

  Vocabulary();
  void reserve(std::size_t tokens, std::size_t bytes);
  // What is wrong with it, "" if nothing is: an id out of range, or a token or an id that is taken.
  [[nodiscard]] std::string add(std::string_view token, std::int64_t id);
  TokenId find(std::string_view token) const;           // -1: there is none
  void end_model() { model_end_ = text_.size(); }       // what comes now are added tokens
  TokenId find_in_model(std::string_view token) const;  // -1: there is none, or it was added
  bool has(TokenId id) const {
    return id >= 0 && id < size() && names_[static_cast<std::size_t>(id)].begin != kHole;
  }
  std::string_view name(TokenId id) const;                              // of one that is there
  TokenId size() const { return static_cast<TokenId>(names_.size()); }  // the largest id and one
  std::size_t count() const { return count_; }                          // of tokens

 private:
  static constexpr std::uint32_t kHole = 0xFFFFFFFF;
  struct Name {
    std::uint32_t begin = kHole, length = 0;
  };
  std::size_t slot(std::string_view token, std::uint64_t hash) const;  // where it is or would be
  void resize(std::size_t slots);

  struct Slot {
    TokenId id = -1;  // -1: free
    std::uint32_t hash =
        0;  // its upper half: most other tokens are told apart without reading them
  };
  std::string text_;
  std::vector<Name> names_;  // by id
  std::vector<Slot> slots_;  // a power of two of them, at most half full
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
  void reserve(std::size_t pairs);
  void add(TokenId left, TokenId right, TokenId merged,
           std::uint32_t rank);  // a pair's last rank counts
  const Merge* find(TokenId left, TokenId right) const {
    const Merge& m = slots_[slot(key(left, right))];
    return m.pair == kFree ? nullptr : &m;
  }
  // Calls fn(left, right, merged) for each, in no order.
  template <class Fn>
  void each(Fn&& fn) const {
    for (const Merge& m : slots_) {
      if (m.pair != kFree)
        fn(static_cast<TokenId>(m.pair >> 32), static_cast<TokenId>(m.pair & 0xFFFFFFFF), m.id);
    }
  }

 private:
  static constexpr std::uint64_t kFree = ~std::uint64_t{0};
  static std::uint64_t key(TokenId left, TokenId right) {
    return static_cast<std::uint64_t>(left) << 32 | static_cast<std::uint32_t>(right);
  }
  static std::uint64_t mixed(std::uint64_t x) {
    x ^= x >> 32, x *= 0x9E3779B97F4A7C15U;
    return x ^ x >> 29;
  }
  std::size_t slot(std::uint64_t pair) const {
    std::size_t at = mixed(pair) & (slots_.size() - 1);
    while (slots_[at].pair != kFree && slots_[at].pair != pair) at = (at + 1) & (slots_.size() - 1);
    return at;
  }
  void resize(std::size_t slots);
  std::vector<Merge> slots_;
  std::size_t count_ = 0;
};

}  // namespace mlxtape::formats
