// Samples from files.
#include "mlxtape/jobs/dataset.h"

#include <algorithm>
#include <filesystem>

#include "mlxtape/base/files.h"

namespace mlxtape::jobs {

namespace {

using formats::Json;
using formats::TokenId;
using formats::Tokenizer;

[[noreturn]] void fail(const std::string& where, const std::string& what) {
  throw Error(Errc::kIo, where + ": " + what);
}

const char* kind_of(const Json& value) {
  if (value.is_null()) return "null";
  if (value.is_bool()) return "a bool";
  if (value.is_number()) return "a number";
  if (value.is_string()) return "a string";
  return value.is_array() ? "an array" : "an object";
}

const std::string& text_of(const Json& value, const char* key, const std::string& where) {
  if (!value.is_string()) {
    fail(where, std::string("\"") + key + "\" must be a string, got " + kind_of(value));
  }
  return value.string();
}

// Lines to samples; where names file and line.
class Reader {
 public:
  Reader(const Tokenizer& tokenizer, const DataOptions& options)
      : tokenizer_(tokenizer), options_(options) {
    if (!tokenizer.eos_token().empty()) end_ = tokenizer.id_of(tokenizer.eos_token());
    if (!end_ && !tokenizer.eos_ids().empty()) end_ = tokenizer.eos_ids().front();
    thinks_ = tokenizer.id_of("<think>").has_value() && tokenizer.id_of("</think>").has_value();
  }

  Sample read(const Json& line, const std::string& where) const {
    const Json* prompt = line.find("prompt");
    const Json* completion = line.find("completion");
    const Json* messages = line.find("messages");
    const Json* text = line.find("text");
    Sample sample;
    if (prompt != nullptr && completion != nullptr) {
      sample = pair(text_of(*prompt, "prompt", where), text_of(*completion, "completion", where),
                    line, where);
    } else if (messages != nullptr) {
      sample = chat(*messages, line, where);
    } else if (text != nullptr) {
      sample.tokens = tokenizer_.encode(text_of(*text, "text", where));
      add_end(sample.tokens);
    } else {
      fail(where,
           std::string("a line must be an object with \"messages\", \"prompt\" and \"completion\", "
                       "or \"text\", got ") +
               (line.is_object() ? "one without" : kind_of(line)));
    }
    if (sample.tokens.size() < 2) {
      fail(where,
           "a sample must have at least 2 tokens, got " + std::to_string(sample.tokens.size()));
    }
    cut(sample);
    return sample;
  }

  // A text in pieces; one token alone at the end has nothing to predict.
  std::vector<Sample> pieces(std::string_view text) const {
    const std::vector<TokenId> tokens = tokenizer_.encode(text);
    const auto most = static_cast<std::size_t>(options_.max_tokens);
    std::vector<Sample> samples;
    for (std::size_t at = 0; at + 1 < tokens.size(); at += most) {
      const std::size_t end = std::min(at + most, tokens.size());
      samples.push_back({{tokens.begin() + static_cast<std::ptrdiff_t>(at),
                          tokens.begin() + static_cast<std::ptrdiff_t>(end)}});
    }
    return samples;
  }

 private:
  void add_end(std::vector<TokenId>& tokens) const {
    if (end_ && (tokens.empty() || tokens.back() != *end_)) tokens.push_back(*end_);
  }

  void cut(Sample& sample) const {
    const auto most = static_cast<std::size_t>(options_.max_tokens);
    if (sample.tokens.size() > most) sample.tokens.resize(most);
    sample.tokens.shrink_to_fit();  // an encoder takes room for more tokens than a text mostly has
    sample.prompt = std::min(sample.prompt, static_cast<std::int64_t>(sample.tokens.size()));
  }

  std::vector<TokenId> by_template(const Json& messages, const Json& line, bool begin_answer,
                                   const std::string& where) const {
    formats::ChatOptions options;
    options.add_generation_prompt = begin_answer;
    if (const Json* tools = line.find("tools")) options.tools = *tools;
    options.variables = Json::Object{{"enable_thinking", Json(thinks_)}};
    try {
      return tokenizer_.encode_chat(messages, options);
    } catch (const Error& e) {
      fail(where, e.what());
    }
  }

  Sample pair(const std::string& prompt, const std::string& completion, const Json& line,
              const std::string& where) const {
    Sample sample;
    if (tokenizer_.chat_template() != nullptr) {
      const auto message = [](const char* role, const std::string& content) {
        return Json(Json::Object{{"role", Json(role)}, {"content", Json(content)}});
      };
      return chat(Json(Json::Array{message("user", prompt), message("assistant", completion)}),
                  line, where);
    }
    sample.tokens = tokenizer_.encode(prompt);
    sample.prompt = options_.prompts ? static_cast<std::int64_t>(sample.tokens.size()) : 0;
    const std::vector<TokenId> answer = tokenizer_.encode(completion, false);
    sample.tokens.insert(sample.tokens.end(), answer.begin(), answer.end());
    add_end(sample.tokens);
    return sample;
  }

