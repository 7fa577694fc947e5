// What must hold of any tokens, and the text they are.
#pragma once

#include <string>
#include <vector>

#include "fuzz/targets.h"
#include "mlxtape/formats/tokenizer.h"

namespace mlxtape::fuzz {

inline std::string check_ids(const formats::Tokenizer& tokenizer,
                             const std::vector<formats::TokenId>& ids) {
  bool special = false;
  for (const formats::TokenId id : ids) {
    check(id >= 0 && id < tokenizer.vocabulary_size(), "an id is one of the vocabulary");
    check(tokenizer.id_of(tokenizer.token_of(id)) == id, "a token has one id");
    special = special || tokenizer.is_special(id);
  }
  const auto decoded = [&](bool skip) {
    formats::StreamDecoder stream(tokenizer, skip);
    std::string pieces;
    for (const formats::TokenId id : ids) pieces += stream.put(id);
    pieces += stream.end();
    check(pieces == tokenizer.decode(ids, skip), "pieces are what comes at once");
    return pieces;
  };
  if (special) decoded(true);  // without any the same is done as below
  return decoded(false);
}

// Texts that tokenizers tell apart, and the beginning of another one. False: none of them could be encoded.
inline bool encodes(const formats::Tokenizer& tokenizer, std::string_view another) {
  bool encoded = false;
  for (const std::string_view text :
       {std::string_view("Hello, world! It's 2024.\n\n  def f(x):\n\treturn x"),
        std::string_view("<|im_start|>user\nd\xC3\xA9j\xC3\xA0 vu e\xCC\x81 \xED\x95\x9C "
                         "\xF0\x9F\x99\x82<|im_end|>"),
        std::string_view("bad \xFF\xC3 bytes"), another.substr(0, 64)}) {
    for (const bool special : {true, false}) {
      encoded = accepts([&] { check_ids(tokenizer, tokenizer.encode(text, special)); }) || encoded;
    }
  }
  return encoded;
}

}  // namespace mlxtape::fuzz
