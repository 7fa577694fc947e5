// RunFolder: the files of an unfinished run, their names, and which process may use them.
//
// Files      state.safetensors, the checkpoint, and best.safetensors (mlxtape/jobs/fit.h). For lora (mlxtape/jobs/lora.h) also
//            the result: adapters.safetensors, adapter_config.json, and 0000100_adapters.safetensors for each save.
// Threads    An object: one thread at a time. enter() keeps other processes out.
#pragma once

#include <memory>
#include <string>

#include "mlxtape/base/files.h"

namespace mlxtape::jobs {

class RunFolder {
 public:
  RunFolder() = default;  // none: no checkpoint is kept
  explicit RunFolder(std::string path) : path_(std::move(path)) {}
  // The folder of a run whose result will be at output: <output>.state.
  static RunFolder beside(const std::string& output);

  bool is_used() const { return !path_.empty(); }
  const std::string& path() const { return path_; }

  std::string state() const { return file(kState); }
  std::string best() const { return file(kBest); }
  std::string adapters(std::int64_t step) const;  // of one save
  std::string adapter_config() const;

  bool has_state() const;
  // Why the run cannot be resumed: its checkpoint is missing, or a file is damaged. Empty: it can; both files were read.
  std::string fault() const;
  // Are these state.safetensors and best.safetensors as fit writes them? Judged by their headers: the content may be damaged.
  static bool is_state_file(const std::string& path);
  static bool is_best_file(const std::string& path);
  // Why no run may start here: there is no checkpoint, but a file with a name that a run would write. Empty: it may.
  std::string new_run_fault() const;
  // The first file that is a result of lora, or is left from a run without a checkpoint; empty: there is none.
  std::string result() const;
  // The first of these that no run wrote; links, which are replaced and not followed, do not count.
  std::string strange_result() const;
  // The files to delete in order to start over, in words.
  static std::string names_of_state() { return std::string(kState) + " and " + kBest; }

  // Creates the folder, keeps other processes out while this or a copy of it lives, and removes half-written files of a
  // process that was killed. Throws kIo if another run is using the folder, and for what new_run_fault reports.
  void enter();
  // Deletes the checkpoint and best if fit wrote them, and the folder if nothing else is in it. Throws kIo.
  void remove() const;

 private:
  static constexpr const char *kState = "state.safetensors", *kBest = "best.safetensors";
  std::string file(const std::string& name) const { return path_ + "/" + name; }
  void remove_half_written() const;

  std::string path_;
  std::shared_ptr<FolderLock> lock_;
};

}  // namespace mlxtape::jobs
