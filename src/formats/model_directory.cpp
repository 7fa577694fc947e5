#include "mlxtape/formats/model_directory.h"

#include <fcntl.h>
#include <fnmatch.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <filesystem>
#include <memory>
#include <span>
#include <system_error>

#include "left_overs.h"
#include "mlxtape/base/error.h"
#include "mlxtape/base/files.h"
#include "mlxtape/base/quote.h"
#include "mlxtape/base/temporary.h"
#include "mlxtape/formats/gguf_tokenizer.h"

namespace mlxtape::formats {
namespace {

namespace fs = std::filesystem;

constexpr const char* kWho = "model directory";
constexpr const char* kConfig = "config.json";
constexpr const char* kIndex = "model.safetensors.index.json";
constexpr const char* kWeights = "model*.safetensors";

[[noreturn]] void fail(const std::string& what, Errc code = Errc::kIo) {
  throw Error(code, std::string(kWho) + ": " + what);
}

[[noreturn]] void fail_replace(const std::string& folder, const std::string& fault) {
  fail(folder + " " + fault + ": only a model's folder is replaced");
}

bool fits(const std::string& name, const std::string& pattern) {
  return fnmatch(pattern.c_str(), name.c_str(), 0) == 0;
}

// The names in a folder but those of folders, sorted. A link to nothing is one: who opens it will say so.
std::vector<std::string> files_of(const fs::path& folder) {
  std::error_code reason;
  std::vector<std::string> names;
  for (fs::directory_iterator it(folder, reason), end; !reason && it != end; it.increment(reason)) {
    std::error_code nothing;
    if (!it->is_directory(nothing)) names.push_back(it->path().filename().string());
  }
  if (reason) fail(folder.string() + " must be a folder that can be read, got " + reason.message());
  std::sort(names.begin(), names.end());
  return names;
}

}  // namespace

// ---- reading ----

Check gguf_check(const std::string& path) {
  std::error_code reason;
  if (!fs::is_directory(path, reason) || fs::exists(fs::path(path) / kConfig, reason)) {
    return std::nullopt;
  }
  const std::vector<std::string> names = files_of(path);
  const auto found = std::find_if(names.begin(), names.end(), is_gguf_path);
  if (found == names.end()) return std::nullopt;
  return Error(
      Errc::kIo,
      path + " must be a model's directory, and has no config.json: name the GGUF file itself, " +
          shown((fs::path(path) / *found).string()));
}

ModelFiles::ModelFiles(const std::string& path) : path_(path) {
  require(gguf_check(path));
  std::error_code reason;
  if (fs::is_directory(path, reason)) {
    for (const std::string& name : files_of(path)) {
      if (fits(name, kWeights)) files_.emplace_back((fs::path(path) / name).string());
    }
    if (files_.empty()) fail(path + " must hold " + kWeights + ", got none");
  } else if (is_gguf_path(path)) {
    gguf_ = std::make_shared<const GgufModel>(path);
    names_ = gguf_->names();
    total_bytes_ = gguf_->total_bytes();
    paths_ = gguf_->file().files();
    return;
  } else {
    files_.emplace_back(path);
  }
  for (std::size_t i = 0; i < files_.size(); ++i) {
    for (const std::string& name : files_[i].names()) {
      const auto [place, is_new] = file_of_.try_emplace(name, i);
      if (!is_new) {
        fail("tensor \"" + shown(name) + "\" must be in one file, got " +
             files_[place->second].path() + " and " + files_[i].path());
      }
      total_bytes_ += files_[i].info(name).bytes;
    }
    paths_.push_back(files_[i].path());
  }
  for (const auto& [name, index] : file_of_) names_.push_back(name);
}

const SafetensorsFile& ModelFiles::file(std::string_view name) const {
  const auto found = file_of_.find(name);
  if (found == file_of_.end())
    fail(path_ + " must hold tensor \"" + shown(name) + "\", got no such name");
  return files_[found->second];
}

bool ModelFiles::has(std::string_view name) const {
  return gguf_ != nullptr ? gguf_->has(name) : file_of_.find(name) != file_of_.end();
}

const TensorInfo& ModelFiles::info(std::string_view name) const {
  return gguf_ != nullptr ? gguf_->info(name) : file(name).info(name);
}

Tensor ModelFiles::tensor(std::string_view name) const {
  return gguf_ != nullptr ? gguf_->tensor(name) : file(name).tensor(name);
}

ModelFiles::Bytes ModelFiles::bytes(std::string_view name) const {
  if (gguf_ == nullptr) return {file(name).bytes(name), {}};
  Tensor tensor = gguf_->tensor(name);
  const auto* data = static_cast<const std::byte*>(tensor.data());
  return {{data, tensor.bytes()}, std::move(tensor)};
}

Json read_model_config(const std::string& path) {
  require(gguf_check(path));
  if (is_gguf_path(path)) return GgufModel(path).config();
  const std::string file = model_config_path(path);
  Json config = Json::read_file(file, kWho);
  if (!config.is_object()) fail(file + " must be an object, got another value");
  return config;
}

std::string model_config_path(const std::string& path) {
  if (is_gguf_path(path)) return path;
  return (fs::path(path) / kConfig).string();
}

// ---- writing ----

namespace {

using Shard = std::span<const NamedTensor>;

std::vector<Shard> shards_of(const std::vector<NamedTensor>& tensors, std::size_t limit) {
  std::vector<Shard> shards;
  std::size_t begin = 0;
  std::size_t bytes = 0;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    if (i > begin && bytes + tensors[i].tensor.bytes() > limit) {
      shards.emplace_back(tensors.data() + begin, i - begin);
      begin = i;
      bytes = 0;
    }
    bytes += tensors[i].tensor.bytes();
  }
  shards.emplace_back(tensors.data() + begin, tensors.size() - begin);
  return shards;
}

std::string shard_name(std::size_t number, std::size_t count) {
  if (count == 1) return "model.safetensors";
  std::string name(64, '\0');
  name.resize(static_cast<std::size_t>(
      std::snprintf(name.data(), name.size(), "model-%05zu-of-%05zu.safetensors", number, count)));
  return name;
}

// The tokenizer that a GGUF file has in it, as files.
void write_tokenizer(const fs::path& folder, const std::string& gguf) {
  const GgufFile file(gguf);
  const std::optional<GgufTokenizer> tokenizer = read_gguf_tokenizer(file);
  if (!tokenizer) return;
  const TokenizerFiles files = tokenizer_files(*tokenizer, "gguf: " + gguf);
  write_whole((folder / "tokenizer.json").string(), files.tokenizer_json, kWho);
  write_whole((folder / "tokenizer_config.json").string(), files.tokenizer_config.dump(2), kWho);
  if (files.eos.empty()) return;
  const Json generation =
      Json::Object{{"eos_token_id", Json::Array(files.eos.begin(), files.eos.end())}};
  write_whole((folder / "generation_config.json").string(), generation.dump(2), kWho);
}

void write_model(const fs::path& folder, const ModelToSave& model) {
  const std::vector<Shard> shards = shards_of(model.tensors, model.shard_bytes);
  std::int64_t bytes = 0;
  std::int64_t elements = 0;
  std::map<std::string, Json> weight_map;
  for (std::size_t i = 0; i < shards.size(); ++i) {
    const std::string name = shard_name(i + 1, shards.size());
    for (const NamedTensor& item : shards[i]) {
      bytes += static_cast<std::int64_t>(item.tensor.bytes());
      elements += item.tensor.size();
      if (!weight_map.emplace(item.name, name).second) {
        fail("tensor \"" + item.name + "\" must come once", Errc::kArgument);
      }
    }
    write_safetensors((folder / name).string(), shards[i], {{"format", "mlx"}});
  }
  const Json index = Json::Object{
      {"metadata", Json::Object{{"total_size", bytes},
                                {"total_parameters", model.parameters.value_or(elements)}}},
      {"weight_map", Json::Object(weight_map.begin(), weight_map.end())}};
  write_whole((folder / kIndex).string(), index.dump(4, true), kWho);
  write_whole((folder / kConfig).string(), model.config.dump(4, true), kWho);
  if (model.source.empty()) return;
  if (is_gguf_path(model.source)) return write_tokenizer(folder, model.source);
  for (const std::string& name : files_of(model.source)) {
    const bool wanted =
        std::any_of(model.companions.begin(), model.companions.end(),
                    [&](const std::string& pattern) { return fits(name, pattern); });
    const bool ours = name == kConfig || name == kIndex || fits(name, kWeights);
    if (!wanted || ours) continue;
    write_whole((folder / name).string(),
                read_whole((fs::path(model.source) / name).string(), kWho), kWho);
  }
}

// A new folder beside the target; taken away again unless it has become the target.
struct Aside {
  std::unique_ptr<Mark> mark;
  fs::path path;
  bool is_ours = true;  // what lies there was made here

