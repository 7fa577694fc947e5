#include <optional>

#include "fuzz/tokens.h"

namespace mlxtape::fuzz {

bool tokenizer_file(std::string_view input) {
  const char* name = input.starts_with('{') ? "tekken.json" : "tokenizer.model";
  std::optional<formats::Tokenizer> t;
  if (!accepts([&] { t = formats::Tokenizer::from_bytes(input, name); })) return false;
  return encodes(*t, input);
}

}  // namespace mlxtape::fuzz
