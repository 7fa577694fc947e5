// A model's folder: which file its tokens are in, and what the configs beside it say.
#include <algorithm>
#include <filesystem>
#include <utility>

#include "formats/tokenizer_json.h"
#include "formats/tokenizer_parts.h"
#include "mlxtape/base/files.h"
#include "mlxtape/formats/gguf.h"

namespace mlxtape::formats {
namespace {

constexpr const char* kTokenizerJson = "tokenizer.json";

// "text", {"content": "text"} or null
std::optional<std::string> token_text(const Json* json) {
  if (json == nullptr || json->is_null()) return std::nullopt;
  if (const Json* content = json->find("content")) return content->string();
  return json->string();
}

// Of several templates, by name, the one that is to be used where none is named.
const Json* default_template(const Json& list, const std::string& path) {
  const Json* chosen = nullptr;
  for (const Json& named : list.array()) {
    const Json *name = named.find("name"), *text = named.find("template");
    if (name == nullptr || text == nullptr)
      refuse(path, "each chat_template must have a name and a template");
    if (name->string() == "default") chosen = text;
  }
  return chosen;
}

// A token that the config gives a role is special.
bool has_role(const Json& config, const std::string& token) {
  const auto is_it = [&](const Json& value) {
    const Json* content = value.find("content");
    const Json& text = content != nullptr ? *content : value;
    return text.is_string() && text.string() == token;
  };
  for (const char* key : {"bos_token", "eos_token", "pad_token", "unk_token", "sep_token",
                          "cls_token", "mask_token"}) {
    const Json* value = config.find(key);
    if (value != nullptr && is_it(*value)) return true;
  }
  const Json* more = config.find("additional_special_tokens");
  return more != nullptr && more->is_array() &&
         std::any_of(more->array().begin(), more->array().end(), is_it);
}

// Older folders have tokens that were added in a file of their own: {"text": id}.
Json with_added_tokens(Json config, const std::string& path) {
  constexpr const char* kAdded = "added_tokens_decoder";
  std::error_code unseen;
  if (config.find(kAdded) != nullptr || !std::filesystem::exists(path, unseen)) return config;
  const Json file = Json::read_file(path, "tokenizer");
  Json::Object tokens;
  for (const auto& [text, id] : file.object()) {
    tokens.emplace_back(
        std::to_string(id.integer()),
        Json(Json::Object{{"content", Json(text)}, {"special", Json(has_role(config, text))}}));
  }
  if (config.is_null()) config = Json::Object{};
  config.set(kAdded, Json(std::move(tokens)));
  return config;
}

}  // namespace

void Tokenizer::Parts::read_config(const Json& config, const std::string& path) {
  const auto id = [&](const char* key) -> std::optional<TokenId> {
    const std::optional<std::string> text = token_text(config.find(key));
    if (!text) return std::nullopt;
    const TokenId found = vocabulary.find(*text);
    if (found < 0) refuse(path, std::string(key) + " must be a token, got '" + shown(*text) + "'");
    return found;
  };
  if (config.find("bos_token") != nullptr) bos = id("bos_token");
  if (config.find("eos_token") != nullptr) eos = id("eos_token");
  if (config.find("pad_token") != nullptr) pad = id("pad_token");
  if (eos) eos_ids = {*eos};
  const Json* chat = config.find("chat_template");
  if (chat != nullptr && chat->is_array()) chat = default_template(*chat, path);
  if (chat != nullptr && !chat->is_null()) read_template(chat->string(), path + ": chat_template");
}

void Tokenizer::Parts::put_around(const Json& config, bool begins, const std::string& source) {
  const auto id = [&](const char* key, const std::optional<TokenId>& otherwise) {
    const std::optional<std::string> text = token_text(config.find(key));
    if (!text) return otherwise;
    const TokenId found = vocabulary.find(*text);
    if (found < 0)
      refuse(source, std::string(key) + " of tokenizer_config.json must be a token, got '" +
                         shown(*text) + "'");
    return std::optional(found);
  };
  const std::optional<TokenId> before = id("bos_token", bos), after = id("eos_token", eos);
  if (before && flag(config, "add_bos_token", begins)) prefix.push_back(*before);
  if (after && flag(config, "add_eos_token", false)) suffix.push_back(*after);
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
  const Json* eos_id = config.find("eos_token_id");
  if (eos_id == nullptr || eos_id->is_null()) {
    const Json* text = config.find("text_config");  // where a model sees more than text
    return text != nullptr && read_eos_ids(*text, path);
  }
  eos_ids.clear();
  for (const Json& id : eos_id->is_array() ? eos_id->array() : Json::Array{*eos_id}) {
    if (!id.is_integer()) refuse(path, "eos_token_id must be an id, got " + shown(id.dump()));
    const std::int64_t value = id.integer();
    if (value < 0 || value >= Vocabulary::kMaxIds)
      refuse(path, "eos_token_id must be an id, got " + std::to_string(value));
    eos_ids.push_back(static_cast<TokenId>(value));
  }
  return true;
}

Tokenizer Tokenizer::from_texts(std::string_view tokenizer_json, const Json& tokenizer_config,
                                std::vector<TokenId> eos_ids, const std::string& source) {
  auto parts = std::make_shared<Parts>();
  parts->read(tokenizer_json, source);
  parts->read_config(tokenizer_config, source);
  for (const TokenId id : eos_ids) {
    if (id < 0 || id >= Vocabulary::kMaxIds)
      refuse(source, "the end of a text must be an id, got " + std::to_string(id));
  }
  if (!eos_ids.empty()) parts->eos_ids = std::move(eos_ids);
  Tokenizer t;
  t.parts_ = std::move(parts);
  return t;
}

Tokenizer Tokenizer::from_directory(const std::string& directory) {
  if (is_gguf_path(directory)) return from_gguf(directory);
  const auto path = [&](const char* name) {
    return (std::filesystem::path(directory) / name).string();
  };
  const std::string config_path = path("tokenizer_config.json");
  const bool has_config = std::filesystem::exists(config_path);
  const Json config = has_config ? Json::read_file(config_path, "tokenizer") : Json();
  auto parts = std::make_shared<Parts>();
  const std::string found = file_in(directory),
                    tokens = found.empty() ? path(kTokenizerJson) : found;
  parts->read_bytes(read_whole(tokens, "tokenizer"),
                    with_added_tokens(config, path("added_tokens.json")), tokens);
  if (has_config) parts->read_config(config, config_path);
  if (const std::string file = path("chat_template.jinja"); std::filesystem::exists(file))
    parts->read_template(read_whole(file, "tokenizer"), file);
  for (const char* name : {"generation_config.json", "config.json"}) {
    const std::string file = path(name);
    if (!std::filesystem::exists(file)) continue;
    if (parts->read_eos_ids(Json::read_file(file, "tokenizer"), file)) break;
  }
  Tokenizer t;
  t.parts_ = std::move(parts);
  return t;
}

// ---- which file ----

// tokenizer.json is what others were made into, so it comes first.
std::string Tokenizer::file_in(const std::string& directory) {
  if (is_gguf_path(directory)) return directory;
  for (const char* name :
       {kTokenizerJson, "tekken.json", "tokenizer.model", "tiktoken.model", "qwen.tiktoken"}) {
    const std::string file = (std::filesystem::path(directory) / name).string();
    std::error_code unseen;
    if (std::filesystem::exists(file, unseen)) return file;
  }
  return "";
}

// JSON by its name or its bracket; a protocol buffer by the key of its first field, one of three; else a list of base64.
void Tokenizer::Parts::read_bytes(std::string_view bytes, const Json& config,
                                  const std::string& path) {
  const std::filesystem::path name = std::filesystem::path(path).filename();
  if (name.extension() == ".json" || bytes.starts_with('{')) {
    return name.string().starts_with("tekken") ? read_tekken(bytes, path) : read(bytes, path);
  }
  const bool protobuf =
      bytes.empty() || std::string_view("\n\x12\x1A").find(bytes[0]) != std::string_view::npos;
  protobuf ? read_sentencepiece(bytes, config, path) : read_tiktoken(bytes, config, path);
}

// Tokens that tokenizer_config.json adds to files that know only words: "added_tokens_decoder", by id.
std::vector<AddedToken> added_in_config(const Json& config, const std::string& source) {
  std::vector<AddedToken> out;
  const Json* list = config.find("added_tokens_decoder");
  if (list == nullptr) return out;
  for (const auto& [key, token] : list->object()) {
    const bool is_id =
        !key.empty() && key.size() < 10 && key.find_first_not_of("0123456789") == key.npos;
    if (!is_id)
      refuse(source, "a key of added_tokens_decoder must be an id, got '" + shown(key) + "'");
    out.push_back({std::stoll(key), member(token, "content", source).string(),
                   flag(token, "single_word", false), flag(token, "lstrip", false),
                   flag(token, "rstrip", false), false, flag(token, "special", false)});
  }
  return out;
}

Tokenizer Tokenizer::from_bytes(std::string_view bytes, const std::string& name) {
  auto parts = std::make_shared<Parts>();
  parts->read_bytes(bytes, Json(), name);
  Tokenizer t;
  t.parts_ = std::move(parts);
  return t;
}

Tokenizer Tokenizer::from_file(const std::string& path) {
  return from_bytes(read_whole(path, "tokenizer"), path);
}

}  // namespace mlxtape::formats
