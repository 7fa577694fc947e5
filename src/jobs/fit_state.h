// What a fit keeps on the disk.
#pragma once

#include <optional>

#include "mlxtape/base/files.h"
#include "mlxtape/formats/safetensors.h"
#include "mlxtape/jobs/fit.h"

namespace mlxtape::jobs {

// The numbers of a run.
struct FitProgress {
  std::int64_t step = 0;
  std::vector<FitPoint> reports, validations;
  std::int64_t best_step = -1;
  double best_loss = 0;
  // Of the steps since the last report.
  double loss = 0, seconds = 0;
  std::int64_t steps = 0, tokens = 0;
};

// One trainable and what belongs to it.
struct FitSlot {
  std::string name;
  Tensor w, master, m, v;  // master is not defined where w is f32

  const Tensor& value() const { return master.defined() ? master : w; }
};

class FitFolder {
 public:
  // validates: there is a validation, so that its steps matter.
  FitFolder(const FitOptions& options, bool validates);
  FitFolder(const FitFolder&) = delete;
  FitFolder& operator=(const FitFolder&) = delete;

  bool is_used() const { return !path_.empty(); }
  bool has_state() const;
  // Makes the folder, keeps other processes out as long as this lives, and removes what a process has left there that was
  // killed while it wrote. Throws kIo where another run is under way in it.
  void prepare();

  // Whatever goes wrong, the files before are whole. The encoder's work is waited for.
  void write_state(CommandEncoder& encoder, const std::vector<FitSlot>& slots,
                   const FitProgress& progress);
  void write_best(CommandEncoder& encoder, const std::vector<FitSlot>& slots,
                  const FitProgress& progress) const;
  // Fills the slots' tensors. Throws kIo for a file that does not fit, kArgument for one of another run.
  FitProgress read_state(CommandEncoder& encoder, const std::vector<FitSlot>& slots);
  bool has_best(std::int64_t step) const;

  std::string state() const { return path_ + "/state.safetensors"; }
  std::string best() const { return path_ + "/best.safetensors"; }
  // What there is to go on from, in words; the files are read for that.
  std::string last_state() const;

 private:
  void check_settings(const formats::SafetensorsFile& file) const;

  std::string path_;
  std::map<std::string, std::string> options_, fingerprint_;
  std::optional<FolderLock> lock_;
  std::int64_t saved_ = -1;  // the step of the state on the disk
};

}  // namespace mlxtape::jobs
