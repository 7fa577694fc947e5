// The tokenizer in a GGUF file, and as the files tokenizer.json and tokenizer_config.json that MLX models have.
//
// Kinds      gpt2: byte-level BPE by merges; the pattern that cuts words has a name (tokenizer.ggml.pre) that both programs must
//            know. llama: SentencePiece BPE by scores. Any other kind is an error that names it.
// Differs    GGUF keeps no normal forms: a tokenizer.json with NFC loses it on the way to GGUF, and one that comes from GGUF has none.
// Errors     kIo: tokens that are no UTF-8, lists of different lengths, ids without a token, a kind or a pattern that is unknown.
//
// Threads    Functions: any.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "mlxtape/formats/gguf.h"
#include "mlxtape/formats/gguf_write.h"
#include "mlxtape/formats/json.h"
#include "mlxtape/formats/tokenizer.h"

namespace mlxtape::formats {

enum class GgufTokenType : std::int32_t {
  kNormal = 1,
  kUnknown = 2,
  kControl = 3,
  kUserDefined = 4,
  kUnused = 5,
  kByte = 6,
};

// Views into the file, which must outlive it. Ids are those of tokens, types and scores as many as tokens or none.
struct GgufTokenizer {
  std::string_view model, pre;  // "gpt2", "llama"; "qwen2"
  std::vector<std::string_view> tokens, merges;
  std::vector<std::int32_t> types;
  std::vector<float> scores;
  std::optional<TokenId> bos, eos, eot, eom, unknown, padding;
  std::optional<bool> add_bos, add_eos, add_space_prefix;
  std::string_view chat_template;
  std::string_view tokenizer_json;  // a whole one, where the file brings it along
};
// Nothing where the file has no tokenizer.
std::optional<GgufTokenizer> read_gguf_tokenizer(const GgufFile& file);

struct TokenizerFiles {
  std::string tokenizer_json;
  Json tokenizer_config;
  std::vector<TokenId> eos;  // any of which ends a text
};
TokenizerFiles tokenizer_files(const GgufTokenizer& tokenizer, const std::string& source);

// The other way: the keys tokenizer.* of a folder's tokenizer.json and tokenizer_config.json, for a model with that many rows
// of embeddings. Nothing where the folder has no tokenizer.json. Throws kArgument for one that llama.cpp has no name for.
std::vector<GgufKey> gguf_tokenizer_keys(const std::string& folder, std::int64_t rows);

}  // namespace mlxtape::formats
