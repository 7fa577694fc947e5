// fit: the loop of every training job: gradients of a loss, optimiser steps, validation, and a checkpoint on disk from which a
// run resumes with the same bits as if it had never stopped.
//
// Formula    step t = 1 … iterations: g = 1/A·Σ of the gradients of batches A·(t−1) … A·t − 1, A = accumulation;
//            g scaled to a norm of at most clip; the optimiser's step (mlxtape/jobs/optimiser.h) at the rate of t.
//            rate(t) = learning_rate·t/warmup up to warmup; then learning_rate, or with cosine
//            final + (learning_rate − final)·(1 + cos(π·u))/2, u = (t − warmup)/(iterations − warmup), final = learning_rate·final_share;
//            or, where there is a schedule (mlxtape/jobs/schedule.h), that alone after t − 1 updates.
// Rows       a row-sparse gradient (mlxtape/tape/rows.h), of an embedding that is not also the head, is stepped by rows: rows
//            that no token selected stay unchanged. With lazy_rows off every row decays, as in mlx-lm; so it does if the
//            optimiser does not support rows.
// Checkpoint in a folder (mlxtape/jobs/run_folder.h) state.safetensors: master weights, the optimiser's states, t, the best
//            step so far and the loss history, in one file that is written atomically; best.safetensors: the trainables at the
//            lowest validation loss, written after a checkpoint of that step. Both end with a checksum, verified before they
//            are used: a damaged file is an error and is left as it is. Format 1 had no checksum and is refused.
//            A batch is a function of its number, and so must be any random numbers of the objective: nothing else needs to be
//            saved. The same bits are promised on the same device.
//            A checkpoint belongs to a run with the same options and fingerprint: a difference is an error that names the
//            setting. report_every, save_every and, without cosine, iterations may change.
//            A checkpoint with resume off is an error: a run must not overwrite another.
// Capture    on devices where it is faster (by their traits), the whole step is captured once for each shape of batch and
//            replayed, with the same bits. With accumulation, gradients are captured by shape and the update separately; if
//            some gradients are row-sparse, nothing is captured.
// Waiting    the host reads the loss and norm of a step once the next step is queued, or earlier where they are needed: for a
//            report, a validation, a checkpoint.
// Errors     a loss, norm or weights to be saved that are not finite: NotFinite, which names the step; that step and the next
//            are discarded, and the checkpoint on disk is the last good one. A checkpoint that cannot be written: kIo; the
//            previous one is untouched. Either message describes the checkpoint only after reading it.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "mlxtape/jobs/not_finite.h"
#include "mlxtape/jobs/optimiser.h"
#include "mlxtape/jobs/schedule.h"
#include "mlxtape/tape/tape.h"

namespace mlxtape::jobs {

struct Recorded {
  Tensor loss;                            // one number, on the tape
  std::vector<Tensor> watched;            // the trainables, as watched, in their order
  std::shared_ptr<const void> kept = {};  // released after the backward pass
};

// A batch that has been uploaded.
struct Staged {
  std::string shape;        // equal if the recorded work differs only in uploaded numbers
  std::int64_t tokens = 0;  // targets that count, for the reported tokens per second
};

// The loss to minimise, in two halves. Only the second is captured: for a replayed step it is not called.
struct Objective {
  // Uploads a batch into the tensors that record reads: for batches of one shape the same tensors every time.
  std::function<Staged(std::int64_t batch)> stage;
  // The loss of the batch staged last. If steps are captured it must neither wait nor copy between host and device, nor keep
  // what it makes.
  std::function<Recorded(Tape& tape)> record;
};

// Which step's values the trainables hold at the end: the last, the one with the lowest validation loss, or the latter only
// if the last validation is above the first and the run was not stopped.
enum class EndWith { kLast, kBest, kBestIfWorse };

// What a job passes to fit.
struct FitTask {
  std::vector<Trainable> trainables;
  Objective objective;
  std::function<double()> validate = {};  // the validation loss; unset: no validation
  // For further files of a job: called when a checkpoint of this step is on disk, just written or found on resuming.
  std::function<void(std::int64_t step)> with_state = {};
  EndWith end_with = EndWith::kLast;
};

struct FitPoint {
  std::int64_t step = 0;
  double loss = 0;  // mean over the steps since the last point, or the validation loss
  double rate = 0, norm = 0,
         tokens_per_second = 0;  // that step's rate, and norm before clipping
};

struct FitOptions {
  std::int64_t iterations = 1000, accumulation = 1;
  double learning_rate = 1e-5;
  std::int64_t warmup = 0;
  bool cosine = false;
  double final_share = 0;
  Schedule schedule = {};  // in place of learning_rate, warmup, cosine and final_share
  double clip = 0;         // 0: no clipping
  OptimiserPtr optimiser = std::make_shared<AdamW>();
  bool lazy_rows = true;
  std::optional<bool> capture;  // of steps; unset: as the device's traits say
  std::int64_t report_every = 10, validate_every = 200, save_every = 100;  // 0: at the end only
  std::string folder;   // empty: no checkpoint is written
  bool resume = false;  // from the folder's checkpoint; starts a new run if there is none
  std::map<std::string, std::string>
      fingerprint;  // what must be equal to resume, besides these options: data, model, …
};

// Callbacks for the caller.
struct FitHooks {
  std::function<void(std::int64_t step)> on_resumed;  // first, if a checkpoint was found
  std::function<void(std::int64_t step)> on_step;     // after each, for progress
  std::function<void(const FitPoint&)> on_report;     // every report_every steps
  std::function<void(const FitPoint&)>
      on_validated;  // before the first step, every validate_every, after the last
  std::function<void(std::int64_t step)> on_saved;
  std::function<bool()> stop;  // called after each step: true saves a checkpoint and returns
};

struct FitResult {
  std::int64_t steps = 0;  // of the whole run, including before it was resumed
  bool stopped = false;
  std::vector<FitPoint> reports, validations;  // of the whole run
  std::int64_t best_step = -1;                 // -1: never validated
  double best_loss = 0;
  std::int64_t held_step = 0;  // the step whose values the trainables hold
  std::size_t peak_bytes = 0;
  // Since this call:
  std::int64_t replays = 0;  // of captured steps, or with accumulation of batches and updates
  double seconds = 0;
};

double learning_rate_at(const FitOptions& options, std::int64_t step);
Check fit_check(const std::vector<Trainable>& trainables, const FitOptions& options);

FitResult fit(CommandEncoder& encoder, const FitTask& task, const FitOptions& options,
              const FitHooks& hooks = {});

// Loads values by name from a file that fit wrote, checkpoint or best, into existing tensors.
void load_trainables(CommandEncoder& encoder, const std::string& file,
                     const std::vector<Trainable>& trainables);

}  // namespace mlxtape::jobs
