// Which files of a folder are a model's: those that save_model and mlx-lm write, and no others. What is not on this list
// is somebody's own, and neither replaced nor removed.
#include <fnmatch.h>

#include <algorithm>
#include <array>
#include <filesystem>
#include <string_view>

#include "mlxtape/base/error.h"
#include "mlxtape/base/files.h"
#include "mlxtape/base/quote.h"
#include "mlxtape/base/temporary.h"
#include "mlxtape/formats/model_directory.h"

namespace mlxtape::formats {
namespace {

namespace fs = std::filesystem;

constexpr const char* kConfig = "config.json";
constexpr const char* kCard = "README.md";
constexpr const char* kMerges = "merges.txt";
constexpr std::size_t kLongestCard = std::size_t{1} << 20U;

constexpr const char *kWeights = "model.safetensors", *kIndex = "model.safetensors.index.json";
constexpr const char* kShard =
    "model-[0-9][0-9][0-9][0-9][0-9]-of-[0-9][0-9][0-9][0-9][0-9].safetensors";

// Names that save_model or mlx-lm gives, in full: tokenizer*.json would fit a user's own notes.
constexpr std::array kNames = {kConfig,
                               kWeights,
                               kIndex,
                               kMerges,
                               "tokenizer.json",
                               "tokenizer_config.json",
                               "tokenizer.model",
                               "tiktoken.model",
                               "tekken.json",
                               "special_tokens_map.json",
                               "added_tokens.json",
                               "vocab.json",
                               "chat_template.jinja",
                               "chat_template.json",
                               "generation_config.json"};

// What mlx-lm's cards say, whatever its version; % is any text without a space.
constexpr std::array kCardLines = {
    "# %/%",
    "This model [%](https://huggingface.co/%) was",
    "The Model [%](https://huggingface.co/%) was",
    "The Model [%](https://huggingface.co/%) was converted to MLX format from "
    "[%](https://huggingface.co/%) using mlx-lm version **%**.",
    "converted to MLX format",
    "converted to MLX format from [%](https://huggingface.co/%)",
    "converted to MLX format from [%](https://huggingface.co/%) using mlx-lm version **%**.",
    "converted to MLX format using mlx-lm version **%**.",
    "using mlx-lm version **%**.",
    "Refer to the [original model card](https://huggingface.co/%) for more details on the model.",
    "## Use with mlx",
    "```bash",
    "```python",
    "```",
    "pip install mlx-lm",
    "from mlx_lm import load, generate",
    "model, tokenizer = load(\"%\")",
    "prompt = \"hello\"",
    "prompt=\"hello\"",
    "if tokenizer.chat_template is not None:",
    "if hasattr(tokenizer, \"apply_chat_template\") and tokenizer.chat_template is not None:",
    "messages = [{\"role\": \"user\", \"content\": prompt}]",
    "prompt = tokenizer.apply_chat_template(",
    "messages, add_generation_prompt=True",
    "messages, add_generation_prompt=True, return_dict=False,",
    "messages, tokenize=False, add_generation_prompt=True",
    ")",
    "response = generate(model, tokenizer, prompt=prompt, verbose=True)",
    "response = generate(model, tokenizer, prompt=\"hello\", verbose=True)"};

bool fits(const std::string& name, const char* pattern) {
  return fnmatch(pattern, name.c_str(), FNM_PERIOD) == 0;
}

// config.json of an application is JSON too: a model's says of what type it is.
bool is_model_config(const fs::path& path) {
  try {
    const Json json = Json::parse(read_whole(path.string(), "config"), "config");
    const Json* type = json.is_object() ? json.find("model_type") : nullptr;
    return type != nullptr && type->is_string();
  } catch (const Error&) {
    return false;
  }
}

bool matches(std::string_view pattern, std::string_view text) {
  if (pattern.empty()) return text.empty();
  if (pattern.front() != '%') {
    return !text.empty() && text.front() == pattern.front() &&
           matches(pattern.substr(1), text.substr(1));
  }
  for (std::size_t i = 0;; ++i) {
    if (matches(pattern.substr(1), text.substr(i))) return true;
    if (i == text.size() || text[i] == ' ') return false;
  }
}

constexpr std::size_t kLongestCardLine = 600;  // of two names of a repository, each twice

bool is_card_line(std::string_view line) {
  const std::size_t first = line.find_first_not_of(" \t\r");
  if (first == std::string_view::npos) return true;
  line = line.substr(first, line.find_last_not_of(" \t\r") + 1 - first);
  return line.size() <= kLongestCardLine &&
         std::any_of(kCardLines.begin(), kCardLines.end(),
                     [&](const char* pattern) { return matches(pattern, line); });
}

// As mlx-lm writes it: its library's name in front, without remarks, and below that nothing, or mlx-lm's own words and no
// others.
bool is_mlx_card(const fs::path& path) {
  try {
    const std::string text = read_whole(path.string(), "card", kLongestCard);
    const std::size_t end = text.find("\n---", 3);
    if (!text.starts_with("---\n") || end == std::string::npos) return false;
    const std::string_view front = std::string_view(text).substr(0, end + 1);
    std::string_view rest = std::string_view(text).substr(end + 4);
    if (front.find("\nlibrary_name: mlx\n") == std::string_view::npos ||
        front.find("\n#") != std::string_view::npos) {
      return false;
    }
    while (!rest.empty()) {
      const std::size_t line = std::min(rest.find('\n'), rest.size());
      if (!is_card_line(rest.substr(0, line))) return false;
      rest.remove_prefix(std::min(line + 1, rest.size()));
    }
    return true;
  } catch (const Error&) {
    return false;
  }
}

bool is_weights(const fs::path& path) {
  try {
    static_cast<void>(SafetensorsFile(path.string()));
    return true;
  } catch (const Error&) {
    return false;
  }
}

bool is_same_file(const fs::path& path, const fs::path& other) {
  std::error_code reason, none;
  const auto bytes = fs::file_size(path, reason);
  if (bytes != fs::file_size(other, none) || reason || none) return false;
  try {
    return read_whole(path.string(), "model") == read_whole(other.string(), "model");
  } catch (const Error&) {
    return false;
  }
}

// As tokenizers write it, and as nobody writes a list of what is to be merged.
bool is_merges(const fs::path& path) {
  try {
    return read_whole(path.string(), "merges").starts_with("#version");
  } catch (const Error&) {
    return false;
  }
}

bool has_model_name(const std::string& name) {
  return fits(name, kShard) || std::find(kNames.begin(), kNames.end(), name) != kNames.end();
}

// Code, templates, *.tiktoken and others: people write files of such names too.
bool is_companion(const std::string& name) {
  static const std::vector<std::string> patterns = ModelToSave().companions;
  return std::any_of(patterns.begin(), patterns.end(),
                     [&](const std::string& pattern) { return fits(name, pattern.c_str()); });
}

// source: where the model that takes this one's place has its companions from; empty: it has none.
bool is_model_file(const fs::path& path, const std::string& source) {
  const std::string name = path.filename().string();
  std::error_code reason;
  if (fs::symlink_status(path, reason).type() != fs::file_type::regular) return false;
  if (name == kConfig) return is_model_config(path);
  if (name == kCard) return is_mlx_card(path);
  if (name == kWeights || fits(name, kShard)) return is_weights(path);
  if (name == kMerges && is_merges(path)) return true;
  if (name != kMerges && has_model_name(name)) return true;
  return !source.empty() && is_companion(name) && is_same_file(path, fs::path(source) / name);
}

std::vector<fs::path> entries_of(const fs::path& folder, std::error_code& reason) {
  std::vector<fs::path> entries;
  for (fs::directory_iterator it(folder, reason), end; !reason && it != end; it.increment(reason)) {
    entries.push_back(it->path());
  }
  std::sort(entries.begin(), entries.end());
  return entries;
}

}  // namespace

std::string replace_fault(const std::string& folder, const std::string& source) {
  std::error_code reason;
  if (!fs::exists(folder, reason)) return "";
  const std::vector<fs::path> entries = entries_of(folder, reason);
  if (reason) return "cannot be read (" + reason.message() + ")";
  bool has_weights = false, has_shards = false;
  for (const fs::path& entry : entries) {
    const std::string name = entry.filename().string();
    has_weights = has_weights || name == kWeights;
    has_shards = has_shards || fits(name, kShard);
    if (is_model_file(entry, source)) continue;
    return "contains " + shown(name) +
           (name == kConfig ? ", which is not a model's" : ", which is not part of a model");
  }
  if (entries.empty()) return "";
  const fs::path at = folder;
  if (!fs::exists(at / kConfig, reason)) return "has no config.json of a model";
  if (has_weights || (has_shards && fs::exists(at / kIndex, reason))) return "";
  return has_shards ? std::string("has no ") + kIndex : "has no weights of a model";
}

void remove_replaced_model(const std::string& folder, const std::string& source) {
  std::error_code reason;
  for (const fs::path& entry : entries_of(folder, reason)) {
    std::error_code ignored;
    if (is_model_file(entry, source)) fs::remove(entry, ignored);
  }
  fs::remove(folder, reason);  // not where something is left
}

void remove_model_files(const std::string& folder) {
  std::error_code reason;
  for (const fs::path& entry : entries_of(folder, reason)) {
    const std::optional<Temporary> half = temporary_named(entry.filename().string());
    const std::string name = half ? half->of : entry.filename().string();
    const bool is_ours =
        has_model_name(name) || (name == kCard && is_mlx_card(entry)) || is_companion(name);
    std::error_code ignored;
    if (fs::symlink_status(entry, ignored).type() != fs::file_type::regular) continue;
    if (is_ours) fs::remove(entry, ignored);
  }
  fs::remove(folder, reason);  // not where something is left
}

}  // namespace mlxtape::formats
