#include "places.h"

#include <cerrno>
#include <charconv>
#include <csignal>
#include <filesystem>
#include <string_view>

#include <unistd.h>

#include "mlxtape/base/error.h"

namespace mlxtape::cli {

namespace fs = std::filesystem;

namespace {

constexpr std::string_view kOld = ".old";

// The process in "<name>.tmp<process>.<number>", or that with ".old" behind it; 0: it is no such name.
int process_of(const std::string& name, const std::string& of) {
  const std::string begin = of + ".tmp";
  if (!name.starts_with(begin)) return 0;
  std::string rest = name.substr(begin.size());
  if (rest.ends_with(kOld)) rest.resize(rest.size() - kOld.size());
  if (rest.empty() || rest.find_first_not_of("0123456789.") != std::string::npos) return 0;
  int process = 0;
  const char* end = rest.data() + rest.size();
  const auto [stopped, wrong] = std::from_chars(rest.data(), end, process);
  return wrong == std::errc{} && stopped != end && *stopped == '.' ? process : 0;
}

bool lives(int process) { return ::kill(process, 0) == 0 || errno == EPERM; }

}  // namespace

std::string without_slash(std::string path) {
  while (path.size() > 1 && path.back() == '/') path.pop_back();
  return path;
}

std::string last_part(const std::string& path) {
  std::error_code reason;
  fs::path whole = fs::absolute(path, reason).lexically_normal();
  if (whole.filename().empty()) whole = whole.parent_path();
  return whole.filename().string();
}

void expect_place(const std::string& path, bool force, const std::string& flag) {
  remove_left_over(path);
  std::error_code reason;
  if (fs::exists(path, reason) && !force) {
    throw Error(Errc::kIo,
                path + ": is there already; --force replaces it, " + flag + " writes elsewhere");
  }
  if (fs::exists(path, reason) && !fs::is_directory(path, reason)) {
    throw Error(Errc::kIo, path + ": must be a directory or absent, got a file");
  }
  if (fs::exists(path, reason) && !fs::is_empty(path, reason) &&
      !fs::exists(fs::path(path) / "config.json", reason)) {
    throw Error(Errc::kIo, path + ": --force replaces models alone, and there is no config.json");
  }
  fs::path folder = fs::absolute(path, reason).lexically_normal();
  if (folder.filename().empty()) folder = folder.parent_path();
  do {
    folder = folder.parent_path();  // those that are missing are made
  } while (!fs::exists(folder, reason) && folder != folder.root_path());
  if (!fs::is_directory(folder, reason) || ::access(folder.c_str(), W_OK) != 0) {
    throw Error(Errc::kIo, path + ": " + folder.string() + " must be a writable directory");
  }
}

void remove_left_over(const std::string& path) {
  std::error_code reason;
  fs::path whole = fs::absolute(path, reason).lexically_normal();
  if (whole.filename().empty()) whole = whole.parent_path();
  for (const auto& entry : fs::directory_iterator(whole.parent_path(), reason)) {
    const int process = process_of(entry.path().filename().string(), whole.filename().string());
    if (process == 0 || lives(process)) continue;
    std::error_code ignored;
    // Killed between two renames: what was to be replaced has its name again.
    if (entry.path().string().ends_with(kOld) && !fs::exists(whole, ignored)) {
      fs::rename(entry.path(), whole, ignored);
    } else {
      fs::remove_all(entry.path(), ignored);
    }
  }
}

}  // namespace mlxtape::cli
