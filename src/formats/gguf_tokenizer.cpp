#include "mlxtape/formats/gguf_tokenizer.h"

#include <algorithm>
#include <cmath>

#include "formats/gguf_pre.h"
#include "formats/tokenizer_scores.h"
#include "formats/tokenizer_vocabulary.h"
#include "formats/utf8.h"
#include "mlxtape/base/error.h"
#include "mlxtape/base/quote.h"

namespace mlxtape::formats {

namespace {

constexpr const char* kPrefix = "tokenizer.ggml.";
constexpr const char* kSpace = "\u2581";  // SentencePiece's

std::string key_of(const char* name) { return std::string(kPrefix) + name; }

// ---- reading ----

void read_lists(const GgufFile& file, GgufTokenizer& t) {
  const std::size_t count = t.tokens.size();
  if (count > static_cast<std::size_t>(Vocabulary::kMaxIds)) {
    file.fail("it must have at most " + std::to_string(Vocabulary::kMaxIds) + " tokens, got " +
              std::to_string(count));
  }
  for (std::size_t i = 0; i < count; ++i) {
    if (is_valid_utf8(t.tokens[i])) continue;
    file.fail("token " + std::to_string(i) + " must be UTF-8, got \"" + shown(t.tokens[i]) + "\"");
  }
  const auto expect_count = [&](const char* name, std::size_t got) {
    if (got == count) return;
    file.fail("key \"" + key_of(name) + "\" must have a value for each of the " +
              std::to_string(count) + " tokens, got " + std::to_string(got));
  };
  if (const auto types = file.wholes(key_of("token_type"))) {
    expect_count("token_type", types->size());
    for (const std::int64_t type : *types) {
      if (type < 1 || type > 6) {
        file.fail("key \"" + key_of("token_type") + "\" must have types from 1 to 6, got " +
                  std::to_string(type));
      }
      t.types.push_back(static_cast<std::int32_t>(type));
    }
  }
  if (const auto scores = file.numbers(key_of("scores"))) {
    expect_count("scores", scores->size());
    for (const double score : *scores) {
      if (!std::isfinite(score))
        file.fail("key \"" + key_of("scores") + "\" must have finite numbers");
      t.scores.push_back(static_cast<float>(score));
    }
  }
}

std::optional<TokenId> read_id(const GgufFile& file, const char* name, std::size_t tokens) {
  const std::optional<std::int64_t> id = file.whole(key_of(name));
  // Converters write 4294967295 for "none".
  if (!id || *id == -1 || *id == 0xFFFFFFFFLL) return std::nullopt;
  if (*id < 0 || static_cast<std::size_t>(*id) >= tokens) {
    file.fail("key \"" + key_of(name) + "\" must be the id of one of " + std::to_string(tokens) +
              " tokens, got " + std::to_string(*id));
  }
  return static_cast<TokenId>(*id);
}

// ---- as tokenizer.json ----

GgufTokenType type_of(const GgufTokenizer& t, std::size_t id) {
  return t.types.empty() ? GgufTokenType::kNormal : static_cast<GgufTokenType>(t.types[id]);
}

Json added_tokens(const GgufTokenizer& t) {
  Json::Array added;
  for (std::size_t id = 0; id < t.tokens.size(); ++id) {
    const GgufTokenType type = type_of(t, id);
    const bool special = type == GgufTokenType::kControl || type == GgufTokenType::kUnknown;
    if (!special && type != GgufTokenType::kUserDefined) continue;
    added.emplace_back(Json::Object{{"id", static_cast<std::int64_t>(id)},
                                    {"content", std::string(t.tokens[id])},
                                    {"single_word", false},
                                    {"lstrip", false},
                                    {"rstrip", false},
                                    {"normalized", false},
                                    {"special", special}});
  }
  return added;
}

Json vocabulary_of(const GgufTokenizer& t) {
  Json::Object vocabulary;
  vocabulary.reserve(t.tokens.size());
  for (std::size_t id = 0; id < t.tokens.size(); ++id) {
    vocabulary.emplace_back(std::string(t.tokens[id]), static_cast<std::int64_t>(id));
  }
  return vocabulary;
}

// What is put around a text.
Json post_processor_of(const GgufTokenizer& t, bool bos, bool eos) {
  Json::Array single;
  Json tokens = Json::Object{};
  const auto add = [&](TokenId id) {
    const std::string text(t.tokens[static_cast<std::size_t>(id)]);
    single.emplace_back(Json::Object{{"SpecialToken", Json::Object{{"id", text}, {"type_id", 0}}}});
    tokens.set(
        text,
        Json::Object{{"id", text}, {"ids", Json::Array{id}}, {"tokens", Json::Array{Json(text)}}});
  };
  if (bos && t.bos) add(*t.bos);
  single.emplace_back(Json::Object{{"Sequence", Json::Object{{"id", "A"}, {"type_id", 0}}}});
  if (eos && t.eos) add(*t.eos);
  return Json::Object{{"type", "TemplateProcessing"},
                      {"single", std::move(single)},
                      {"pair", Json::Array{}},
                      {"special_tokens", std::move(tokens)}};
}

struct Steps {
  Json model, normalizer, pre_tokenizer, decoder;
  bool add_bos = false;
};

Steps byte_level(const GgufTokenizer& t, const std::string& source) {
  const std::optional<GgufPre> pre = gguf_pre(t.pre);
  if (!pre) {
    throw Error(Errc::kIo, source + ": tokenizer.ggml.pre \"" + shown(t.pre) +
                               "\" is not supported, only " + gguf_pre_names());
  }
  Json::Array merges;
  merges.reserve(t.merges.size());
  for (const std::string_view merge : t.merges) merges.emplace_back(merge);
  Steps steps;
  steps.model = Json::Object{{"type", "BPE"},
                             {"byte_fallback", false},
                             {"ignore_merges", pre->ignore_merges},
                             {"vocab", vocabulary_of(t)},
                             {"merges", std::move(merges)}};
  steps.pre_tokenizer = pre_tokenizer_of(*pre);
  steps.decoder = Json::Object{{"type", "ByteLevel"}};
  steps.add_bos = pre->add_bos;
  return steps;
}

void expect_bytes(const GgufTokenizer& t, const std::string& source) {
  const auto is_hex = [](char c) {
    return (c >= '0' && c <= '9') || (c >= 'A' && c <= 'F') || (c >= 'a' && c <= 'f');
  };
  for (std::size_t id = 0; id < t.tokens.size(); ++id) {
    const std::string_view token = t.tokens[id];
    if (type_of(t, id) != GgufTokenType::kByte) continue;
    const bool right = token.size() == 6 && token.starts_with("<0x") && token.back() == '>' &&
                       is_hex(token[3]) && is_hex(token[4]);
    if (right) continue;
    throw Error(Errc::kIo, source + ": a token of a byte must be <0x00> to <0xFF>, got \"" +
                               shown(token) + "\"");
  }
}

Json::Array merges_of_scores(const GgufTokenizer& t, const std::string& source) {
  Vocabulary vocabulary;
  std::vector<std::uint8_t> joins(t.tokens.size());
  for (std::size_t id = 0; id < t.tokens.size(); ++id) {
    const std::string fault = vocabulary.add(t.tokens[id], static_cast<std::int64_t>(id));
    if (!fault.empty()) throw Error(Errc::kIo, source + ": " + fault);
    const GgufTokenType type = type_of(t, id);
    joins[id] = type == GgufTokenType::kNormal || type == GgufTokenType::kUserDefined ||
                type == GgufTokenType::kUnused;
  }
  Json::Array merges;
  for (const ScoredMerge& merge : merges_by_score(vocabulary, t.scores, joins)) {
    merges.emplace_back(Json::Array{Json(t.tokens[static_cast<std::size_t>(merge.left)]),
                                    Json(t.tokens[static_cast<std::size_t>(merge.right)])});
  }
  return merges;
}

Steps sentence_piece(const GgufTokenizer& t, const std::string& source) {
  if (t.scores.empty()) {
    throw Error(Errc::kIo, source + ": a tokenizer of kind llama must have tokenizer.ggml.scores");
  }
  expect_bytes(t, source);
  const bool prefix = t.add_space_prefix.value_or(true);
  const auto replace = [](const char* from, const char* to) {
    return Json(Json::Object{
        {"type", "Replace"}, {"pattern", Json::Object{{"String", from}}}, {"content", to}});
  };
  Json::Array normalizers, decoders{replace(kSpace, " "), Json::Object{{"type", "ByteFallback"}},
                                    Json::Object{{"type", "Fuse"}}};
  if (prefix) {
    normalizers.emplace_back(Json::Object{{"type", "Prepend"}, {"prepend", kSpace}});
    decoders.emplace_back(
        Json::Object{{"type", "Strip"}, {"content", " "}, {"start", 1}, {"stop", 0}});
  }
  normalizers.push_back(replace(" ", kSpace));
  const Json unknown = t.unknown ? Json(t.tokens[static_cast<std::size_t>(*t.unknown)]) : Json();
  Steps steps;
  steps.model = Json::Object{{"type", "BPE"},
                             {"unk_token", unknown},
                             {"fuse_unk", true},
                             {"byte_fallback", true},
                             {"vocab", vocabulary_of(t)},
                             {"merges", merges_of_scores(t, source)}};
  steps.normalizer = Json::Object{{"type", "Sequence"}, {"normalizers", std::move(normalizers)}};
  steps.decoder = Json::Object{{"type", "Sequence"}, {"decoders", std::move(decoders)}};
  steps.add_bos = true;
  return steps;
}

}  // namespace

std::optional<GgufTokenizer> read_gguf_tokenizer(const GgufFile& file) {
  GgufTokenizer t;
  t.model = file.text(key_of("model")).value_or("");
  auto tokens = file.texts(key_of("tokens"));
  if (t.model.empty() || t.model == "none" || !tokens) return std::nullopt;
  t.pre = file.text(key_of("pre")).value_or("");
  t.tokens = std::move(*tokens);
  t.merges = file.texts(key_of("merges")).value_or(std::vector<std::string_view>{});
  for (const std::string_view merge : t.merges) {
    if (!is_valid_utf8(merge)) file.fail("a merge must be UTF-8, got \"" + shown(merge) + "\"");
  }
  read_lists(file, t);
  const auto id = [&](const char* name) {
    return read_id(file, name, t.tokens.size());
  };
  t.bos = id("bos_token_id");
  t.eos = id("eos_token_id");
  t.eot = id("eot_token_id");
  t.eom = id("eom_token_id");
  t.unknown = id("unknown_token_id");
  t.padding = id("padding_token_id");
  t.add_bos = file.truth(key_of("add_bos_token"));
  t.add_eos = file.truth(key_of("add_eos_token"));
  t.add_space_prefix = file.truth(key_of("add_space_prefix"));
  t.chat_template = file.text("tokenizer.chat_template").value_or("");
  t.tokenizer_json = file.text("tokenizer.huggingface.json").value_or("");
  return t;
}

TokenizerFiles tokenizer_files(const GgufTokenizer& t, const std::string& source) {
  TokenizerFiles files;
  if (!t.tokenizer_json.empty()) {
    files.tokenizer_json = t.tokenizer_json;
  } else {
    Steps steps;
    if (t.model == "gpt2") {
      steps = byte_level(t, source);
    } else if (t.model == "llama") {
      steps = sentence_piece(t, source);
    } else {
      throw Error(Errc::kIo, source + ": tokenizers of kind \"" + shown(t.model) +
                                 "\" are not supported, only gpt2 and llama");
    }
    const bool bos = t.add_bos.value_or(steps.add_bos), eos = t.add_eos.value_or(false);
    files.tokenizer_json = Json(Json::Object{{"version", "1.0"},
                                             {"truncation", Json()},
                                             {"padding", Json()},
                                             {"added_tokens", added_tokens(t)},
                                             {"normalizer", std::move(steps.normalizer)},
                                             {"pre_tokenizer", std::move(steps.pre_tokenizer)},
                                             {"post_processor", post_processor_of(t, bos, eos)},
                                             {"decoder", std::move(steps.decoder)},
                                             {"model", std::move(steps.model)}})
                               .dump(2);
  }
  Json config = Json::Object{{"tokenizer_class", "PreTrainedTokenizerFast"},
                             {"clean_up_tokenization_spaces", false}};
  for (const auto& [name, id] :
       {std::pair("bos_token", t.bos), std::pair("eos_token", t.eos),
        std::pair("pad_token", t.padding), std::pair("unk_token", t.unknown)}) {
    if (id) config.set(name, t.tokens[static_cast<std::size_t>(*id)]);
  }
  if (!t.chat_template.empty()) config.set("chat_template", t.chat_template);
  files.tokenizer_config = std::move(config);
  for (const std::optional<TokenId>& end : {t.eos, t.eot, t.eom}) {
    if (end && std::count(files.eos.begin(), files.eos.end(), *end) == 0) files.eos.push_back(*end);
  }
  return files;
}

Tokenizer Tokenizer::from_gguf(const std::string& path) {
  const GgufFile file(path);
  const std::optional<GgufTokenizer> tokenizer = read_gguf_tokenizer(file);
  if (!tokenizer) file.fail("it must have a tokenizer (tokenizer.ggml.model and .tokens)");
  TokenizerFiles files = tokenizer_files(*tokenizer, "gguf: " + path);
  return from_texts(files.tokenizer_json, files.tokenizer_config, std::move(files.eos),
                    "gguf: " + path + ": tokenizer");
}

}  // namespace mlxtape::formats
