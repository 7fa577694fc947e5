// Targets: a teacher's predictions for every batch, stored once, so that the student can be trained without the teacher in
// memory.
//
// Files      <folder>/{train,valid}/0000000012.safetensors, numbered like the batches: logits [rows, length, k], the k largest,
//            in the teacher's type, and indices u32, their positions: the format of mlx-lm's dwq.
//            The metadata has a hash of the logits, the indices, the manifest and the number.
//            <folder>/manifest.json: what the targets were made from. It is written first, then the files one by one, each
//            atomically: an incomplete set continues where it stopped.
// Errors     kArgument: a manifest that differs from the plan; the message names the key and both values. kIo: no manifest,
//            although there are files or they are to be read; a batch's file that is missing, does not match the manifest or
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
  BatchOptions options;            // of train; recorded in the manifest
  std::int64_t train_batches = 0;  // 0: one pass
  std::int64_t k = 1024;           // or the vocabulary size if that is smaller
  std::string tokenizer, teacher;  // tokenizer_fingerprint, model_fingerprint of their folders
};

// Of config.json, and of each weight file its size, its first bytes and samples of the rest. 16 hexadecimal digits.
std::string model_fingerprint(const std::string& folder);
std::string tokenizer_fingerprint(const std::string& folder);  // of tokenizer.json

struct WriteTargetsHooks {
  std::function<void(std::int64_t done, std::int64_t all)> progress;  // batches
  std::function<bool()> stop;  // called after each: true stops
};
struct WroteTargets {
  std::int64_t written = 0, found = 0;  // batches written now, and those already there
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
  // The manifest must match the plan, and every file must exist.
  Targets(std::string folder, const TargetsPlan& plan, std::int64_t vocabulary);

  std::int64_t train_batches() const { return train_batches_; }
  // The manifest as one string.
  const std::string& identity() const { return identity_; }
  BatchTargets load(CommandEncoder& encoder, bool train, std::int64_t number,
                    const Batch& batch) const;

 private:
  std::string folder_, identity_;
  std::int64_t k_ = 0, vocabulary_ = 0, train_batches_ = 0;
};

}  // namespace mlxtape::jobs
