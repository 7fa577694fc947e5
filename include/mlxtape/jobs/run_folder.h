// RunFolder: the files that a run keeps while it is not done, their names, and who may work on them.
//
// Files      state.safetensors, best.safetensors (mlxtape/jobs/fit.h). Of lora (mlxtape/jobs/lora.h) also what it is to give:
//            adapters.safetensors, adapter_config.json, and 0000100_adapters.safetensors of each save.
// Threads    An object: one thread at a time. Processes keep out of each other's way by enter().
#pragma once

#include <memory>
#include <string>

#include "mlxtape/base/files.h"

namespace mlxtape::jobs {

class RunFolder {
 public:
  RunFolder() = default;  // none: nothing is kept
  explicit RunFolder(std::string path) : path_(std::move(path)) {}
  // The one of a run whose result will be at output: <output>.state.
  static RunFolder beside(const std::string& output);

  bool is_used() const { return !path_.empty(); }
  const std::string& path() const { return path_; }

  std::string state() const { return file(kState); }
  std::string best() const { return file(kBest); }
  std::string adapters(std::int64_t step) const;  // of one save
  std::string adapter_config() const;

  bool has_state() const;
  // Why the run cannot go on: its state is missing, or a file of it is damaged. Empty: it can; both were read.
  std::string fault() const;
  // state.safetensors and best.safetensors as fit writes them, by their headers: what they hold may be damaged.
  static bool is_state_file(const std::string& path);
  static bool is_best_file(const std::string& path);
  // Why no run may begin here: there is no state, but a file of a name that the run would write. Empty: it may.
  std::string new_run_fault() const;
  // The first of the files that lora gives, or of a run that lost its state; empty: none is there.
  std::string result() const;
  // The first of these that no run wrote. Links are replaced, not followed: none of them.
  std::string strange_result() const;
  // Both files that must go for a run to begin anew, in words.
  static std::string names_of_state() { return std::string(kState) + " and " + kBest; }

  // Makes the folder, keeps other processes out as long as this or a copy of it lives, and removes what a process has left
  // there that was killed while it wrote. Throws kIo where another run is under way in it, and what new_run_fault says.
  void enter();
  // Takes away state and best, where fit wrote them, and the folder where nothing else is in it. Throws kIo.
  void remove() const;

 private:
  static constexpr const char *kState = "state.safetensors", *kBest = "best.safetensors";
  std::string file(const std::string& name) const { return path_ + "/" + name; }
  void remove_half_written() const;

  std::string path_;
  std::shared_ptr<FolderLock> lock_;
};

}  // namespace mlxtape::jobs
