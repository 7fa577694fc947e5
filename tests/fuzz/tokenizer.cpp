#include "mlxtape/formats/tokenizer.h"

#include <optional>

#include "fuzz/tokens.h"

namespace mlxtape::fuzz {

bool tokenizer(std::string_view input) {
  using formats::Tokenizer;
  std::optional<Tokenizer> t;
  if (!accepts([&] { t = Tokenizer::from_json(input, "tokenizer.json"); })) return false;
  bool encoded = false;
  for (const std::string_view text :
       {std::string_view("Hello, world! It's 2024.\n\n  def f(x):\n\treturn x"),
        std::string_view("<|im_start|>user\nd\xC3\xA9j\xC3\xA0 vu e\xCC\x81 \xED\x95\x9C "
                         "\xF0\x9F\x99\x82<|im_end|>"),
        std::string_view("bad \xFF\xC3 bytes"), input.substr(0, 64)}) {
    for (const bool special : {true, false}) {
      encoded = accepts([&] { check_ids(*t, t->encode(text, special)); }) || encoded;
    }
  }
  return encoded;
}

}  // namespace mlxtape::fuzz
