// fit: the loop of every training job: gradients of a loss, optimiser steps, validation, and a checkpoint on disk from which a
// run resumes with the same bits as if it had never stopped.
//
// Formula    step t = 1 … iterations: g = 1/A·Σ of the gradients of batches A·(t−1) … A·t − 1, A = accumulation;
//            g scaled to a norm of at most clip; the optimiser's step (mlxtape/jobs/optimiser.h) at the rate of t.
//            rate(t) = learning_rate·t/warmup up to warmup; then learning_rate, or with cosine
//            final + (learning_rate − final)·(1 + cos(π·u))/2, u = (t − warmup)/(iterations − warmup), final = learning_rate·final_share
// Rows       a row-sparse gradient (mlxtape/tape/rows.h), of an embedding that is not also the head, is stepped by rows: rows
//            that no token selected stay unchanged. With lazy_rows off every row decays, as in mlx-lm, and also where the
//            optimiser takes no rows.
// State      in a folder (mlxtape/jobs/run_folder.h) state.safetensors: master weights, the optimiser's states, t, the best so
//            far and what was reported, in one file that is written atomically; best.safetensors: the trainables at the lowest
//            validation loss, written after a state of that step. Both end with a checksum, verified before anything in them
//            is used: a damaged file is an error and is left as it is. States of format 1 had no checksum and are refused.
//            A batch is a function of its number, and so must be whatever else the objective draws: nothing else needs to be
//            saved. The same bits are promised on the same device.
//            A state belongs to a run with the same options and fingerprint: another is an error that says which setting
//            differs. Free to change are report_every, save_every and, without cosine, iterations.
//            If there is a state and resume is off, it is an error: a run must not overwrite another.
// Capture    on devices whose traits say that it pays, the whole step is captured once for each shape of batch and replayed,
//            with the same bits. With accumulation the gradients of a batch are captured by shape and the update apart; where
//            some of these gradients are row-sparse, nothing is.
// Waiting    the host reads the loss and norm of a step once the next step is queued, or earlier where they are needed: for a
//            report, a validation, a state.
// Errors     a loss or norm, or weights to be saved or returned, that are not finite: NotFinite, which says at which step, that
//            neither it nor the step after it was kept, and how to resume: the state on disk is the last good one. A state that
//            cannot be written: kIo; the previous one is untouched. Either message describes the state only after reading it.
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

// Whose values the trainables hold at the end: the last step's, those of the lowest validation, or of that only where the
// last validation is above the first and the run was not stopped.
enum class EndWith { kLast, kBest, kBestIfWorse };

// What a job gives fit to do.
struct FitTask {
  std::vector<Trainable> trainables;
  Objective objective;
  std::function<double()> validate = {};  // the loss that counts; none: there is no validation
  // Files beside the state: it is on the disk and of this step, written just now or found where a run goes on.
  std::function<void(std::int64_t step)> with_state = {};
  EndWith end_with = EndWith::kLast;
};

struct FitPoint {
  std::int64_t step = 0;
  double loss = 0;  // mean of the steps since the last point, or of the validation
  double rate = 0, norm = 0,
         tokens_per_second = 0;  // rate and norm, before it is clipped, of that step
};

struct FitOptions {
  std::int64_t iterations = 1000, accumulation = 1;
  double learning_rate = 1e-5;
  std::int64_t warmup = 0;
  bool cosine = false;
  double final_share = 0;
  double clip = 0;  // 0: none
  OptimiserPtr optimiser = std::make_shared<AdamW>();
  bool lazy_rows = true;
  std::optional<bool> capture;  // of steps; unset: as the device's traits say
  std::int64_t report_every = 10, validate_every = 200, save_every = 100;  // 0: at the end alone
  std::string folder;   // empty: no state is written
  bool resume = false;  // go on from the folder's state; begin where there is none yet
  std::map<std::string, std::string>
      fingerprint;  // what a state must agree on beside these options: data, model, …
};

// What a caller wants to be told.
struct FitHooks {
  std::function<void(std::int64_t step)>
      on_resumed;                                  // before anything else, where a state was found
  std::function<void(std::int64_t step)> on_step;  // after each, for progress
  std::function<void(const FitPoint&)> on_report;  // every report_every steps
  std::function<void(const FitPoint&)>
      on_validated;  // before the first step, every validate_every, after the last
  std::function<void(std::int64_t step)> on_saved;
  std::function<bool()> stop;  // asked after each step: true saves the state and returns
};

struct FitResult {
  std::int64_t steps = 0;  // of the run in all, also before it was resumed
  bool stopped = false;
  std::vector<FitPoint> reports, validations;  // of the whole run
  std::int64_t best_step = -1;                 // -1: never validated
  double best_loss = 0;
  std::int64_t held_step = 0;  // whose values the trainables hold
  std::size_t peak_bytes = 0;
  // Since this call:
  std::int64_t replays = 0;  // of captured steps, or with accumulation of batches and updates
  double seconds = 0;
};

double learning_rate_at(const FitOptions& options, std::int64_t step);
Check fit_check(const std::vector<Trainable>& trainables, const FitOptions& options);

FitResult fit(CommandEncoder& encoder, const FitTask& task, const FitOptions& options,
              const FitHooks& hooks = {});

// Values by name from a file that fit wrote, state or best, into tensors that are there.
void load_trainables(CommandEncoder& encoder, const std::string& file,
                     const std::vector<Trainable>& trainables);

}  // namespace mlxtape::jobs
