#include "checked_file.h"

#include <filesystem>
#include <optional>
#include <system_error>
#include <utility>

#include "mlxtape/base/error.h"

namespace mlxtape::jobs {

namespace {

using formats::SafetensorsFile;

constexpr const char* kWithoutChecksum = "mlxtape fit 1";

[[noreturn]] void fail(const std::string& file, const std::string& what) {
  throw Error(Errc::kIo, "fit: " + file + ": " + what);
}

bool is_without_checksum(const SafetensorsFile& file) {
  const auto format = file.metadata().find("format");
  return format != file.metadata().end() && format->second == kWithoutChecksum;
}

}  // namespace

SafetensorsFile open_checked(const std::string& path) {
  std::error_code none;
  if (!std::filesystem::exists(path, none)) fail(path, "is missing");
  std::optional<SafetensorsFile> file;
  std::string wrong;
  try {
    file.emplace(path);
    if (!is_without_checksum(*file)) file->verify();
  } catch (const Error& e) {
    wrong = e.what();
  }
  if (!wrong.empty()) {
    fail(path, "is damaged (" + wrong + "); restore it from a copy, or delete it to start over");
  }
  if (is_without_checksum(*file)) {
    fail(path,
         "was written by an older version, without a checksum; finish the run with that version, "
         "or delete this file to start over");
  }
  return *std::move(file);
}

}  // namespace mlxtape::jobs
