#include "mlxtape/jobs/run_folder.h"

#include <filesystem>
#include <string_view>
#include <system_error>

#include "checked_file.h"
#include "mlxtape/base/temporary.h"
#include "mlxtape/formats/safetensors.h"
#include "mlxtape/models/lora.h"

namespace mlxtape::jobs {

namespace fs = std::filesystem;

namespace {

[[noreturn]] void fail(const std::string& file, const std::string& what) {
  throw Error(Errc::kIo, "fit: " + file + ": " + what);
}

constexpr std::string_view kDigits = "0123456789";

bool is_safetensors(const std::string& path) {
  try {
    static_cast<void>(formats::SafetensorsFile(path));
    return true;
  } catch (const Error&) {
    return false;
  }
}

// adapters.safetensors, 0000100_adapters.safetensors
bool is_adapters(const std::string& name) {
  const std::size_t digits = name.find_first_not_of(kDigits);
  if (digits == 0 || digits == std::string::npos) return name == models::kAdapterWeights;
  return digits >= 7 && name.substr(digits) == std::string("_") + models::kAdapterWeights;
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

bool RunFolder::is_state_file(const std::string& path) {
  try {
    const formats::SafetensorsFile file(path);
    const auto format = file.metadata().find("format");
    return format != file.metadata().end() && format->second.starts_with("mlxtape fit ");
  } catch (const Error&) {
    return false;
  }
}

bool RunFolder::is_best_file(const std::string& path) {
  try {
    const formats::SafetensorsFile file(path);
    return file.has(formats::kChecksumTensor) && file.metadata().contains("step") &&
           file.metadata().contains("loss");
  } catch (const Error&) {
    return false;
  }
}

std::string RunFolder::new_run_fault() const {
  if (!is_used() || has_state()) return "";
  for (const std::string& path : {state(), best()}) {
    std::error_code none;
    if (!fs::exists(fs::symlink_status(path, none))) continue;
    return path + ": already exists, belongs to no run, and would be overwritten";
  }
  return "";
}

std::string RunFolder::strange_result() const {
  std::error_code reason;
  std::string first;
  for (fs::directory_iterator it(path_, reason), end; !reason && it != end; it.increment(reason)) {
    const std::string name = it->path().filename().string(), path = it->path().string();
    std::error_code ignored;
    const bool is_named = name == kBest || is_adapters(name);
    if (!is_named || it->is_symlink(ignored)) continue;
    if (name == kBest ? is_best_file(path) : is_safetensors(path)) continue;
    if (first.empty() || name < first) first = name;
  }
  return first.empty() ? "" : file(first);
}

// Of processes that were killed while they wrote files of a run.
void RunFolder::remove_half_written() const {
  std::error_code reason;
  for (fs::directory_iterator it(path_, reason), end; !reason && it != end; it.increment(reason)) {
    std::error_code ignored;
    if (it->symlink_status(ignored).type() != fs::file_type::regular) continue;
    const auto temporary = temporary_named(it->path().filename().string());
    if (!temporary) continue;
    const std::string& of = temporary->of;
    if (of != kState && of != kBest && of != models::kAdapterConfig && !is_adapters(of)) continue;
    fs::remove(it->path(), ignored);
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
  remove_half_written();
  if (const std::string fault = new_run_fault(); !fault.empty()) {
    throw Error(Errc::kIo, "fit: " + fault);
  }
}

void RunFolder::remove() const {
  // The state first: a best without one is nothing to go on from.
  for (const std::string& name : {state(), best()}) {
    if (!(name == state() ? is_state_file(name) : is_best_file(name))) continue;
    std::error_code failed;
    fs::remove(name, failed);
    if (failed) fail(name, "cannot be removed: " + failed.message());
  }
  remove_half_written();
  std::error_code not_empty;
  fs::remove(path_, not_empty);
}

}  // namespace mlxtape::jobs
