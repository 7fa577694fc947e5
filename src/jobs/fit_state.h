// What a fit keeps on the disk.
#pragma once

#include "mlxtape/formats/safetensors.h"
#include "mlxtape/jobs/fit.h"
#include "mlxtape/jobs/run_folder.h"

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

// What a state of an optimiser is called in a file.
inline std::string state_name(const std::string& state, const std::string& parameter) {
  return state + ":" + parameter;
}

class FitState {
 public:
  // validates: there is a validation, so that its steps matter.
  FitState(const FitOptions& options, bool validates);

  RunFolder& folder() { return folder_; }
  const RunFolder& folder() const { return folder_; }

  // Whatever goes wrong, the files before are whole. The encoder's work is waited for.
  void write(CommandEncoder& encoder, const std::vector<OptimiserSlot>& slots,
             const FitProgress& progress);
  void write_best(CommandEncoder& encoder, const std::vector<OptimiserSlot>& slots,
                  const FitProgress& progress) const;
  // Fills the slots' tensors. Throws kIo for a file that does not fit, kArgument for one of another run.
  FitProgress read(CommandEncoder& encoder, const std::vector<OptimiserSlot>& slots);
  bool has_best(std::int64_t step) const;

  // What there is to go on from, in words; the files are read for that.
  std::string last() const;

 private:
  // What belongs to a slot in a state, each with its name there.
  std::vector<formats::NamedTensor> tensors_of(const OptimiserSlot& slot) const;
  void check_settings(const formats::SafetensorsFile& file) const;

  RunFolder folder_;
  OptimiserPtr optimiser_;
  Settings options_, fingerprint_;
  std::int64_t saved_ = -1;  // the step of the state on the disk
};

}  // namespace mlxtape::jobs
