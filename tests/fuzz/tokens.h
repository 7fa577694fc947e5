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

}  // namespace mlxtape::fuzz
