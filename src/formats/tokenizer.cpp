#include "mlxtape/formats/tokenizer.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <filesystem>
#include <utility>

#include "formats/tokenizer_bpe.h"
#include "formats/tokenizer_steps.h"
#include "formats/utf8.h"
#include "mlxtape/base/error.h"
#include "mlxtape/base/files.h"
#include "mlxtape/base/quote.h"

namespace mlxtape::formats {

struct Tokenizer::Parts {
  Bpe bpe;
  AddedMatcher raw, normalized;  // tokens that are looked for before normalizing, and after
  std::vector<bool> special;     // by id
  std::vector<Normalizer> normalizers;
  std::vector<Splitter> splitters;
  std::vector<TokenId> prefix, suffix;  // what the post-processor puts around a text

  std::optional<TokenId> bos, eos, pad;
  std::vector<TokenId> eos_ids;
  std::optional<ChatTemplate> chat_template;
  std::optional<Error>
      template_error;  // of one that is there but cannot be read: it spoils chats alone
  void read_template(std::string_view text, const std::string& source);

  void read(std::string_view json, const std::string& source);
  void add_tokens(const Json& json, const JsonReader& reader, const std::string& source);
  void read_post_processor(const Json& json, const std::string& source);
  void read_config(const Json& config, const std::string& path);
  bool read_eos_ids(const Json& config, const std::string& path);  // false where there are none
};

namespace {

[[noreturn]] void fail(const std::string& who, const std::string& what) {
  throw Error(Errc::kIo, who + ": " + what);
}

void check_decoder(const Json& json, const std::string& source) {
  const Json* type = json.find("type");
  if (type == nullptr) fail(source, "the decoder must be ByteLevel, got " + shown(json.dump()));
  if (type->string() == "Sequence") {
    const Json* list = json.find("decoders");
    if (list == nullptr) fail(source, "'decoders' must be given in a Sequence");
    for (const Json& step : list->array()) check_decoder(step, source);
  } else if (type->string() != "ByteLevel" && type->string() != "Fuse") {
    fail(source, "the decoder '" + shown(type->string()) + "' is not supported");
  }
}

// "text", {"content": "text"} or null
std::optional<std::string> token_text(const Json* json) {
  if (json == nullptr || json->is_null()) return std::nullopt;
  if (const Json* content = json->find("content")) return content->string();
  return json->string();
}

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

// ---- reading ----

void Tokenizer::Parts::read(std::string_view json, const std::string& source) {
  JsonReader reader(json, source);
  std::string key;
  Json added(Json::Array{}), normalizer, pre_tokenizer, post_processor, decoder;
  bool has_model = false;
  for (reader.begin_object(); reader.next_key(key);) {
    if (key == "model") {
      if (has_model) reader.fail("there must be one model, got two");
      bpe.read(reader);
      has_model = true;
    } else if (key == "added_tokens") {
      added = Json::read(reader);
    } else if (key == "normalizer") {
      normalizer = Json::read(reader);
    } else if (key == "pre_tokenizer") {
      pre_tokenizer = Json::read(reader);
    } else if (key == "post_processor") {
      post_processor = Json::read(reader);
    } else if (key == "decoder") {
      decoder = Json::read(reader);
    } else {
      reader.skip();  // version, truncation, padding
    }
  }
  reader.end();
  if (!has_model) reader.fail("there must be a model");
  normalizers = read_normalizers(normalizer, source);
  splitters = read_splitters(pre_tokenizer, source);
  check_decoder(decoder, source);
  add_tokens(added, reader, source);
  read_post_processor(post_processor, source);
}

void Tokenizer::Parts::add_tokens(const Json& json, const JsonReader& reader,
                                  const std::string& source) {
  for (const AddedToken& token : read_added_tokens(json, source)) {
    if (token.id < 0 || token.id >= Vocabulary::kMaxIds)
      fail(source, "an added token's id must be at least 0 and less than " +
                       std::to_string(Vocabulary::kMaxIds) + ", got " + std::to_string(token.id) +
                       " for '" + shown(token.content) + "'");
    const TokenId known = bpe.vocabulary.find(token.content);
    if (known < 0) {
      bpe.vocabulary.add(token.content, token.id, reader);
    } else if (known != token.id) {
      fail(source, "an added token must have the id that it has in the vocabulary, " +
                       std::to_string(known) + ", got " + std::to_string(token.id) + " for '" +
                       shown(token.content) + "'");
    }
    if (token.normalized) {
      normalized.add(token, normalize(normalizers, token.content));
    } else {
      raw.add(token, token.content);
    }
    special.resize(static_cast<std::size_t>(bpe.vocabulary.size()));
    if (token.special) special[static_cast<std::size_t>(token.id)] = true;
  }
  special.resize(static_cast<std::size_t>(bpe.vocabulary.size()));
}

// TemplateProcessing: "single" lists special tokens around the Sequence A; "special_tokens" says which ids they are.
void Tokenizer::Parts::read_post_processor(const Json& json, const std::string& source) {
  if (json.is_null()) return;
  const Json* type = json.find("type");
  if (type == nullptr) fail(source, "a post-processor must have a type");
  if (type->string() == "ByteLevel") return;  // moves offsets only
  if (type->string() == "Sequence") {
    const Json* list = json.find("processors");
    if (list == nullptr) fail(source, "'processors' must be given in a Sequence");
    for (const Json& step : list->array()) read_post_processor(step, source);
    return;
  }
  if (type->string() != "TemplateProcessing")
    fail(source, "the post-processor '" + shown(type->string()) + "' is not supported");
  const Json *single = json.find("single"), *tokens = json.find("special_tokens");
  if (single == nullptr || tokens == nullptr)
    fail(source, "TemplateProcessing must have 'single' and 'special_tokens'");
  std::vector<TokenId> before, after;
  bool passed = false;
  for (const Json& part : single->array()) {
    if (part.find("Sequence") != nullptr) {
      if (std::exchange(passed, true))
        fail(source, "TemplateProcessing: 'single' must have one Sequence, got two");
      continue;
    }
    const Json* name = part.find("SpecialToken");
    const Json* id = name != nullptr ? name->find("id") : nullptr;
    const Json* entry = id != nullptr ? tokens->find(id->string()) : nullptr;
    const Json* ids = entry != nullptr ? entry->find("ids") : nullptr;
    if (ids == nullptr)
      fail(source,
           "TemplateProcessing: a part must be a Sequence or a token of 'special_tokens', got " +
               shown(part.dump()));
    for (const Json& i : ids->array()) {
      const std::int64_t value = i.integer();
      if (value < 0 || value >= bpe.vocabulary.size() ||
          !bpe.vocabulary.has(static_cast<TokenId>(value)))
        fail(source,
             "TemplateProcessing: an id must be that of a token, got " + std::to_string(value));
      (passed ? after : before).push_back(static_cast<TokenId>(value));
    }
  }
  if (!passed) fail(source, "TemplateProcessing: 'single' must have a Sequence");
  prefix.insert(prefix.begin(), before.begin(), before.end());
  suffix.insert(suffix.end(), after.begin(), after.end());
}

void Tokenizer::Parts::read_config(const Json& config, const std::string& path) {
  const auto id = [&](const char* key) -> std::optional<TokenId> {
    const std::optional<std::string> text = token_text(config.find(key));
    if (!text) return std::nullopt;
    const TokenId found = bpe.vocabulary.find(*text);
    if (found < 0) fail(path, std::string(key) + " must be a token, got '" + shown(*text) + "'");
    return found;
  };
  bos = id("bos_token");
  eos = id("eos_token");
  pad = id("pad_token");
  if (eos) eos_ids = {*eos};
  const Json* chat = config.find("chat_template");
  if (chat != nullptr && chat->is_array()) {  // several, by name
    const Json* chosen = nullptr;
    for (const Json& named : chat->array()) {
      const Json *name = named.find("name"), *text = named.find("template");
      if (name == nullptr || text == nullptr)
        fail(path, "each chat_template must have a name and a template");
      if (name->string() == "default") chosen = text;
    }
    chat = chosen;
  }
  if (chat != nullptr && !chat->is_null()) read_template(chat->string(), path + ": chat_template");
}

void Tokenizer::Parts::read_template(std::string_view text, const std::string& source) {
  try {
    chat_template.emplace(text, source);
    template_error.reset();
  } catch (const Error& error) {
    chat_template.reset();
    template_error = error;
  }
}

bool Tokenizer::Parts::read_eos_ids(const Json& config, const std::string& path) {
  const Json* eos = config.find("eos_token_id");
  if (eos == nullptr || eos->is_null()) {
    const Json* text = config.find("text_config");  // where a model sees more than text
    return text != nullptr && read_eos_ids(*text, path);
  }
  eos_ids.clear();
  for (const Json& id : eos->is_array() ? eos->array() : Json::Array{*eos}) {
    if (!id.is_integer()) fail(path, "eos_token_id must be an id, got " + shown(id.dump()));
    const std::int64_t value = id.integer();
    if (value < 0 || value >= Vocabulary::kMaxIds)
      fail(path, "eos_token_id must be an id, got " + std::to_string(value));
    eos_ids.push_back(static_cast<TokenId>(value));
  }
  return true;
}

Tokenizer Tokenizer::from_json(std::string_view json, const std::string& source) {
  const auto parts = std::make_shared<Parts>();
  parts->read(json, source);
  Tokenizer tokenizer;
  tokenizer.parts_ = parts;
  return tokenizer;
}

Tokenizer Tokenizer::from_file(const std::string& path) {
  return from_json(read_whole(path, "tokenizer"), path);
}

Tokenizer Tokenizer::from_directory(const std::string& directory) {
  const auto path = [&](const char* name) {
    return (std::filesystem::path(directory) / name).string();
  };
  const auto parts = std::make_shared<Parts>();
  parts->read(read_whole(path("tokenizer.json"), "tokenizer"), path("tokenizer.json"));
  if (const std::string file = path("tokenizer_config.json"); std::filesystem::exists(file)) {
    parts->read_config(Json::read_file(file, "tokenizer"), file);
  }
  if (const std::string file = path("chat_template.jinja"); std::filesystem::exists(file)) {
    parts->read_template(read_whole(file, "tokenizer"), file);
  }
  for (const char* name : {"generation_config.json", "config.json"}) {
    const std::string file = path(name);
    if (!std::filesystem::exists(file)) continue;
    if (parts->read_eos_ids(Json::read_file(file, "tokenizer"), file)) break;
  }
  Tokenizer tokenizer;
  tokenizer.parts_ = parts;
  return tokenizer;
}

// ---- texts and ids ----

std::vector<TokenId> Tokenizer::encode(std::string_view text, bool add_special_tokens) const {
  if (text.size() > (std::size_t{1} << 30))
    throw Error(Errc::kArgument, "encode: a text must have at most 1 GiB, got " +
                                     std::to_string(text.size()) + " bytes");
  std::string replaced;
  if (!is_valid_utf8(text)) text = replaced = replace_invalid_utf8(text);
  std::vector<TokenId> ids;
  ids.reserve(text.size() / 3 + 8);
  if (add_special_tokens) ids = parts_->prefix;
  Words words(parts_->splitters);
  SeenWords seen(text.size());
  const auto word = [&](std::string_view w) {
    seen.append(w, ids, [this](std::string_view fresh, std::vector<TokenId>& out) {
      parts_->bpe.encode(fresh, out);
    });
  };
  const auto token = [&](TokenId id) {
    ids.push_back(id);
  };
  parts_->raw.each(
      text,
      [&](std::string_view piece) {
        const std::string normal = normalize(parts_->normalizers, std::string(piece));
        parts_->normalized.each(
            normal, [&](std::string_view rest) { words.each(rest, word); }, token);
      },
      token);
  if (add_special_tokens) ids.insert(ids.end(), parts_->suffix.begin(), parts_->suffix.end());
  return ids;
}

std::string Tokenizer::decode(std::span<const TokenId> ids, bool skip_special) const {
  std::string bytes;
  for (const TokenId id : ids) {
    if (parts_->bpe.vocabulary.has(id) && !(skip_special && is_special(id)))
      append_bytes(bytes, token_of(id));
  }
  return is_valid_utf8(bytes) ? bytes : replace_invalid_utf8(bytes);
}

std::string_view Tokenizer::token_of(TokenId id) const {
  if (!parts_->bpe.vocabulary.has(id))
    throw Error(Errc::kArgument,
                "token_of: the id must be that of a token, got " + std::to_string(id));
  return parts_->bpe.vocabulary.name(id);
}

std::optional<TokenId> Tokenizer::id_of(std::string_view token) const {
  const TokenId id = parts_->bpe.vocabulary.find(token);
  return id < 0 ? std::nullopt : std::optional(id);
}

bool Tokenizer::is_special(TokenId id) const {
  return parts_->bpe.vocabulary.has(id) && parts_->special[static_cast<std::size_t>(id)];
}
TokenId Tokenizer::vocabulary_size() const { return parts_->bpe.vocabulary.size(); }
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

std::string StreamDecoder::put(TokenId id) {
  if (tokenizer_.parts_->bpe.vocabulary.has(id) && !(skip_special_ && tokenizer_.is_special(id)))
    append_bytes(held_, tokenizer_.token_of(id));
  const std::size_t whole = complete_prefix(held_);
  std::string out = replace_invalid_utf8(std::string_view(held_).substr(0, whole));
  held_.erase(0, whole);
  return out;
}

std::string StreamDecoder::end() { return replace_invalid_utf8(std::exchange(held_, {})); }

}  // namespace mlxtape::formats