  Sample chat(const Json& messages, const Json& line, const std::string& where) const {
    if (!messages.is_array() || messages.array().empty()) {
      fail(where, std::string("\"messages\" must be an array of at least one message, got ") +
                      (messages.is_array() ? "an empty one" : kind_of(messages)));
    }
    for (const Json& message : messages.array()) {
      const Json* role = message.find("role");
      if (role == nullptr || !role->is_string()) {
        fail(where, "each of \"messages\" must be an object with a \"role\", got one without");
      }
    }
    Sample sample;
    sample.tokens = by_template(messages, line, false, where);
    if (!options_.prompts || messages.array().size() == 1) return sample;
    Json before = messages;
    const bool answered = messages.array().back().find("role")->string() == "assistant";
    before.array().pop_back();
    const std::vector<TokenId> given = by_template(before, line, answered, where);
    const auto [end, unused] =
        std::mismatch(sample.tokens.begin(), sample.tokens.end(), given.begin(), given.end());
    sample.prompt = end - sample.tokens.begin();
    return sample;
  }

  const Tokenizer& tokenizer_;
  const DataOptions& options_;
  std::optional<TokenId> end_;
  bool thinks_ = false;
};

// folder/name.jsonl or folder/name.txt; "" where neither is.
std::string file_of(const std::string& folder, const std::string& name) {
  const auto path = std::filesystem::path(folder);
  const std::string lines = (path / (name + ".jsonl")).string();
  const std::string text = (path / (name + ".txt")).string();
  std::error_code none;
  const bool has_lines = std::filesystem::exists(lines, none);
  const bool has_text = std::filesystem::exists(text, none);
  if (has_lines && has_text) {
    fail(folder, "must contain either " + name + ".jsonl or " + name + ".txt, got both");
  }
  if (has_lines) return lines;
  return has_text ? text : "";
}

std::vector<Sample> read_some(const std::string& file, const Tokenizer& tokenizer,
                              const DataOptions& options) {
  std::vector<Sample> samples = read_samples(file, tokenizer, options);
  if (samples.empty()) {
    fail(file, "must contain samples, got an empty file; add some, or delete it");
  }
  return samples;
}

}  // namespace

std::vector<Sample> read_samples(const std::string& file, const Tokenizer& tokenizer,
                                 const DataOptions& options) {
  if (options.max_tokens < 2) {
    throw Error(Errc::kArgument,
                "data: max_tokens must be at least 2, got " + std::to_string(options.max_tokens));
  }
  const Reader reader(tokenizer, options);
  const bool is_text = file.ends_with(".txt");
  if (!is_text && !file.ends_with(".jsonl")) {
    fail(file, "must be a .jsonl or .txt file, or a folder with such files");
  }
  constexpr std::string_view kByteOrderMark = "\xEF\xBB\xBF";
  if (is_text) {
    constexpr std::size_t kMaxText = std::size_t{1} << 30U;  // what a tokenizer takes
    const std::string bytes = read_whole(file, "data", kMaxText);
    std::string_view text = bytes;
    if (text.starts_with(kByteOrderMark)) text.remove_prefix(kByteOrderMark.size());
    return reader.pieces(text);
  }
  std::vector<Sample> samples;
  FileLines lines(file, "data");
  for (std::string bytes; lines.next(bytes);) {
    std::string_view line = bytes;
    if (lines.number() == 1 && line.starts_with(kByteOrderMark))
      line.remove_prefix(kByteOrderMark.size());
    if (line.find_first_not_of(" \t\r") == std::string_view::npos) continue;
    const std::string where = file + ": line " + std::to_string(lines.number());
    samples.push_back(reader.read(Json::parse(line, where + " is not JSON"), where));
  }
  return samples;
}

DataSet read_data(const std::string& path, const Tokenizer& tokenizer, const DataOptions& options) {
  std::error_code none;
  if (!std::filesystem::exists(path, none)) fail(path, "no such file or folder");
  if (!std::filesystem::is_directory(path, none)) {
    return {read_some(path, tokenizer, options), {}, {}};
  }
  const std::string train = file_of(path, "train"), valid = file_of(path, "valid"),
                    test = file_of(path, "test");
  if (train.empty() && valid.empty() && test.empty()) {
    fail(path, "must contain train, valid or test, each .jsonl or .txt, got none of them");
  }
  DataSet data;
  if (!train.empty()) data.train = read_some(train, tokenizer, options);
  if (!valid.empty()) data.valid = read_some(valid, tokenizer, options);
  if (!test.empty()) data.test = read_some(test, tokenizer, options);
  return data;
}

}  // namespace mlxtape::jobs
