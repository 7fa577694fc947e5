#include "left_overs.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <functional>
#include <string_view>
#include <utility>
#include <vector>

#include "mlxtape/base/temporary.h"
#include "mlxtape/formats/model_directory.h"

namespace mlxtape::formats {

namespace {

namespace fs = std::filesystem;

constexpr std::string_view kLock = ".lock", kOld = ".old";
constexpr std::string_view kText = "mlxtape makes a model here\n";

// Is it still the file of that name? Whoever found it first may have removed it.
bool is_at(int file, const fs::path& path) {
  struct stat held{}, there{};
  return ::fstat(file, &held) == 0 && ::lstat(path.c_str(), &there) == 0 &&
         held.st_dev == there.st_dev && held.st_ino == there.st_ino;
}

bool lock(int file) { return ::flock(file, LOCK_EX | LOCK_NB) == 0; }

// A mark that nobody holds, held by this from now on.
class StaleMark {
 public:
  explicit StaleMark(fs::path path)
      : path_(std::move(path)),
        file_(::open(path_.c_str(), O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC)) {}
  StaleMark(const StaleMark&) = delete;
  StaleMark& operator=(const StaleMark&) = delete;
  ~StaleMark() {
    if (file_ >= 0) ::close(file_);
  }
  bool is_one() const {
    std::array<char, kText.size() + 1> text{};
    return file_ >= 0 && ::read(file_, text.data(), text.size()) == std::ssize(kText) &&
           std::string_view(text.data(), kText.size()) == kText && lock(file_) &&
           is_at(file_, path_);
  }

 private:
  fs::path path_;
  int file_;
};

// "m.tmp12.0.lock" of "m".
bool is_mark_of(const std::string& name, const std::string& of) {
  if (!name.ends_with(kLock)) return false;
  const auto made = temporary_named(name.substr(0, name.size() - kLock.size()));
  return made && made->of == of;
}

// Calls function with the path of what a stale mark stands for: true removes the mark.
void each_left_over(const fs::path& folder, const std::function<bool(const fs::path&)>& function) {
  std::error_code reason;
  std::vector<fs::path> marks;
  for (fs::directory_iterator it(folder.parent_path(), reason), end; !reason && it != end;
       it.increment(reason)) {
    if (is_mark_of(it->path().filename().string(), folder.filename().string())) {
      marks.push_back(it->path());
    }
  }
  for (const fs::path& path : marks) {
    const StaleMark mark(path);
    if (!mark.is_one()) continue;
    const std::string name = path.string();
    std::error_code ignored;
    if (function(name.substr(0, name.size() - kLock.size()))) fs::remove(path, ignored);
  }
}

bool is_folder(const fs::path& path) {
  std::error_code reason;
  return fs::is_directory(fs::symlink_status(path, reason));
}

}  // namespace

Mark::~Mark() {
  if (file_ < 0) return;
  ::unlink(path_.c_str());
  ::close(file_);
}

bool Mark::set(const fs::path& folder) {
  path_ = folder.string() + std::string(kLock);
  file_ = ::open(path_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0644);
  if (file_ < 0) return false;
  const bool is_held = lock(file_) || errno != EWOULDBLOCK;
  const bool is_written = ::write(file_, kText.data(), kText.size()) == std::ssize(kText);
  const int reason = is_written ? EEXIST : errno;
  if (is_held && is_written && is_at(file_, path_)) return true;
  if (is_held) ::unlink(path_.c_str());
  ::close(std::exchange(file_, -1));
  errno = reason;
  return false;
}

void remove_left_overs(const fs::path& folder) {
  each_left_over(folder, [&](const fs::path& left) {
    const fs::path old = left.string() + std::string(kOld);
    const bool is_moved = is_folder(old);
    if (is_moved && !is_folder(folder)) return false;
    for (const fs::path& path : {left, old}) {
      if (is_folder(path)) remove_model_files(path.string());
    }
    return true;
  });
}

void restore_moved_model(const std::string& path) {
  std::error_code reason;
  fs::path folder = fs::weakly_canonical(fs::absolute(path, reason), reason);
  if (folder.filename().empty()) folder = folder.parent_path();
  if (reason || fs::exists(fs::symlink_status(folder, reason))) return;
  each_left_over(folder, [&](const fs::path& left) {
    const fs::path old = left.string() + std::string(kOld);
    std::error_code failed;
    if (is_folder(old) && !is_folder(folder)) fs::rename(old, folder, failed);
    return false;  // the rest goes with the next model that is saved there
  });
}

}  // namespace mlxtape::formats
