// Files that are there whole or not at all, and files as memory.
//
// Threads    Functions: any. An object: one thread at a time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

namespace mlxtape {

// A file in the making. It is written beside its place, and commit brings it to the disk and renames it:
// whatever happens, path holds the old bytes or the new ones. A file keeps its rights, and a link stays a link unless it is
// to be replaced. A path that is no file (a pipe, /dev/null) is just written to. Errors are kIo and begin with who asked; without
// commit, and after an error, nothing is left behind.
class WholeFile {
 public:
  // What becomes of a link at path. kReplace is for folders of results: nothing outside of them is written.
  enum class Links { kFollow, kReplace };

  WholeFile(std::string path, std::string who, Links links = Links::kFollow);
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

void write_whole(const std::string& path, std::string_view bytes, const char* who,
                 WholeFile::Links links = WholeFile::Links::kFollow);

// What read_whole takes unless it is told otherwise: more than the tokenizers that there are have.
inline constexpr std::size_t kMaxReadBytes = std::size_t{512} << 20U;

// All bytes of a regular file of at most `most` bytes. Anything else that has a path (a folder, a pipe, a device) is
// refused, and not waited for. Throws kIo.
std::string read_whole(const std::string& path, const char* who, std::size_t most = kMaxReadBytes);

// The lines of a regular file, one after the other: only the one that is asked for is in memory. Throws kIo, also for
// a line of more than kMaxLineBytes.
class FileLines {
 public:
  static constexpr std::size_t kMaxLineBytes = std::size_t{256} << 20U;

  FileLines(std::string path, std::string who);
  FileLines(const FileLines&) = delete;
  FileLines& operator=(const FileLines&) = delete;
  ~FileLines();

  bool next(std::string& line);                    // without its end; false: there are no more
  std::int64_t number() const { return number_; }  // of the last one; the first is 1

 private:
  std::string path_, who_;
  int file_ = -1;
  std::size_t piece_bytes_ = 0;  // read at a time
  std::string piece_;            // of the file
  std::size_t at_ = 0;           // what was given out of it
  std::int64_t number_ = 0;
};

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
// stays in this process. The file must not become shorter meanwhile: the system sends SIGBUS to a process that touches
// what is gone, and mapped_file_at (mapped_ranges.h) knows which file it was. Throws kIo.
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
