#include "mlxtape/base/files.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>

#include "mlxtape/base/error.h"

namespace mlxtape {

void write_whole(const std::string& path, std::string_view bytes, const char* who) {
  static std::atomic<unsigned> number{0};  // two threads may write the same path
  struct stat there{};
  const bool exists = stat(path.c_str(), &there) == 0;
  const bool replace = !exists || S_ISREG(there.st_mode);
  std::string target = path;  // a pipe or a terminal is written to, not replaced
  std::string aside = path;
  if (replace) {
    std::error_code no_link;
    if (exists)
      target = std::filesystem::canonical(path, no_link).string();  // the file, not a link
    if (no_link) target = path;
    aside = target + ".tmp" + std::to_string(getpid()) + "." + std::to_string(number.fetch_add(1));
  }
  const auto fail = [&](int reason) {
    if (replace) std::remove(aside.c_str());
    throw Error(Errc::kIo,
                std::string(who) + ": " + path + " must be writable, got " + std::strerror(reason));
  };
  const int file = open(aside.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
  if (file < 0) fail(errno);
  if (exists && replace) static_cast<void>(fchmod(file, there.st_mode & 07777U));
  int reason = 0;
  while (reason == 0 && !bytes.empty()) {
    const ssize_t written = write(file, bytes.data(), bytes.size());
    if (written < 0) {
      if (errno != EINTR) reason = errno;
    } else {
      bytes.remove_prefix(static_cast<std::size_t>(written));
    }
  }
  if (reason == 0 && replace && fsync(file) != 0) reason = errno;
  if (close(file) != 0 && reason == 0) reason = errno;
  if (reason == 0 && replace && std::rename(aside.c_str(), target.c_str()) != 0) reason = errno;
  if (reason != 0) fail(reason);
}

std::string read_whole(const std::string& path, const char* who) {
  const auto fail = [&](int reason) {
    throw Error(Errc::kIo,
                std::string(who) + ": " + path + " must be readable, got " + std::strerror(reason));
  };
  const int file = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (file < 0) fail(errno);
  std::string bytes;
  std::array<char, 1 << 16> piece;
  ssize_t got = 0;
  do {
    got = read(file, piece.data(), piece.size());
    if (got > 0) bytes.append(piece.data(), static_cast<std::size_t>(got));
  } while (got > 0 || (got < 0 && errno == EINTR));
  const int reason = errno;
  close(file);
  if (got < 0) fail(reason);
  return bytes;
}

}  // namespace mlxtape
