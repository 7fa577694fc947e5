#include "mlxtape/jobs/run_folder.h"

#include <filesystem>
#include <system_error>

#include "checked_file.h"
#include "mlxtape/base/temporary.h"
#include "mlxtape/models/lora.h"

namespace mlxtape::jobs {

namespace fs = std::filesystem;

namespace {

[[noreturn]] void fail(const std::string& file, const std::string& what) {
  throw Error(Errc::kIo, "fit: " + file + ": " + what);
}

// Of a process that was killed while it wrote a file of a run.
void remove_left_over(const std::string& folder) {
  std::error_code ignored;
  for (const auto& entry : fs::directory_iterator(folder, ignored)) {
    const auto temporary = temporary_named(entry.path().filename().string());
    if (!temporary) continue;
    if (!temporary->of.ends_with(".safetensors") && !temporary->of.ends_with(".json")) continue;
    std::error_code failed;
    fs::remove(entry.path(), failed);
  }
}

}  // namespace

RunFolder RunFolder::beside(const std::string& output) { return RunFolder(output + ".state"); }

// 0000100_adapters.safetensors
std::string RunFolder::adapters(std::int64_t step) const {
  std::string digits = std::to_string(step);
  if (digits.size() < 7) digits.insert(0, 7 - digits.size(), '0');
  return file(digits + "_" + models::kAdapterWeights);
}

std::string RunFolder::adapter_config() const { return file(models::kAdapterConfig); }

bool RunFolder::has_state() const {
  std::error_code none;
  return is_used() && fs::exists(state(), none);
}

std::string RunFolder::fault() const {
  std::error_code none;
  try {
    static_cast<void>(open_checked(state()));
    if (fs::exists(best(), none)) static_cast<void>(open_checked(best()));
    return "";
  } catch (const Error& e) {
    return e.what();
  }
}

std::string RunFolder::result() const {
  std::error_code reason;
  std::string first;
  for (fs::directory_iterator it(path_, reason), end; !reason && it != end; it.increment(reason)) {
    const std::string name = it->path().filename().string();
    const bool is_ours =
        name.ends_with(models::kAdapterWeights) || name == models::kAdapterConfig || name == kBest;
    if (is_ours && (first.empty() || name < first)) first = name;
  }
  return first.empty() ? "" : file(first);
}

void RunFolder::enter() {
  if (!is_used()) return;
  std::error_code wrong;
  fs::create_directories(path_, wrong);
  if (wrong) fail(path_, "must be a folder, got " + wrong.message());
  lock_ = std::make_shared<FolderLock>(path_);
  remove_left_over(path_);
}

void RunFolder::remove() const {
  // The state first: a best without one is nothing to go on from.
  for (const std::string& name : {state(), best()}) {
    std::error_code failed;
    fs::remove(name, failed);
    if (failed) fail(name, "cannot be removed: " + failed.message());
  }
  remove_left_over(path_);
  std::error_code not_empty;
  fs::remove(path_, not_empty);
}

}  // namespace mlxtape::jobs
