#include "formats/gguf_pre.h"

#include <algorithm>
#include <array>

namespace mlxtape::formats {

namespace {

// The patterns of published tokenizer.json files.
constexpr const char* kLlama3 =
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";
constexpr const char* kQwen2 =
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";
constexpr const char* kQwen35 =
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";
constexpr const char* kGpt2 =
    R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";
constexpr const char* kDigit = R"(\p{N})";
constexpr const char* kTekken =
    R"([^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+)";
constexpr const char* kGpt4o =
    R"([^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+)";
constexpr const char* kDigits3 = R"(\p{N}{1,3})";
constexpr const char* kCjk = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+";
constexpr const char* kDeepseek3 =
    R"([!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";

constexpr const char* kBreak = R"([\r\n])";
constexpr const char* kWord = R"(\s?\p{L}+)";
constexpr const char* kMarks = R"(\s?\p{P}+)";
constexpr const char* kAsian = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+";
constexpr const char* kFalconMarks = R"([\p{P}\$\+<=>\^~\|`]+)";
constexpr const char* kThreeDigits = "[0-9][0-9][0-9]";

// The first name of equal rows is the one that is written.
struct Row {
  const char* name;
  std::array<const char*, 5> patterns;  // the last ones null
  bool ignore_merges = false, add_bos = false;
};
constexpr Row kRows[] = {{"qwen2", {kQwen2}},
                         {"llama-bpe", {kLlama3}, true, true},
                         {"smollm", {kDigit, kGpt2}},
                         {"gpt-2", {kGpt2}},
                         {"qwen35", {kQwen35}},
                         {"tekken", {kTekken}, true, true},
                         {"gpt-4o", {kGpt4o}},
                         {"glm4", {kLlama3}, true},
                         {"dbrx", {kLlama3}},
                         {"deepseek-v3", {kDigits3, kCjk, kDeepseek3}},
                         {"chatglm-bpe", {kLlama3}},
                         {"command-r", {kDigit, kGpt2}},
                         {"deepseek-coder", {kBreak, kWord, kMarks, kAsian, kDigit}},
                         {"deepseek-r1-qwen", {kQwen2}},
                         {"falcon", {kFalconMarks, kGpt2, kThreeDigits}},
                         {"falcon3", {kLlama3}, true, true},
                         {"granite-docling", {kGpt2}},
                         {"hunyuan", {kQwen2}},
                         {"hunyuan-dense", {kDigits3, kCjk, kDeepseek3}},
                         {"joyai-llm", {kDigits3, kCjk, kDeepseek3}},
                         {"lfm2", {kLlama3}, true, true},
                         {"llama-v3", {kLlama3}, true, true},
                         {"llama3", {kLlama3}, true, true},
                         {"llama4", {kGpt4o}},
                         {"megrez", {kQwen2}},
                         {"minimax-m2", {kGpt4o}},
                         {"mpt", {kGpt2}},
                         {"olmo", {kGpt2}},
                         {"pixtral", {kLlama3}, true, true},
                         {"refact", {kDigit, kGpt2}},
                         {"smaug-bpe", {kLlama3}},
                         {"stablelm2", {kQwen2}},
                         {"starcoder", {kDigit, kGpt2}}};

GgufPre pre_of(const Row& row) {
  GgufPre pre;
  for (const char* pattern : row.patterns) {
    if (pattern != nullptr) pre.patterns.push_back(pattern);
  }
  pre.ignore_merges = row.ignore_merges;
  pre.add_bos = row.add_bos;
  return pre;
}

bool truth_in(const Json& json, const char* key, bool otherwise) {
  const Json* found = json.find(key);
  return found != nullptr && found->is_bool() ? found->boolean() : otherwise;
}

std::string text_in(const Json& json, const char* key) {
  const Json* found = json.find(key);
  return found != nullptr && found->is_string() ? found->string() : "";
}

// The patterns of a pre_tokenizer; false where it has anything else.
bool add_patterns(const Json& json, std::vector<std::string>& patterns) {
  const std::string type = text_in(json, "type");
  if (type == "Sequence") {
    const Json* steps = json.find("pretokenizers");
    return steps != nullptr && steps->is_array() &&
           std::all_of(steps->array().begin(), steps->array().end(),
                       [&](const Json& step) { return add_patterns(step, patterns); });
  }
  if (type == "ByteLevel") {
    if (truth_in(json, "add_prefix_space", true)) return false;
    if (truth_in(json, "use_regex", true)) patterns.emplace_back(kGpt2);
    return true;
  }
  if (type == "Digits") {
    patterns.emplace_back(kDigit);
    return truth_in(json, "individual_digits", false);
  }
  const Json* pattern = json.find("pattern");
  const std::string regex = pattern == nullptr ? "" : text_in(*pattern, "Regex");
  const bool plain = type == "Split" && text_in(json, "behavior") == "Isolated" &&
                     !truth_in(json, "invert", false) && !regex.empty();
  if (plain) patterns.push_back(regex);
  return plain;
}

}  // namespace

std::optional<GgufPre> gguf_pre(std::string_view name) {
  for (const Row& row : kRows) {
    if (row.name == name) return pre_of(row);
  }
  return std::nullopt;
}

std::optional<std::string> gguf_pre_name(const Json& pre_tokenizer, bool ignore_merges) {
  std::vector<std::string> patterns;
  if (!add_patterns(pre_tokenizer, patterns)) return std::nullopt;
  for (const Row& row : kRows) {
    const GgufPre pre = pre_of(row);
    if (!std::equal(patterns.begin(), patterns.end(), pre.patterns.begin(), pre.patterns.end())) {
      continue;
    }
    if (row.ignore_merges == ignore_merges) return row.name;
  }
  return std::nullopt;
}

std::string gguf_pre_names() {
  std::string names;
  for (const Row& row : kRows) names += (names.empty() ? "" : ", ") + std::string(row.name);
  return names;
}

Json pre_tokenizer_of(const GgufPre& pre) {
  Json::Array steps;
  for (const char* pattern : pre.patterns) {
    steps.emplace_back(Json::Object{{"type", "Split"},
                                    {"pattern", Json::Object{{"Regex", pattern}}},
                                    {"behavior", "Isolated"},
                                    {"invert", false}});
  }
  steps.emplace_back(Json::Object{{"type", "ByteLevel"},
                                  {"add_prefix_space", false},
                                  {"trim_offsets", false},
                                  {"use_regex", false}});
  return Json::Object{{"type", "Sequence"}, {"pretokenizers", std::move(steps)}};
}

}  // namespace mlxtape::formats
