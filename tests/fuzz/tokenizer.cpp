#include "mlxtape/formats/tokenizer.h"

#include <optional>

#include "fuzz/tokens.h"

namespace mlxtape::fuzz {

bool tokenizer(std::string_view input) {
  std::optional<formats::Tokenizer> t;
  if (!accepts([&] { t = formats::Tokenizer::from_json(input, "tokenizer.json"); })) return false;
  return encodes(*t, input);
}

}  // namespace mlxtape::fuzz