  explicit Aside(const fs::path& target) {
    std::error_code reason;
    fs::create_directories(target.parent_path(), reason);
    do {
      path = temporary_path(target.string());
      mark = std::make_unique<Mark>();
      if (!reason && !mark->set(path) && errno != EEXIST) {
        reason = {errno, std::generic_category()};
      }
    } while (!reason && !(mark->is_set() && fs::create_directory(path, reason)));
    if (reason) fail(target.string() + " must be writable, got " + reason.message());
  }
  Aside(const Aside&) = delete;
  Aside& operator=(const Aside&) = delete;
  ~Aside() {
    std::error_code ignored;
    if (is_ours) fs::remove_all(path, ignored);
  }
};

// Each gets the other's name, with no moment in between. False: not here.
bool exchange(const fs::path& a, const fs::path& b) {
#ifdef RENAME_EXCHANGE
  return ::renameat2(AT_FDCWD, a.c_str(), AT_FDCWD, b.c_str(), RENAME_EXCHANGE) == 0;
#elif defined(RENAME_SWAP)  // macOS
  return ::renamex_np(a.c_str(), b.c_str(), RENAME_SWAP) == 0;
#else
  static_cast<void>(a);
  static_cast<void>(b);
  return false;
#endif
}

// The folder `made` gets the target's name. Returns where the target's own lies now: at `made` where the file system
// exchanges names, beside it elsewhere.
fs::path swap_in(const fs::path& made, const fs::path& target, std::error_code& reason) {
  if (exchange(made, target)) return made;
  const fs::path old = made.string() + ".old";
  fs::rename(target, old, reason);
  if (reason) return old;
  fs::rename(made, target, reason);
  std::error_code ignored;
  if (reason) fs::rename(old, target, ignored);
  return old;
}

bool swap_back(const fs::path& made, const fs::path& target, const fs::path& old) {
  if (old == made) return exchange(made, target);
  std::error_code reason;
  fs::rename(target, made, reason);
  if (!reason) fs::rename(old, target, reason);
  return !reason;
}

void replace_folder(Aside& aside, const fs::path& target, const std::string& folder) {
  std::error_code reason;
  const fs::path old = swap_in(aside.path, target, reason);
  if (reason) fail(folder + " must be writable, got " + reason.message());
  aside.is_ours = false;  // from now on others may have found it, and put something there
  // Files may have come since it was first looked at: then it has its name again.
  if (const std::string fault = replace_fault(old.string(), target.string()); !fault.empty()) {
    if (swap_back(aside.path, target, old)) remove_model_files(aside.path.string());
    fail_replace(folder, fault);
  }
  sync_folder(target.parent_path().string(), kWho);
  remove_replaced_model(old.string(), target.string());
}

// Brings the new folder to its place, which is absent or empty unless it may be replaced.
void place(Aside& aside, const fs::path& target, const std::string& folder, bool replace) {
  std::error_code reason;
  fs::rename(aside.path, target, reason);  // onto an empty folder too
  const bool occupied =
      reason == std::errc::directory_not_empty || reason == std::errc::file_exists;
  if (occupied && replace) return replace_folder(aside, target, folder);
  if (occupied) fail(folder + " was made by another run meanwhile, and is left as it is");
  if (reason) fail(folder + " must be writable, got " + reason.message());
  aside.is_ours = false;
  sync_folder(target.parent_path().string(), kWho);
}

}  // namespace

void save_model(const std::string& folder, const ModelToSave& model, bool replace) {
  if (!model.config.is_object()) fail("the configuration must be an object", Errc::kArgument);
  std::error_code reason;
  fs::path target =
      fs::weakly_canonical(fs::absolute(folder, reason), reason);  // a link to a folder stays one
  if (target.filename().empty()) target = target.parent_path();    // out/
  const fs::file_status there = fs::status(target, reason);
  const bool exists = fs::exists(there);
  if (exists && !fs::is_directory(there)) fail(folder + " must be a folder, got a file");
  if (exists && !replace && !fs::is_empty(target, reason))
    fail(folder + " must be empty or absent, got a folder that holds something");
  const std::string fault = replace ? replace_fault(target.string(), model.source) : "";
  if (!fault.empty()) fail_replace(folder, fault);

  remove_left_overs(target);
  Aside aside(target);
  write_model(aside.path, model);
  place(aside, target, folder, replace);
}

}  // namespace mlxtape::formats
