// Targets: what a teacher says about every batch, stored once, so that the student learns from it without the teacher
// being there.
//
// Files      <folder>/{train,valid}/0000000012.safetensors, numbered as the batches: logits [rows, length, k], the k largest,
//            in the teacher's type, and indices u32, where they were: as mlx-lm's dwq stores them.
//            The metadata has a hash of them, the manifest and the number.
//            <folder>/manifest.json: what they were made from. It is written first, the files one by one, each there whole or
//            not at all: a set that is not complete goes on where it stopped.
// Errors     kArgument: a manifest that differs from what is asked for, naming what and both values. kIo: no manifest,
//            though there are files or they are to be read; a batch's file that is missing, is not what the manifest says or
//            has changed since it was written.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "mlxtape/formats/json.h"
#include "mlxtape/jobs/dataset.h"
#include "mlxtape/models/model.h"

namespace mlxtape::jobs {

// What targets are made from.
struct TargetsPlan {
  const Batches* train = nullptr;
  const std::vector<Batch>* valid = nullptr;
  BatchOptions options;            // of train; told by the manifest
  std::int64_t train_batches = 0;  // 0: one pass
  std::int64_t k = 1024;           // or the vocabulary where that is smaller
  std::string tokenizer, teacher;  // tokenizer_fingerprint, model_fingerprint of their folders
};

// Of config.json, and of each file of weights its size, what it begins with and samples of its bytes. 16 hexadecimal digits.
std::string model_fingerprint(const std::string& folder);
std::string tokenizer_fingerprint(const std::string& folder);  // of tokenizer.json

struct WriteTargetsHooks {
  std::function<void(std::int64_t done, std::int64_t all)> progress;  // batches
  std::function<bool()> stop;                                         // asked after each
};
struct WroteTargets {
  std::int64_t written = 0, found = 0;  // batches now, and those that were there
  bool stopped = false;
};
WroteTargets write_targets(CommandEncoder& encoder, const models::Model& teacher,
                           const TargetsPlan& plan, const std::string& folder,
                           const WriteTargetsHooks& hooks = {});

// Of one batch, on the encoder's device.
struct BatchTargets {
  Tensor values, indices;  // [rows·length, k]
};

class Targets {
 public:
  // The manifest must say what the plan does, and every file must be there.
  Targets(std::string folder, const TargetsPlan& plan, std::int64_t vocabulary);

  std::int64_t train_batches() const { return train_batches_; }
  // All that the manifest says, as one text.
  const std::string& identity() const { return identity_; }
  BatchTargets load(CommandEncoder& encoder, bool train, std::int64_t number,
                    const Batch& batch) const;

 private:
  std::string folder_, identity_;
  std::int64_t k_ = 0, vocabulary_ = 0, train_batches_ = 0;
};

}  // namespace mlxtape::jobs
