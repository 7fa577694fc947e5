// tokenizer.json.
#include <utility>

#include "formats/tokenizer_json.h"
#include "formats/tokenizer_parts.h"

namespace mlxtape::formats {

void Tokenizer::Parts::read(std::string_view json, const std::string& source) {
  JsonReader reader(json, source);
  std::string key;
  Json added(Json::Array{}), normalizer, splits, post_processor, decodes;
  vocabulary.reserve(json.size() / 64, json.size() / 16);
  for (reader.begin_object(); reader.next_key(key);) {
    if (key == "model") {
      if (model != nullptr) reader.fail("there must be one model, got two");
      model = read_model(reader, vocabulary);
    } else if (key == "added_tokens") {
      added = Json::read(reader);
    } else if (key == "normalizer") {
      normalizer = Json::read(reader);
    } else if (key == "pre_tokenizer") {
      splits = Json::read(reader);
    } else if (key == "post_processor") {
      post_processor = Json::read(reader);
    } else if (key == "decoder") {
      decodes = Json::read(reader);
    } else {
      reader.skip();  // version, truncation, padding
    }
  }
  reader.end();
  if (model == nullptr) reader.fail("there must be a model");
  normalizers = read_normalizers(normalizer, source);
  pre_tokenizer = read_pre_tokenizer(splits, model->takes_bytes(), source);
  decoder = read_decoder(decodes, source);
  add_tokens(read_added_tokens(added, source), source);
  read_post_processor(post_processor, source);
  prepare();
}

void Tokenizer::Parts::add_tokens(const std::vector<AddedToken>& tokens,
                                  const std::string& source) {
  for (const AddedToken& token : tokens) {
    if (token.id < 0 || token.id >= Vocabulary::kMaxIds)
      refuse(source, "an added token's id must be at least 0 and less than " +
                         std::to_string(Vocabulary::kMaxIds) + ", got " + std::to_string(token.id) +
                         " for '" + shown(token.content) + "'");
    const TokenId known = vocabulary.find(token.content);
    if (known < 0) {
      const std::string problem = vocabulary.add(token.content, token.id);
      if (!problem.empty()) refuse(source, problem);
    } else if (known != token.id) {
      refuse(source, "an added token must have the id that it has in the vocabulary, " +
                         std::to_string(known) + ", got " + std::to_string(token.id) + " for '" +
                         shown(token.content) + "'");
    }
    if (token.normalized) {
      normalized.add(token, normalize(normalizers, token.content));
    } else {
      raw.add(token, token.content);
    }
    special.resize(static_cast<std::size_t>(vocabulary.size()));
    if (token.special) special[static_cast<std::size_t>(token.id)] = true;
  }
}

void Tokenizer::Parts::prepare() {
  special.resize(static_cast<std::size_t>(vocabulary.size()));
  raw.prepare();
  normalized.prepare();
  model->prepare(pre_tokenizer.byte_level);
}

TokenId Tokenizer::Parts::id_of_token(std::int64_t id, const char* what,
                                      const std::string& source) const {
  if (id < 0 || id >= vocabulary.size() || !vocabulary.has(static_cast<TokenId>(id)))
    refuse(source,
           std::string(what) + ": an id must be that of a token, got " + std::to_string(id));
  return static_cast<TokenId>(id);
}

void Tokenizer::Parts::read_post_processor(const Json& json, const std::string& source) {
  if (json.is_null()) return;
  const Json* kind = json.find("type");
  if (kind == nullptr) refuse(source, "a post-processor must have a type");
  const std::string& type = kind->string();
  if (type == "ByteLevel") return;  // moves offsets only
  if (type == "Sequence") {
    for (const Json& step : member(json, "processors", source).array())
      read_post_processor(step, source);
  } else if (type == "TemplateProcessing") {
    read_around(json, source);
  } else if (type == "BertProcessing" || type == "RobertaProcessing") {  // ["text", id]
    for (const char* key : {"cls", "sep"}) {
      const Json::Array& pair = member(json, key, source).array();
      if (pair.size() != 2) refuse(source, type + ": '" + key + "' must be a token and its id");
      const TokenId id = id_of_token(pair[1].integer(), type.c_str(), source);
      *key == 'c' ? void(prefix.insert(prefix.begin(), id)) : suffix.push_back(id);
    }
  } else {
    refuse(source, "the post-processor '" + shown(type) + "' is not supported");
  }
}

// TemplateProcessing: "single" lists special tokens around the Sequence A; "special_tokens" says which ids they are.
void Tokenizer::Parts::read_around(const Json& json, const std::string& source) {
  const Json *single = json.find("single"), *tokens = json.find("special_tokens");
  if (single == nullptr || tokens == nullptr)
    refuse(source, "TemplateProcessing must have 'single' and 'special_tokens'");
  std::vector<TokenId> before, after;
  bool passed = false;
  for (const Json& part : single->array()) {
    if (part.find("Sequence") != nullptr) {
      if (std::exchange(passed, true))
        refuse(source, "TemplateProcessing: 'single' must have one Sequence, got two");
      continue;
    }
    const Json* name = part.find("SpecialToken");
    const Json* id = name != nullptr ? name->find("id") : nullptr;
    const Json* entry = id != nullptr ? tokens->find(id->string()) : nullptr;
    const Json* ids = entry != nullptr ? entry->find("ids") : nullptr;
    if (ids == nullptr)
      refuse(source,
             "TemplateProcessing: a part must be a Sequence or a token of 'special_tokens', got " +
                 shown(part.dump()));
    for (const Json& i : ids->array())
      (passed ? after : before).push_back(id_of_token(i.integer(), "TemplateProcessing", source));
  }
  if (!passed) refuse(source, "TemplateProcessing: 'single' must have a Sequence");
  prefix.insert(prefix.begin(), before.begin(), before.end());
  suffix.insert(suffix.end(), after.begin(), after.end());
}

Tokenizer Tokenizer::from_json(std::string_view json, const std::string& source) {
  auto parts = std::make_shared<Parts>();
  parts->read(json, source);
  Tokenizer t;
  t.parts_ = std::move(parts);
  return t;
}

}  // namespace mlxtape::formats
