// Files that are there whole or not at all, and files as memory.
//
// Threads    Functions: any. An object: one thread at a time.
#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <string_view>

namespace mlxtape {

// A file in the making. It is written beside its place, and commit brings it to the disk and renames it:
// whatever happens, path holds the old bytes or the new ones. A link stays a link, a file keeps its rights. A path
// that is no file (a pipe, /dev/null) is just written to. Errors are kIo and begin with who asked; without
// commit, and after an error, nothing is left behind.
class WholeFile {
 public:
  WholeFile(std::string path, std::string who);
  WholeFile(const WholeFile&) = delete;
  WholeFile& operator=(const WholeFile&) = delete;
  ~WholeFile();

  void write(std::string_view bytes);
  void commit();  // once, at the end

 private:
  void discard() noexcept;

  std::string path_, who_;
  std::string target_;  // the file itself where path is a link to it
  std::string aside_;   // what is written to
  int file_ = -1;
  bool replace_ = false;  // aside is renamed to target
};

void write_whole(const std::string& path, std::string_view bytes, const char* who);

// Throws kIo.
std::string read_whole(const std::string& path, const char* who);

// Brings the names in a folder to the disk: what was made, renamed or removed there.
void sync_folder(const std::string& path, const char* who);

// Keeps others out of a folder that lock it too, as long as it lives. The system lets go of it with the process, however that
// ends. Where folders cannot be locked nobody is kept out.
class FolderLock {
 public:
  // Throws kIo where another has it.
  explicit FolderLock(const std::string& path);
  FolderLock(const FolderLock&) = delete;
  FolderLock& operator=(const FolderLock&) = delete;
  ~FolderLock();

 private:
  int folder_ = -1;
};

// The bytes of a file as memory, read from the disk when they are first touched. What is written to the memory
// stays in this process. The file must not become shorter meanwhile: the system ends a process that touches
// what is gone. Throws kIo.
class MappedFile {
 public:
  MappedFile(const std::string& path, const char* who);
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;
  ~MappedFile();

  std::span<std::byte> bytes() const { return bytes_; }

 private:
  std::span<std::byte> bytes_;
};

}  // namespace mlxtape
