// What a tokenizer consists of, whatever file it was read from.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "formats/tokenizer_added.h"
#include "formats/tokenizer_decode.h"
#include "formats/tokenizer_model.h"
#include "formats/tokenizer_normalize.h"
#include "formats/tokenizer_split.h"
#include "formats/tokenizer_vocabulary.h"
#include "mlxtape/base/error.h"
#include "mlxtape/formats/tokenizer.h"

namespace mlxtape::formats {

struct Tokenizer::Parts {
  Vocabulary vocabulary;
  std::unique_ptr<Model> model;
  AddedMatcher raw, normalized;  // tokens that are looked for before normalizing, and after
  std::vector<bool> special;     // by id
  std::vector<Normalizer> normalizers;
  PreTokenizer pre_tokenizer;
  std::vector<DecodeStep> decoder;
  std::vector<TokenId> prefix, suffix;  // what the post-processor puts around a text
  bool normalizes_bytes = false;        // the normalizer sees to bytes that are no UTF-8

  std::optional<TokenId> bos, eos, pad;
  std::vector<TokenId> eos_ids;
  std::optional<ChatTemplate> chat_template;
  std::optional<Error>
      template_error;  // of one that is there but cannot be read: it spoils chats alone

  // tokenizer.json
  void read(std::string_view json, const std::string& source);
  // Other files have neither special tokens nor what is put around a text: tokenizer_config.json, which may be null, has.
  void read_sentencepiece(std::string_view bytes, const Json& config, const std::string& source);
  void read_tiktoken(std::string_view text, const Json& config, const std::string& source);
  void read_tekken(std::string_view json, const std::string& source);
  void read_bytes(std::string_view bytes, const Json& config, const std::string& path);

  void add_tokens(const std::vector<AddedToken>& tokens, const std::string& source);
  // What those other files put around a text: as the config says; else the bos token before it, if `begins`.
  void put_around(const Json& config, bool begins, const std::string& source);
  // Once vocabulary, model and steps are there.
  void prepare();

  // What lies beside it.
  void read_config(const Json& config, const std::string& path);
  void read_template(std::string_view text, const std::string& source);
  bool read_eos_ids(const Json& config, const std::string& path);  // false where there are none

 private:
  void read_post_processor(const Json& json, const std::string& source);
  void read_around(const Json& json, const std::string& source);
  TokenId id_of_token(std::int64_t id, const char* what, const std::string& source) const;
};

std::vector<AddedToken> added_in_config(const Json& config, const std::string& source);

}  // namespace mlxtape::formats
