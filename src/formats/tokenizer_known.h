// What lists of ranks leave out: by what pattern texts are cut into words, and which tokens are special. They are told
// apart by how many tokens they have.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace mlxtape::formats {

struct KnownToken {
  std::int64_t id;
  std::string text;
};

struct KnownRanks {
  const char* name;
  std::int64_t count;  // of its tokens, without special ones
  const char* pattern;
  bool composes;          // texts are brought to NFC first
  const char *bos, *eos;  // "": there is none
  std::vector<KnownToken> (*special)();
};

const KnownRanks* known_ranks(std::int64_t count);  // null: none has so many
std::string all_known_ranks();                      // "llama3 (128000), ..."

// Those of tekken.json in versions that do not list them.
bool tekken_has_fixed_tokens(std::string_view version);
std::vector<KnownToken> tekken_fixed_tokens();

}  // namespace mlxtape::formats
