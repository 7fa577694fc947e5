// Texts to token ids and back, by the tokenizer files that models come with.
//
// Read       tokenizer.json: models BPE (of bytes, or of characters with byte_fallback) and Unigram; added_tokens with all
//            their flags; normalizers NFC, NFD, NFKC, NFKD, Lowercase, StripAccents, Strip, Replace, Prepend, Precompiled,
//            ByteLevel; pre_tokenizers Split, ByteLevel, Metaspace, Digits, Whitespace, WhitespaceSplit, Punctuation,
//            BertPreTokenizer, CharDelimiterSplit; post_processors TemplateProcessing, BertProcessing, RobertaProcessing,
//            ByteLevel; decoders ByteLevel, ByteFallback, Metaspace, Replace, Fuse, Strip; a Sequence of any of these.
//            tokenizer.model: SentencePiece's BPE and Unigram models, with their normalization tables.
//            tekken.json, and tiktoken's lists of ranks (also as tokenizer.model), whose pattern and special tokens are
//            known by the number of their tokens.
//            Anything else is an Error(kIo) that names it. Truncation and padding are the caller's business.
// Encoding   gives the ids that Hugging Face's tokenizers, SentencePiece and tiktoken give; special tokens that are
//            written in a text are found in it, whatever the file. Letters, digits and spaces are those of Unicode 14
//            (PCRE2), normal forms those of Unicode 15 (utf8proc): newer characters may be cut otherwise, and marks that
//            Hugging Face's older tables do not know (U+08D3, U+0D3B) are put in order here.
//            Bytes that are no UTF-8 count as U+FFFD. The time is n·log n in the length of the longest word.
// Decoding   as the file's decoder says; bytes that are no UTF-8 become U+FFFD. An id without a token gives nothing:
//            models have a few more rows than tokens.
//
// Threads    A Tokenizer is constant: use one from any number of threads. A StreamDecoder is one thread's.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "mlxtape/formats/chat_template.h"

namespace mlxtape::formats {

using TokenId = std::int32_t;

class Tokenizer {
 public:
  // tokenizer.json alone: no special tokens by role, no chat template.
  static Tokenizer from_json(std::string_view json, const std::string& source);
  // Any of these files, by what it begins with; JSON in a file named tekken* is Mistral's.
  static Tokenizer from_file(const std::string& path);
  static Tokenizer from_bytes(std::string_view bytes,
                              const std::string& name);  // of a file that was read
  // A model's folder: tokenizer.json, else tekken.json, tokenizer.model, tiktoken.model or qwen.tiktoken; and, where they
  // are, tokenizer_config.json (bos, eos, pad, chat template), chat_template.jinja (before the one in the config), and
  // for eos ids generation_config.json, else config.json, else that of tokenizer_config.json.
  // tokenizer.json says itself what is put around a text. For the others tokenizer_config.json does, add_bos_token and
  // add_eos_token; else it is a bos token before it, if there is one, but for Unigram.
  static Tokenizer from_directory(const std::string& directory);
  // Where the tokens are that from_directory would read; "" where they are nowhere.
  static std::string file_in(const std::string& directory);
  // The same from what such files would hold. eos_ids: empty where the config's eos token is the only one.
  static Tokenizer from_texts(std::string_view tokenizer_json, const Json& tokenizer_config,
                              std::vector<TokenId> eos_ids, const std::string& source);
  // A model in one file, which has its tokenizer in it.
  static Tokenizer from_gguf(const std::string& path);

  // add_special_tokens: with what the post-processor puts around a text, as a bos token.
  std::vector<TokenId> encode(std::string_view text, bool add_special_tokens = true) const;
  std::string decode(std::span<const TokenId> ids, bool skip_special = false) const;

  std::string_view token_of(
      TokenId id) const;  // as in the file; throws kArgument where there is none
  std::optional<TokenId> id_of(std::string_view token) const;  // a token as in the file
  bool is_special(TokenId id) const;
  TokenId vocabulary_size() const;  // the largest id and one

  std::optional<TokenId> bos_id() const;
  std::optional<TokenId> pad_id() const;
  const std::vector<TokenId>& eos_ids()
      const;                      // any of them ends a text; empty where none is known
  std::string bos_token() const;  // "" where there is none: what a chat template wants
  std::string eos_token() const;  // the config's
  // Null where there is none; throws where there is one that cannot be read.
  const ChatTemplate* chat_template() const;
  // Messages by the chat template, which writes the special tokens itself: bos and eos are this tokenizer's, and none
  // is put around. Throws kArgument without a template.
  std::vector<TokenId> encode_chat(const Json& messages, ChatOptions options = {}) const;

 private:
  friend class StreamDecoder;
  struct Parts;
  Tokenizer() = default;
  std::shared_ptr<const Parts> parts_;
};

// Text from ids that come one at a time. A character whose bytes are spread over tokens comes with its last one;
// all pieces and the end together are what decode gives.
class StreamDecoder {
 public:
  explicit StreamDecoder(Tokenizer tokenizer, bool skip_special = false);
  StreamDecoder(const StreamDecoder& other);
  StreamDecoder(StreamDecoder&& other) noexcept;
  StreamDecoder& operator=(StreamDecoder other) noexcept;
  ~StreamDecoder();

  std::string put(TokenId id);  // what is complete now; often "" in the midst of a character
  std::string end();            // what was held back, as U+FFFD; then it begins anew

 private:
  struct State;
  Tokenizer tokenizer_;
  bool skip_special_;
  std::unique_ptr<State> state_;
};

}  // namespace mlxtape::formats
