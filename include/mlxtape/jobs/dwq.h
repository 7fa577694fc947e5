// dwq: a packed model is brought nearer to the one it was made from: its scales and biases learn, its codes stay.
//
//   models::Model student = quantize_model(*encoder, teacher, usual_packing({2, 64}));
//   const DwqResult r = dwq(*encoder, student, {.model = &teacher}, train, valid);
//
// Formula    loss = Σ m·KL(softmax(t/T) ‖ softmax(z/T)) / Σ m over a batch's tokens, t and z the teacher's and the student's
//            logits, T = 2, without a factor T²; m = 1 where the batch has a target, so that padding does not count.
//            With stored targets t are its k largest, z is taken where they were, and both softmaxes are over those k.
// Learns     scales and biases of every weight packed in less than 8 bits, which leaves routers as they are; masters and Adam
//            in f32, with bias correction, without decay; one pass over the batches at one rate. As mlx-lm's dwq, which does
//            not freeze norms, filters, decays and biases of projections either: with others they learn too.
// Validation the same loss over valid, before, every validate_every steps, after. Where it ends above where it began, the
//            student gets the values of the lowest one, and the result says so.
// Memory     of the teacher's and the student's logits some rows at a time (jobs/evaluate.h). With a resident teacher both
//            models; where both are of the same files on a CPU, what they share is there once. With targets no teacher.
// Resume     by fit, to the same bits; the student must be made, or loaded, as it was for the run.
#pragma once

#include <string>

#include "mlxtape/jobs/dwq_targets.h"
#include "mlxtape/jobs/fit.h"

namespace mlxtape::jobs {

// One of the two.
struct DwqTeacher {
  const models::Model* model = nullptr;  // on the student's device
  const Targets* targets = nullptr;
};

// What mlx-lm's dwq takes: its samples, batches and steps.
struct DwqData {
  std::int64_t samples = 2048, valid_samples = 32;
  BatchOptions batches{.max_tokens = 1025, .seed = 123};
};
// iterations 0: one pass over the batches.
FitOptions dwq_fit();

struct DwqOptions {
  FitOptions fit = dwq_fit();
  double temperature = 2;
  bool others = false;          // norms and all that is never packed learn too
  bool checkpoint = false;      // layers are computed again on the way back
  std::int64_t chunk_rows = 0;  // of logits at a time; 0: as many as are quick
};

struct DwqResult {
  FitResult fit;
  std::int64_t trained = 0;  // numbers that learned
  double initial = 0, final = 0;
  // The final loss is above the initial one: the student has the values of fit.held_step, whose loss is kept.
  bool worse = false;
  double kept = 0;
  std::string warning;  // a line for people; empty where all is well
};

// What can learn, in the order of a file.
std::vector<Trainable> dwq_trainables(const models::Model& student, bool others = false);

// student: what learns is put into new memory first, so that no copy of it changes.
DwqResult dwq(CommandEncoder& encoder, models::Model& student, const DwqTeacher& teacher,
              const Batches& train, const std::vector<Batch>& valid, const DwqOptions& options = {},
              const FitHooks& hooks = {});

}  // namespace mlxtape::jobs
