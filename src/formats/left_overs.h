// What a process leaves beside a model's folder when it is killed while it makes one: <folder>.tmp<process>.<number>, what it
// replaces, with .old behind that name, and the mark of both, with .lock.
#pragma once

#include <filesystem>
#include <string>

namespace mlxtape::formats {

// Tells everybody that a folder of this name, and one with .old behind it, are made by this program, and as long as it lives
// that somebody is at work there: a file beside them that this process has locked. The system lets go of the lock with the
// process, however that ends; where files cannot be locked, nobody ever finds that it has.
class Mark {
 public:
  Mark() = default;
  Mark(const Mark&) = delete;
  Mark& operator=(const Mark&) = delete;
  ~Mark();

  // False, with errno: it cannot be made; EEXIST: another has that name.
  bool set(const std::filesystem::path& folder);
  bool is_set() const { return file_ >= 0; }

 private:
  std::filesystem::path path_;
  int file_ = -1;
};

// Takes away what has a mark that nobody holds, but for files that are not a model's. Where the folder itself is missing,
// what was to be replaced stays.
void remove_left_overs(const std::filesystem::path& folder);

}  // namespace mlxtape::formats
