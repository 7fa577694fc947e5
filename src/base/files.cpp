#include "mlxtape/base/files.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <utility>

#include "mlxtape/base/error.h"

namespace mlxtape {

namespace {

[[noreturn]] void fail_io(const std::string& who, const std::string& path, const char* what,
                          int reason) {
  throw Error(Errc::kIo, who + ": " + path + " must be " + what + ", got " + std::strerror(reason));
}

}  // namespace

WholeFile::WholeFile(std::string path, std::string who)
    : path_(std::move(path)), who_(std::move(who)), target_(path_), aside_(path_) {
  static std::atomic<unsigned> number{0};  // two threads may write the same path
  struct stat there{};
  const bool exists = stat(path_.c_str(), &there) == 0;
  replace_ = !exists || S_ISREG(there.st_mode);
  if (!replace_) {  // a pipe or a terminal is written to, not replaced
    file_ = open(path_.c_str(), O_WRONLY | O_TRUNC | O_CLOEXEC);
  } else {
    std::error_code no_link;
    if (exists)
      target_ = std::filesystem::canonical(path_, no_link).string();  // the file, not a link
    if (no_link) target_ = path_;
    do {  // another machine, or a process that died, may have left a file of that name
      aside_ =
          target_ + ".tmp" + std::to_string(getpid()) + "." + std::to_string(number.fetch_add(1));
      file_ = open(aside_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0644);
    } while (file_ < 0 && errno == EEXIST);
  }
  if (file_ < 0) fail_io(who_, path_, "writable", errno);
  if (exists && replace_) static_cast<void>(fchmod(file_, there.st_mode & 07777U));
}

WholeFile::~WholeFile() { discard(); }

void WholeFile::discard() noexcept {
  if (file_ < 0) return;
  close(std::exchange(file_, -1));
  if (replace_) std::remove(aside_.c_str());
}

void WholeFile::write(std::string_view bytes) {
  while (!bytes.empty()) {
    const ssize_t written = ::write(file_, bytes.data(), bytes.size());
    if (written >= 0) {
      bytes.remove_prefix(static_cast<std::size_t>(written));
    } else if (errno != EINTR) {
      const int reason = errno;
      discard();
      fail_io(who_, path_, "writable", reason);
    }
  }
}

void WholeFile::commit() {
  int reason = replace_ && fsync(file_) != 0 ? errno : 0;
  if (close(std::exchange(file_, -1)) != 0 && reason == 0) reason = errno;
  if (reason == 0 && replace_ && std::rename(aside_.c_str(), target_.c_str()) != 0) reason = errno;
  if (reason != 0) {
    if (replace_) std::remove(aside_.c_str());
    fail_io(who_, path_, "writable", reason);
  }
  if (!replace_) return;
  const std::string folder = std::filesystem::path(target_).parent_path().string();
  sync_folder(folder.empty() ? "." : folder, who_.c_str());
}

void write_whole(const std::string& path, std::string_view bytes, const char* who) {
  WholeFile file(path, who);
  file.write(bytes);
  file.commit();
}

void sync_folder(const std::string& path, const char* who) {
  const int folder = open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (folder < 0) fail_io(who, path, "a folder", errno);
  const int reason = fsync(folder) == 0 ? 0 : errno;
  close(folder);
  // Some file systems keep no names that could be brought anywhere, and say so.
  if (reason != 0 && reason != EINVAL) fail_io(who, path, "writable", reason);
}

FolderLock::FolderLock(const std::string& path)
    : folder_(::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC)) {
  if (folder_ < 0 || ::flock(folder_, LOCK_EX | LOCK_NB) == 0 || errno != EWOULDBLOCK) return;
  ::close(folder_);
  throw Error(Errc::kIo, path +
                             ": is in use: another run is under way there; wait for it, or take "
                             "another folder");
}

FolderLock::~FolderLock() {
  if (folder_ >= 0) ::close(folder_);
}

MappedFile::MappedFile(const std::string& path, const char* who) {
  const int file =
      open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);  // a pipe would wait for a writer
  if (file < 0) fail_io(who, path, "readable", errno);
  struct stat there{};
  int reason = fstat(file, &there) == 0 ? 0 : errno;
  if (reason == 0 && S_ISDIR(there.st_mode)) reason = EISDIR;
  if (reason == 0 && !S_ISREG(there.st_mode)) reason = ENODEV;  // what mapping it would say
  const auto size = static_cast<std::size_t>(there.st_size);
  if (reason == 0 && size > 0) {
    // Private and writable: the memory is as any other, the file stays as it is. No room is set aside for copies
    // of pages that nobody may ever write.
    void* address =
        mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_NORESERVE, file, 0);
    if (address == MAP_FAILED) {
      reason = errno;
    } else {
      bytes_ = {static_cast<std::byte*>(address), size};
    }
  }
  close(file);
  if (reason != 0) fail_io(who, path, "readable", reason);
}

MappedFile::~MappedFile() {
  if (!bytes_.empty()) munmap(bytes_.data(), bytes_.size());
}

std::string read_whole(const std::string& path, const char* who) {
  const int file = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (file < 0) fail_io(who, path, "readable", errno);
  std::string bytes;
  std::array<char, 1 << 16> piece;
  ssize_t got = 0;
  do {
    got = read(file, piece.data(), piece.size());
    if (got > 0) bytes.append(piece.data(), static_cast<std::size_t>(got));
  } while (got > 0 || (got < 0 && errno == EINTR));
  const int reason = errno;
  close(file);
  if (got < 0) fail_io(who, path, "readable", reason);
  return bytes;
}

}  // namespace mlxtape
