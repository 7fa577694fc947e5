#include "mlxtape/formats/tokenizer.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <utility>

#include "formats/tokenizer_parts.h"
#include "formats/utf8.h"
#include "mlxtape/base/error.h"

namespace mlxtape::formats {
namespace {

constexpr std::size_t kMaxText = std::size_t{1} << 30;

// Words of one text that were seen before: where their ids are. Most words of a long text have come already, and are
// found in a table, where a word takes the place of another of the same hash. Its size is by the text's: every call makes
// one and clears it.
class SeenWords {
 public:
  explicit SeenWords(std::size_t text_size)
      : slots_(text_size < 256 ? 0 : std::min<std::size_t>(std::bit_ceil(text_size / 4), 8192)) {}

  template <class Encode>
  void append(std::string_view word, std::vector<TokenId>& ids, Encode encode) {
    if (slots_.empty() || word.size() > kMaxWord) return encode(word, ids);
    Slot& slot = slots_[std::hash<std::string_view>{}(word) % slots_.size()];
    if (slot.length == word.size() && std::memcmp(slot.word, word.data(), word.size()) == 0) {
      for (std::size_t i = 0; i < slot.count; ++i) ids.push_back(ids[slot.begin + i]);
      return;
    }
    const std::size_t begin = ids.size();
    encode(word, ids);
    slot.begin = begin;
    slot.count = static_cast<std::uint8_t>(ids.size() - begin);
    slot.length = static_cast<std::uint8_t>(word.size());
    std::memcpy(slot.word, word.data(), word.size());
  }

 private:
  static constexpr std::size_t kMaxWord = 22;
  struct Slot {
    std::size_t begin = 0;
    std::uint8_t count = 0, length = 0;
    char word[kMaxWord];
  };
  std::vector<Slot> slots_;
};

}  // namespace

std::vector<TokenId> Tokenizer::encode(std::string_view text, bool add_special_tokens) const {
  if (text.size() > kMaxText)
    throw Error(Errc::kArgument, "encode: a text must have at most 1 GiB, got " +
                                     std::to_string(text.size()) + " bytes");
  const Parts& p = *parts_;
  std::string replaced;
  if (!p.normalizes_bytes && !is_valid_utf8(text)) text = replaced = replace_invalid_utf8(text);
  std::vector<TokenId> ids;
  ids.reserve(text.size() / 3 + 8);
  if (add_special_tokens) ids = p.prefix;
  Words words(p.pre_tokenizer.steps);
  SeenWords seen(text.size());
  const auto encode_part = [&p](std::string_view fresh, std::vector<TokenId>& out) {
    p.model->encode(fresh, out);
  };
  const auto word = [&](std::string_view w) {
    while (!w.empty()) {
      const std::size_t end = p.model->part_end(w);
      seen.append(w.substr(0, end), ids, encode_part);
      w.remove_prefix(end);
    }
  };
  const auto token = [&](TokenId id) {
    ids.push_back(id);
  };
  p.raw.each(
      text,
      [&](std::string_view piece, std::size_t begin) {
        const bool starts = begin == 0, ends = begin + piece.size() == text.size();
        const std::string normal = normalize(p.normalizers, std::string(piece), starts, ends);
        p.normalized.each(
            normal,
            [&](std::string_view rest, std::size_t at) {
              words.each(rest, starts && at == 0, word);
            },
            token);
      },
      token);
  if (add_special_tokens) ids.insert(ids.end(), p.suffix.begin(), p.suffix.end());
  return ids;
}

std::string Tokenizer::decode(std::span<const TokenId> ids, bool skip_special) const {
  std::string out;
  Decoding decoding(parts_->decoder);
  for (const TokenId id : ids) {
    if (parts_->vocabulary.has(id) && !(skip_special && is_special(id)))
      decoding.put(token_of(id), out);
  }
  decoding.end(out);
  return out;
}

std::string_view Tokenizer::token_of(TokenId id) const {
  if (!parts_->vocabulary.has(id))
    throw Error(Errc::kArgument,
                "token_of: the id must be that of a token, got " + std::to_string(id));
  return parts_->vocabulary.name(id);
}

std::optional<TokenId> Tokenizer::id_of(std::string_view token) const {
  const TokenId id = parts_->vocabulary.find(token);
  return id < 0 ? std::nullopt : std::optional(id);
}

bool Tokenizer::is_special(TokenId id) const {
  return parts_->vocabulary.has(id) && parts_->special[static_cast<std::size_t>(id)];
}
TokenId Tokenizer::vocabulary_size() const { return parts_->vocabulary.size(); }
std::optional<TokenId> Tokenizer::bos_id() const { return parts_->bos; }
std::optional<TokenId> Tokenizer::pad_id() const { return parts_->pad; }
const std::vector<TokenId>& Tokenizer::eos_ids() const { return parts_->eos_ids; }
std::string Tokenizer::bos_token() const {
  return parts_->bos ? std::string(token_of(*parts_->bos)) : "";
}
std::string Tokenizer::eos_token() const {
  return parts_->eos ? std::string(token_of(*parts_->eos)) : "";
}
std::vector<TokenId> Tokenizer::encode_chat(const Json& messages, ChatOptions options) const {
  const ChatTemplate* chat = chat_template();
  if (chat == nullptr) throw Error(Errc::kArgument, "tokenizer: the model has no chat template");
  options.bos_token = bos_token();
  options.eos_token = eos_token();
  return encode(chat->render(messages, options), false);
}

const ChatTemplate* Tokenizer::chat_template() const {
  if (parts_->template_error) throw *parts_->template_error;
  return parts_->chat_template ? &*parts_->chat_template : nullptr;
}

// ---- one id after the other ----

struct StreamDecoder::State {
  explicit State(const Tokenizer& t) : decoding(t.parts_->decoder) {}
  Decoding decoding;
};

StreamDecoder::StreamDecoder(Tokenizer tokenizer, bool skip_special)
    : tokenizer_(std::move(tokenizer)),
      skip_special_(skip_special),
      state_(std::make_unique<State>(tokenizer_)) {}
StreamDecoder::StreamDecoder(const StreamDecoder& other)
    : tokenizer_(other.tokenizer_),
      skip_special_(other.skip_special_),
      state_(std::make_unique<State>(*other.state_)) {}
StreamDecoder::StreamDecoder(StreamDecoder&&) noexcept = default;
StreamDecoder& StreamDecoder::operator=(StreamDecoder other) noexcept {
  tokenizer_ = std::move(other.tokenizer_);
  skip_special_ = other.skip_special_;
  state_ = std::move(other.state_);
  return *this;
}
StreamDecoder::~StreamDecoder() = default;

std::string StreamDecoder::put(TokenId id) {
  std::string out;
  if (tokenizer_.parts_->vocabulary.has(id) && !(skip_special_ && tokenizer_.is_special(id)))
    state_->decoding.put(tokenizer_.token_of(id), out);
  return out;
}

std::string StreamDecoder::end() {
  std::string out;
  state_->decoding.end(out);
  return out;
}

}  // namespace mlxtape::formats
