#include "mlxtape/base/files.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <utility>

#include "mlxtape/base/error.h"
#include "mlxtape/base/mapped_ranges.h"
#include "mlxtape/base/quote.h"
#include "mlxtape/base/temporary.h"

namespace mlxtape {

namespace {

[[noreturn]] void fail_io(const std::string& who, const std::string& path, const char* what,
                          int reason) {
  throw Error(Errc::kIo, who + ": " + path + " must be " + what + ", got " + std::strerror(reason));
}

const char* kind_of(mode_t mode) {
  if (S_ISDIR(mode)) return "a folder";
  if (S_ISFIFO(mode)) return "a pipe";
  if (S_ISSOCK(mode)) return "a socket";
  return "a device";
}

// To be read and closed by the caller. A pipe or a device may never end, and opening one would wait for a writer.
int open_regular(const std::string& path, const std::string& who, std::size_t& size) {
  const int file = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (file < 0) fail_io(who, path, "readable", errno);
  struct stat there{};
  const int reason = fstat(file, &there) == 0 ? 0 : errno;
  if (reason == 0 && S_ISREG(there.st_mode)) {
    size = static_cast<std::size_t>(there.st_size);
    return file;
  }
  close(file);
  if (reason != 0) fail_io(who, path, "readable", reason);
  throw Error(Errc::kIo, who + ": " + path + " must be a file, got " + kind_of(there.st_mode));
}

// Appends up to `most` bytes; false: the file has ended. The caller's file stays open whatever happens.
bool read_more(int file, const std::string& path, const std::string& who, std::size_t most,
               std::string& bytes) {
  const std::size_t before = bytes.size();
  bytes.resize(before + most);
  ssize_t got = 0;
  do got = read(file, bytes.data() + before, most);
  while (got < 0 && errno == EINTR);
  const int reason = errno;
  bytes.resize(before + static_cast<std::size_t>(std::max<ssize_t>(got, 0)));
  if (got < 0) fail_io(who, path, "readable", reason);
  return got > 0;
}

// Written at a time: macOS refuses 2 GiB.
constexpr std::size_t kMostWritten = std::size_t{1} << 30U;

// Bytes that are read at a time. One more than a small file has: the read that takes all of it need not clear more memory
// than the file fills.
std::size_t piece_for(std::size_t size) {
  return std::clamp(size + 1, std::size_t{1} << 12U, std::size_t{1} << 18U);
}

struct Closed {
  int number;
  ~Closed() { close(number); }
};

// fsync that reaches the disk. macOS leaves the bytes in the drive's own cache unless it is asked in another
// way, which some file systems refuse.
int to_disk(int file) {
#ifdef F_FULLFSYNC
  if (fcntl(file, F_FULLFSYNC) == 0) return 0;
#endif
  return fsync(file);
}

}  // namespace

WholeFile::WholeFile(std::string path, std::string who, Links links)
    : path_(std::move(path)), who_(std::move(who)), target_(path_), aside_(path_) {
  struct stat there{};
  const bool follow = links == Links::kFollow;
  const bool is_link = !follow && lstat(path_.c_str(), &there) == 0 && S_ISLNK(there.st_mode);
  const bool exists = !is_link && stat(path_.c_str(), &there) == 0;
  replace_ = !exists || S_ISREG(there.st_mode);
  if (!replace_) {  // a pipe or a terminal is written to, not replaced
    file_ = open(path_.c_str(), O_WRONLY | O_TRUNC | O_CLOEXEC);
  } else {
    std::error_code no_link;
    if (exists)
      target_ = std::filesystem::canonical(path_, no_link).string();  // the file, not a link
    if (no_link) target_ = path_;
    do {  // another machine, or a process that died, may have left a file of that name
      aside_ = temporary_path(target_);
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
    const ssize_t written = ::write(file_, bytes.data(), std::min(bytes.size(), kMostWritten));
    if (written >= 0) {
      bytes.remove_prefix(static_cast<std::size_t>(written));
    } else if (errno != EINTR) {
      const int reason = errno;
      discard();
      const char* from = reason == EFAULT ? mapped_file_at(bytes.data()) : nullptr;
      if (from != nullptr) {
        throw Error(Errc::kIo, who_ + ": " + from + " became shorter while it was in use");
      }
      fail_io(who_, path_, "writable", reason);
    }
  }
}

void WholeFile::commit() {
  int reason = replace_ && to_disk(file_) != 0 ? errno : 0;
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

void write_whole(const std::string& path, std::string_view bytes, const char* who,
                 WholeFile::Links links) {
  WholeFile file(path, who, links);
  file.write(bytes);
  file.commit();
}

void sync_folder(const std::string& path, const char* who) {
  const int folder = open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (folder < 0) fail_io(who, path, "a folder", errno);
  const int reason = to_disk(folder) == 0 ? 0 : errno;
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
  std::size_t size = 0;
  const int file = open_regular(path, who, size);
  int reason = 0;
  if (size > 0) {
    // Private and writable: the memory is as any other, the file stays as it is. No room is set aside for copies
    // of pages that nobody may ever write.
    void* address =
        mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_NORESERVE, file, 0);
    if (address == MAP_FAILED) {
      reason = errno;
    } else {
      bytes_ = {static_cast<std::byte*>(address), size};
      note_mapped(bytes_,
                  escaped(path));  // for a message that may come where nothing can be escaped
    }
  }
  close(file);
  if (reason != 0) fail_io(who, path, "readable", reason);
}

MappedFile::~MappedFile() {
  if (bytes_.empty()) return;
  forget_mapped(bytes_);
  munmap(bytes_.data(), bytes_.size());
}

std::string read_whole(const std::string& path, const char* who, std::size_t most) {
  std::size_t size = 0;
  const Closed file{open_regular(path, who, size)};
  const auto check = [&](std::size_t bytes) {
    if (bytes > most) {
      throw Error(Errc::kIo, std::string(who) + ": " + path + " must have at most " +
                                 std::to_string(most) + " bytes, got " + std::to_string(bytes) +
                                 " or more");
    }
  };
  check(size);
  const std::size_t piece = piece_for(size);
  std::string bytes;
  bytes.reserve(size + piece);
  // Until nothing comes, not up to the size: it may grow, and some files of the system have none.
  while (read_more(file.number, path, who, piece, bytes)) check(bytes.size());
  return bytes;
}

FileLines::FileLines(std::string path, std::string who)
    : path_(std::move(path)), who_(std::move(who)) {
  std::size_t size = 0;
  file_ = open_regular(path_, who_, size);
  piece_bytes_ = piece_for(size);
}

FileLines::~FileLines() { close(file_); }

bool FileLines::next(std::string& line) {
  std::size_t searched = at_;
  std::size_t end = 0;
  while ((end = piece_.find('\n', searched)) == std::string::npos) {
    if (piece_.size() - at_ > kMaxLineBytes) {
      throw Error(Errc::kIo, who_ + ": " + path_ + ": line " + std::to_string(number_ + 1) +
                                 " must have at most " + std::to_string(kMaxLineBytes) + " bytes");
    }
    piece_.erase(0, std::exchange(at_, 0));
    searched = piece_.size();
    if (!read_more(file_, path_, who_, piece_bytes_, piece_)) break;
  }
  const bool last = end == std::string::npos;
  if (last && at_ == piece_.size()) return false;
  line.assign(piece_, at_, last ? std::string::npos : end - at_);
  at_ = last ? piece_.size() : end + 1;
  ++number_;
  return true;
}

}  // namespace mlxtape
