// tokenizer.ggml.pre: how words are cut before they are encoded, by name in GGUF and by pattern in tokenizer.json.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "mlxtape/formats/json.h"

namespace mlxtape::formats {

struct GgufPre {
  std::vector<const char*> patterns;  // each cuts what the one before left
  bool ignore_merges = false;         // a word that is a token is that token
  bool add_bos = false;               // where the file does not say
};

std::optional<GgufPre> gguf_pre(std::string_view name);
// The name of a tokenizer.json's pre_tokenizer; nothing where it has none.
std::optional<std::string> gguf_pre_name(const Json& pre_tokenizer, bool ignore_merges);
std::string gguf_pre_names();

// The pre_tokenizer of tokenizer.json.
Json pre_tokenizer_of(const GgufPre& pre);

}  // namespace mlxtape::formats
