// tokenizer.json as the keys tokenizer.* of a GGUF file.
#include <algorithm>
#include <filesystem>
#include <limits>
#include <unordered_map>

#include "formats/gguf_pre.h"
#include "mlxtape/base/error.h"
#include "mlxtape/base/files.h"
#include "mlxtape/base/quote.h"
#include "mlxtape/formats/gguf_tokenizer.h"

namespace mlxtape::formats {

namespace {

namespace fs = std::filesystem;
using Type = GgufTokenType;

constexpr std::int64_t kMaxTokens = 1 << 24;

[[noreturn]] void fail(const std::string& path, const std::string& what) {
  throw Error(Errc::kArgument, "gguf: " + path + ": " + what);
}

// What of a tokenizer.json GGUF has a place for.
struct Parts {
  std::string type;
  std::vector<std::pair<std::string, std::int64_t>> vocabulary;
  std::vector<std::pair<std::string, std::string>> merges;
  bool ignore_merges = false, byte_fallback = false;
  Json added = Json::Array{}, normalizer, pre_tokenizer, post_processor;
};

void read_merges(JsonReader& reader, Parts& parts) {
  for (reader.begin_array(); reader.next_element();) {
    std::string left, right;
    if (reader.peek() == JsonReader::Kind::kArray) {
      reader.begin_array();
      if (reader.next_element()) left = reader.string();
      if (reader.next_element()) right = reader.string();
      if (reader.next_element()) reader.fail("a merge must be of two tokens");
    } else {
      const std::string both = reader.string();
      const std::size_t space = both.find(' ');
      left = both.substr(0, space);
      if (space != std::string::npos) right = both.substr(space + 1);
    }
    parts.merges.emplace_back(std::move(left), std::move(right));
  }
}

void read_model(JsonReader& reader, Parts& parts) {
  std::string key;
  for (reader.begin_object(); reader.next_key(key);) {
    const bool is_set = reader.peek() != JsonReader::Kind::kNull;
    if (key == "type" && is_set) {
      parts.type = reader.string();
    } else if (key == "ignore_merges" && is_set) {
      parts.ignore_merges = reader.boolean();
    } else if (key == "byte_fallback" && is_set) {
      parts.byte_fallback = reader.boolean();
    } else if (key == "merges" && is_set) {
      read_merges(reader, parts);
    } else if (key == "vocab" && reader.peek() == JsonReader::Kind::kObject) {
      std::string token;
      for (reader.begin_object(); reader.next_key(token);) {
        parts.vocabulary.emplace_back(token, reader.integer());
      }
    } else {
      reader.skip();
    }
  }
}

Parts read_parts(const std::string& path) {
  const std::string text = read_whole(path, "gguf");
  JsonReader reader(text, "gguf: " + path);
  Parts parts;
  std::string key;
  for (reader.begin_object(); reader.next_key(key);) {
    if (key == "model") {
      read_model(reader, parts);
    } else if (key == "added_tokens") {
      parts.added = Json::read(reader);
    } else if (key == "normalizer") {
      parts.normalizer = Json::read(reader);
    } else if (key == "pre_tokenizer") {
      parts.pre_tokenizer = Json::read(reader);
    } else if (key == "post_processor") {
      parts.post_processor = Json::read(reader);
    } else {
      reader.skip();
    }
  }
  reader.end();
  if (parts.type != "BPE") {
    fail(path, "a tokenizer of type \"" + shown(parts.type) + "\" cannot be written, only BPE");
  }
  return parts;
}

struct Lists {
  std::vector<std::string> tokens;
  std::vector<std::int32_t> types;
  std::unordered_map<std::string, std::size_t> ids;
};

// Ids without a token, which GGUF does not have, get a name that no text holds.
Lists lists_of(const Parts& parts, std::int64_t rows, const std::string& path) {
  std::int64_t count = rows;
  const auto seen = [&](std::int64_t id) {
    if (id < 0 || id >= kMaxTokens)
      fail(path, "an id must be from 0 to 16777215, got " + std::to_string(id));
    count = std::max(count, id + 1);
  };
  for (const auto& [token, id] : parts.vocabulary) seen(id);
  if (!parts.added.is_array()) fail(path, "added_tokens must be a list");
  for (const Json& token : parts.added.array()) {
    const Json* id = token.find("id");
    if (id == nullptr || !id->is_integer()) fail(path, "an added token must have an id");
    seen(id->integer());
  }
  if (count > rows) {
    fail(path, "it must have no more tokens than the model has rows of embeddings, " +
                   std::to_string(rows) + ", got " + std::to_string(count));
  }
  Lists lists;
  lists.tokens.resize(static_cast<std::size_t>(count));
  lists.types.assign(lists.tokens.size(), static_cast<std::int32_t>(Type::kUnused));
  const auto set = [&](const std::string& token, std::int64_t id, Type type) {
    lists.tokens[static_cast<std::size_t>(id)] = token;
    lists.types[static_cast<std::size_t>(id)] = static_cast<std::int32_t>(type);
    lists.ids[token] = static_cast<std::size_t>(id);
  };
  for (const auto& [token, id] : parts.vocabulary) {
    const bool is_byte = parts.byte_fallback && token.size() == 6 && token.starts_with("<0x");
    set(token, id, is_byte ? Type::kByte : Type::kNormal);
  }
  for (const Json& token : parts.added.array()) {
    const Json *text = token.find("content"), *special = token.find("special");
    if (text == nullptr) fail(path, "an added token must have a content");
    const bool is_special = special != nullptr && special->boolean();
    set(text->string(), token.find("id")->integer(),
        is_special ? Type::kControl : Type::kUserDefined);
  }
  for (std::size_t id = 0; id < lists.tokens.size(); ++id) {
    if (lists.types[id] == static_cast<std::int32_t>(Type::kUnused)) {
      lists.tokens[id] = "[PAD" + std::to_string(id) + "]";
    }
  }
  return lists;
}

// SentencePiece merges the pair whose token has the highest score: the sooner a merge, the higher.
std::vector<float> scores_of(const Parts& parts, const Lists& lists) {
  std::vector<float> scores(lists.tokens.size(), 0);
  std::vector<bool> is_set(lists.tokens.size());
  float score = -1;
  for (const auto& [left, right] : parts.merges) {
    const auto found = lists.ids.find(left + right);
    if (found == lists.ids.end() || is_set[found->second]) continue;
    is_set[found->second] = true;
    scores[found->second] = score;
    score -= 1;
  }
  for (std::size_t id = 0; id < scores.size(); ++id) {
    if (!is_set[id] && lists.types[id] == static_cast<std::int32_t>(Type::kNormal))
      scores[id] = score;
  }
  return scores;
}

bool has_step(const Json& json, const char* type, const char* list) {
  const Json* name = json.find("type");
  if (name == nullptr) return false;
  if (*name == Json(type)) return true;
  const Json* steps = json.find(list);
  return steps != nullptr && steps->is_array() &&
         std::any_of(steps->array().begin(), steps->array().end(),
                     [&](const Json& step) { return has_step(step, type, list); });
}

// Does the post-processor put a special token before, or behind, the text?
std::pair<bool, bool> around(const Json& json) {
  std::pair<bool, bool> result;
  if (const Json* steps = json.find("processors"); steps != nullptr && steps->is_array()) {
    for (const Json& step : steps->array()) {
      const auto [before, behind] = around(step);
      result = {result.first || before, result.second || behind};
    }
  }
  const Json* single = json.find("single");
  if (single == nullptr || !single->is_array()) return result;
  bool passed = false;
  for (const Json& part : single->array()) {
    if (part.find("Sequence") != nullptr) {
      passed = true;
    } else {
      (passed ? result.second : result.first) = true;
    }
  }
  return result;
}

std::string text_of(const Json* json) {
  if (json == nullptr) return "";
  if (const Json* content = json->find("content")) json = content;
  return json->is_string() ? json->string() : "";
}

void add_kind(const Parts& parts, const Lists& lists, const std::string& path,
              std::vector<GgufKey>& keys) {
  if (parts.byte_fallback) {
    keys.push_back({"tokenizer.ggml.model", std::string("llama")});
    keys.push_back({"tokenizer.ggml.pre", std::string("default")});
    keys.push_back({"tokenizer.ggml.scores", scores_of(parts, lists)});
    const bool prefix = has_step(parts.normalizer, "Prepend", "normalizers") ||
                        has_step(parts.pre_tokenizer, "Metaspace", "pretokenizers");
    keys.push_back({"tokenizer.ggml.add_space_prefix", prefix});
    return;
  }
  const auto pre = gguf_pre_name(parts.pre_tokenizer, parts.ignore_merges);
  if (!pre) {
    fail(path, "its pre_tokenizer is none that GGUF has a name for; those of " + gguf_pre_names() +
                   " are");
  }
  std::vector<std::string> merges;
  for (const auto& [left, right] : parts.merges) merges.push_back(left + " " + right);
  keys.push_back({"tokenizer.ggml.model", std::string("gpt2")});
  keys.push_back({"tokenizer.ggml.pre", *pre});
  keys.push_back({"tokenizer.ggml.merges", std::move(merges)});
}

void add_template(const std::string& folder, const Json& config, std::vector<GgufKey>& keys) {
  const std::string jinja = (fs::path(folder) / "chat_template.jinja").string();
  std::error_code reason;
  std::string text;
  if (fs::exists(jinja, reason)) {
    text = read_whole(jinja, "gguf");
  } else if (const Json* chat = config.find("chat_template")) {
    text = text_of(chat);
    for (const Json& named : chat->is_array() ? chat->array() : Json::Array{}) {
      if (text_of(named.find("name")) == "default") text = text_of(named.find("template"));
    }
  }
  if (!text.empty()) keys.push_back({"tokenizer.chat_template", text});
}

// Of a GGUF file: its own, whatever they are.
std::vector<GgufKey> keys_of_gguf(const std::string& path) {
  const GgufFile file(path);
  const std::optional<GgufTokenizer> t = read_gguf_tokenizer(file);
  if (!t) return {};
  const auto texts = [](const std::vector<std::string_view>& views) {
    return std::vector<std::string>(views.begin(), views.end());
  };
  std::vector<GgufKey> keys{{"tokenizer.ggml.model", std::string(t->model)},
                            {"tokenizer.ggml.pre", std::string(t->pre)},
                            {"tokenizer.ggml.tokens", texts(t->tokens)}};
  if (!t->types.empty()) keys.push_back({"tokenizer.ggml.token_type", t->types});
  if (!t->scores.empty()) keys.push_back({"tokenizer.ggml.scores", t->scores});
  if (!t->merges.empty()) keys.push_back({"tokenizer.ggml.merges", texts(t->merges)});
  for (const auto& [name, id] :
       {std::pair("bos", t->bos), std::pair("eos", t->eos), std::pair("eot", t->eot),
        std::pair("eom", t->eom), std::pair("unknown", t->unknown),
        std::pair("padding", t->padding)}) {
    if (id) {
      keys.push_back(
          {std::string("tokenizer.ggml.") + name + "_token_id", static_cast<std::uint32_t>(*id)});
    }
  }
  for (const auto& [name, flag] :
       {std::pair("add_bos_token", t->add_bos), std::pair("add_eos_token", t->add_eos),
        std::pair("add_space_prefix", t->add_space_prefix)}) {
    if (flag) keys.push_back({std::string("tokenizer.ggml.") + name, *flag});
  }
  if (!t->chat_template.empty()) {
    keys.push_back({"tokenizer.chat_template", std::string(t->chat_template)});
  }
  return keys;
}

}  // namespace

std::vector<GgufKey> gguf_tokenizer_keys(const std::string& folder, std::int64_t rows) {
  if (is_gguf_path(folder)) return keys_of_gguf(folder);
  const std::string path = (fs::path(folder) / "tokenizer.json").string();
  const std::string config_path = (fs::path(folder) / "tokenizer_config.json").string();
  std::error_code reason;
  if (!fs::exists(path, reason)) return {};
  const Parts parts = read_parts(path);
  const Lists lists = lists_of(parts, rows, path);
  Json config = Json::Object{};
  if (fs::exists(config_path, reason)) config = Json::read_file(config_path, "gguf");
  std::vector<GgufKey> keys;
  add_kind(parts, lists, path, keys);
  keys.push_back({"tokenizer.ggml.tokens", lists.tokens});
  keys.push_back({"tokenizer.ggml.token_type", lists.types});
  for (const auto& [name, key] :
       {std::pair("bos_token", "bos_token_id"), std::pair("eos_token", "eos_token_id"),
        std::pair("unk_token", "unknown_token_id"), std::pair("pad_token", "padding_token_id")}) {
    const auto found = lists.ids.find(text_of(config.find(name)));
    if (found == lists.ids.end()) continue;
    keys.push_back(
        {std::string("tokenizer.ggml.") + key, static_cast<std::uint32_t>(found->second)});
  }
  const auto [before, behind] = around(parts.post_processor);
  keys.push_back({"tokenizer.ggml.add_bos_token", before});
  keys.push_back({"tokenizer.ggml.add_eos_token", behind});
  add_template(folder, config, keys);
  return keys;
}

}  // namespace mlxtape::formats
