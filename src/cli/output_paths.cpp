#include "output_paths.h"

#include <filesystem>
#include <optional>

#include <unistd.h>

#include "command.h"
#include "mlxtape/base/error.h"
#include "mlxtape/base/temporary.h"
#include "mlxtape/formats/model_directory.h"

namespace mlxtape::cli {

namespace fs = std::filesystem;

namespace {

// What a process that was killed has left of a file.
bool is_half_written(const std::string& name, const std::string& of) {
  const std::optional<Temporary> temporary = temporary_named(name);
  return temporary && temporary->of == of;
}

// Without links, dots and a slash at the end, as far as it is there.
fs::path true_path(const std::string& path) {
  std::error_code reason;
  const fs::path whole = fs::absolute(path, reason);
  fs::path plain = fs::weakly_canonical(whole, reason);
  if (reason) plain = whole.lexically_normal();
  return plain.filename().empty() && plain.has_relative_path() ? plain.parent_path() : plain;
}

// Is it that place, or below it? The system's own comparison knows names that differ by case or by a mount.
bool lies_in(const std::string& inner, const std::string& outer) {
  const fs::path place = true_path(outer);
  for (fs::path at = true_path(inner);; at = at.parent_path()) {
    std::error_code missing;
    if (at == place || fs::equivalent(at, place, missing)) return true;
    if (!at.has_relative_path()) return false;
  }
}

// The first entry of an input's folder that is a link to something in the output; empty: there is none. The files
// themselves lie where the folder does.
std::string link_into(const std::string& output, const std::string& input) {
  std::error_code reason;
  std::string first;
  for (fs::directory_iterator it(input, reason), end; !reason && it != end; it.increment(reason)) {
    std::error_code gone;
    if (!it->is_symlink(gone)) continue;
    const std::string name = it->path().filename().string();
    if (!first.empty() && first < name) continue;
    if (lies_in(it->path().string(), output)) first = name;
  }
  return first;
}

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

void expect_directory_or_none(const std::string& path) {
  const std::string plain = without_slash(path);  // "file/" is no file to the system
  std::error_code reason;
  const fs::file_status there = fs::status(plain, reason);
  if (fs::is_directory(there)) return;
  if (fs::exists(there)) {
    throw Error(Errc::kIo, path + ": must be a directory or absent, got a file");
  }
  if (fs::is_symlink(fs::symlink_status(plain, reason))) {
    throw Error(Errc::kIo, path + ": must be a directory or absent, got a link to nothing");
  }
}

void expect_place(const std::string& path, bool force, const std::string& flag,
                  const std::string& source) {
  formats::restore_moved_model(path);
  expect_directory_or_none(path);
  std::error_code reason;
  const bool is_there = fs::exists(path, reason);
  if (const std::string fault = formats::replace_fault(path, source); !fault.empty()) {
    throw Error(Errc::kIo, path + ": already exists and " + fault +
                               ", so --force does not overwrite it; use another " + flag);
  }
  if (is_there && !force) {
    throw Error(Errc::kIo, path + ": already exists; use --force to overwrite, or another " + flag);
  }
  fs::path folder = true_path(path);
  do {
    folder = folder.parent_path();  // those that are missing are made
  } while (!fs::exists(folder, reason) && folder != folder.root_path());
  if (!fs::is_directory(folder, reason) || ::access(folder.c_str(), W_OK) != 0) {
    throw Error(Errc::kIo, path + ": " + folder.string() + " must be a writable directory");
  }
}

void expect_file_place(const std::string& path, bool force, const std::string& flag) {
  std::error_code reason;
  if (fs::exists(path, reason) && !force) {
    throw Error(Errc::kIo, path + ": already exists; use --force to overwrite, or another " + flag);
  }
  const fs::path folder = true_path(path).parent_path();
  if (!fs::is_directory(folder, reason) || ::access(folder.c_str(), W_OK) != 0) {
    throw Error(Errc::kIo, path + ": " + folder.string() + " must be a writable directory");
  }
}

void save_result(const models::Model& model, const std::string& path, const std::string& source,
                 bool force) {
  std::error_code reason;
  if (!force && fs::exists(path, reason)) {
    throw Error(
        Errc::kIo,
        path +
            ": was created by another run in the meantime and is left as it is; use another path");
  }
  models::SaveOptions save;
  save.files_from = source;
  save.replace = force;
  models::save_model(model, path, save);
}

void expect_apart(const Place& output, const std::vector<Place>& inputs) {
  for (const Place& input : inputs) {
    if (input.path.empty()) continue;
    if (!lies_in(input.path, output.path)) continue;
    const char* relation =
        lies_in(output.path, input.path) ? " must not be " : " must not contain ";
    called_wrongly(output.flag + " " + output.path + relation + input.flag + " " + input.path +
                   "; use another " + output.flag);
  }
  for (const Place& input : inputs) {
    const std::string file = link_into(output.path, input.path);
    if (file.empty()) continue;
    called_wrongly(output.flag + " " + output.path + " must not contain " + file + " of " +
                   input.flag + " " + input.path + ", which is a link; use another " + output.flag);
  }
}

void remove_half_written(const std::string& path) {
  const fs::path whole = true_path(path);
  std::error_code reason;
  std::vector<fs::path> found;
  for (fs::directory_iterator it(whole.parent_path(), reason), end; !reason && it != end;
       it.increment(reason)) {
    std::error_code ignored;
    const bool is_file = it->symlink_status(ignored).type() == fs::file_type::regular;
    if (is_file && is_half_written(it->path().filename().string(), whole.filename().string())) {
      found.push_back(it->path());
    }
  }
  for (const fs::path& each : found) {
    std::error_code ignored;
    fs::remove(each, ignored);
  }
}

}  // namespace mlxtape::cli
