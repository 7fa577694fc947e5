#include "mlxtape/base/files.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <iterator>

#include "mlxtape/base/error.h"

namespace mlxtape {

void write_whole(const std::string& path, std::string_view bytes, const char* who) {
  static std::atomic<unsigned> number{0};  // two threads may write the same path
  struct stat there{};
  const bool replace = stat(path.c_str(), &there) != 0 || S_ISREG(there.st_mode);
  std::string aside = path;  // a pipe or a terminal is written to, not replaced
  if (replace) {
    aside += ".tmp" + std::to_string(getpid()) + "." + std::to_string(number.fetch_add(1));
  }
  const auto fail = [&] {
    const std::string reason = std::strerror(errno);
    if (replace) std::remove(aside.c_str());
    throw Error(Errc::kIo, std::string(who) + ": " + path + " must be writable, got " + reason);
  };
  const int file = open(aside.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
  if (file < 0) fail();
  while (!bytes.empty()) {
    const ssize_t written = write(file, bytes.data(), bytes.size());
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) {
      const int reason = errno;
      close(file);
      errno = reason;
      fail();
    }
    bytes.remove_prefix(static_cast<std::size_t>(written));
  }
  const bool synced = !replace || fsync(file) == 0;
  const int reason = errno;
  if (close(file) != 0) fail();
  errno = reason;
  if (!synced || (replace && std::rename(aside.c_str(), path.c_str()) != 0)) fail();
}

std::string read_whole(const std::string& path, const char* who) {
  std::ifstream file(path, std::ios::binary);
  std::string bytes((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  if (!file.is_open() || file.bad()) {
    throw Error(Errc::kIo, std::string(who) + ": " + path + " must be readable, got " +
                               std::strerror(errno != 0 ? errno : EIO));
  }
  return bytes;
}

}  // namespace mlxtape
