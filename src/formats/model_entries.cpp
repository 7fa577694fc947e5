// Which files of a folder are a model's: those that save_model and mlx-lm write, and no others. What is not on this list
// is somebody's own, and neither replaced nor removed.
#include <fnmatch.h>

#include <algorithm>
#include <array>
#include <filesystem>

#include "mlxtape/base/error.h"
#include "mlxtape/base/files.h"
#include "mlxtape/base/temporary.h"
#include "mlxtape/formats/model_directory.h"

namespace mlxtape::formats {
namespace {

namespace fs = std::filesystem;

constexpr const char* kConfig = "config.json";
constexpr const char* kCard = "README.md";

// Narrower than what save_model copies: *.py and tokenizer* would fit a user's own scripts and notes.
constexpr std::array kPatterns = {
    kConfig,
    "model.safetensors",
    "model-[0-9][0-9][0-9][0-9][0-9]-of-[0-9][0-9][0-9][0-9][0-9].safetensors",
    "model.safetensors.index.json",
    "tokenizer*.json",
    "tokenizer*.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "*.jinja",
    "*.tiktoken",
    "generation_config.json",
    "chat_template.json",
    "preprocessor_config.json",
    "configuration_*.py",
    "modeling_*.py",
    "tokenization_*.py"};

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

// As mlx-lm writes it: its library's name in front, and below that nothing, or mlx-lm's own words.
bool is_mlx_card(const fs::path& path) {
  try {
    const std::string text = read_whole(path.string(), "card");
    const std::size_t end = text.find("\n---", 3);
    if (!text.starts_with("---\n") || end == std::string::npos) return false;
    const std::string front = text.substr(0, end + 1), rest = text.substr(end + 4);
    return front.find("\nlibrary_name: mlx\n") != std::string::npos &&
           (rest.find_first_not_of(" \r\n") == std::string::npos ||
            rest.find("using mlx-lm version **") != std::string::npos);
  } catch (const Error&) {
    return false;
  }
}

bool has_model_name(const std::string& name) {
  return std::any_of(kPatterns.begin(), kPatterns.end(),
                     [&](const char* pattern) { return fits(name, pattern); });
}

bool is_model_file(const fs::path& path) {
  const std::string name = path.filename().string();
  std::error_code reason;
  if (fs::symlink_status(path, reason).type() != fs::file_type::regular) return false;
  if (name == kConfig) return is_model_config(path);
  if (name == kCard) return is_mlx_card(path);
  return has_model_name(name);
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

std::string replace_fault(const std::string& folder) {
  std::error_code reason;
  if (!fs::exists(folder, reason)) return "";
  const std::vector<fs::path> entries = entries_of(folder, reason);
  if (reason) return "cannot be read (" + reason.message() + ")";
  for (const fs::path& entry : entries) {
    if (is_model_file(entry)) continue;
    return "contains " + entry.filename().string() +
           (entry.filename() == kConfig ? ", which is not a model's"
                                        : ", which is not part of a model");
  }
  if (entries.empty() || fs::exists(fs::path(folder) / kConfig, reason)) return "";
  return "has no config.json of a model";
}

void remove_model_files(const std::string& folder) {
  const std::vector<std::string> companions = ModelToSave().companions;
  std::error_code reason;
  for (const fs::path& entry : entries_of(folder, reason)) {
    const std::optional<Temporary> half = temporary_named(entry.filename().string());
    const std::string name = half ? half->of : entry.filename().string();
    const auto copied = [&](const std::string& pattern) {
      return fits(name, pattern.c_str());
    };
    std::error_code ignored;
    if (fs::symlink_status(entry, ignored).type() != fs::file_type::regular) continue;
    const bool is_half = half && has_model_name(name);
    const bool is_ours = is_model_file(entry) || is_half ||
                         std::any_of(companions.begin(), companions.end(), copied);
    if (is_ours) fs::remove(entry, ignored);
  }
  fs::remove(folder, reason);  // not where something is left
}

}  // namespace mlxtape::formats
