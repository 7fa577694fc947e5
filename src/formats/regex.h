// Regular expressions as tokenizers write them, by PCRE2.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace mlxtape::formats {

class Regex {
 public:
  using Match = std::pair<std::size_t, std::size_t>;  // begin and end, in bytes

  // As Oniguruma reads it, which tokenizer.json is written for, or as Rust's libraries, which tiktoken uses.
  enum class Flavor { kOniguruma, kRust };

  // Throws kIo: patterns come from files.
  explicit Regex(const std::string& pattern, Flavor flavor = Flavor::kOniguruma);
  static Regex literal(std::string_view text);

  // All matches that are not empty, from left to right, none inside of another. text is valid UTF-8. Throws kIo for a
  // pattern that takes too long on it, or whose matches are not so.
  void find_all(std::string_view text, std::vector<Match>& out) const;

 private:
  Regex(const std::string& pattern, unsigned options);
  std::shared_ptr<const void> code_;  // compiled, shared by copies
  std::string pattern_;
};

}  // namespace mlxtape::formats
