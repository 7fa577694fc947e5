// dwq: distilled weight quantisation: a quantised model is trained to match the model that it was made from. Its scales and
// biases are tuned, its codes stay as they are.
//
//   models::Model student = quantize_model(*encoder, teacher, usual_format({2, 64}));
//   const DwqResult r = dwq(*encoder, student, {.model = &teacher}, train, valid);
//
// Formula    loss = Σ m·KL(softmax(t/T) ‖ softmax(z/T)) / Σ m over a batch's tokens, t and z the teacher's and the student's
//            logits, T = 2, without a factor T²; m = 1 for tokens with a target, so that padding does not count.
//            With stored targets t holds the teacher's k largest logits, z is taken at the same indices, and both softmaxes are
//            over those k.
// Trained    scales and biases of every weight with fewer than 8 bits, which leaves out routers; masters and Adam in f32, with
//            bias correction, without weight decay; one pass over the batches at a constant rate. As mlx-lm's dwq, which also
//            trains norms, filters, decays and biases of projections: `others` includes them.
// Validation the same loss over valid: before, every validate_every steps, and after. If it ends higher than it began, the
//            student gets the weights with the lowest loss, and the result says so.
// Memory     the logits of both models for some rows at a time (jobs/evaluate.h). With a resident teacher both models; if both
//            map the same files on a CPU, shared weights are in memory once. With stored targets no teacher.
// Resume     by fit, with the same bits; the student must be made, or loaded, as it was for the first run.
#pragma once

#include <string>

#include "mlxtape/jobs/dwq_targets.h"
#include "mlxtape/jobs/fit.h"

namespace mlxtape::jobs {

// Exactly one of the two.
struct DwqTeacher {
  const models::Model* model = nullptr;  // on the student's device
  const Targets* targets = nullptr;
};

// Samples and batches, with the defaults of mlx-lm's dwq.
struct DwqData {
  std::int64_t samples = 2048, valid_samples = 32;
  BatchOptions batches{.max_tokens = 1025, .seed = 123};
};
// iterations 0: one pass over the batches.
FitOptions dwq_fit();

struct DwqOptions {
  FitOptions fit = dwq_fit();
  double temperature = 2;
  bool others = false;          // also train norms and everything else that is never quantised
  bool checkpoint = false;      // activation checkpointing: recompute layers in the backward pass
  std::int64_t chunk_rows = 0;  // of logits at a time; 0: chosen for speed
};

struct DwqResult {
  FitResult fit;
  std::int64_t trained = 0;  // number of trained values
  double initial = 0, final = 0;
  // The final loss is higher than the initial one: the student has the weights of fit.held_step, whose loss is `kept`.
  bool worse = false;
  double kept = 0;
  std::string warning;  // a line to show the user; empty if all is well
};

// The parameters that can be trained, in the order of a file.
std::vector<Trainable> dwq_trainables(const models::Model& student, bool others = false);

// student: trained parameters are copied to new memory first, so that other copies of the model do not change.
DwqResult dwq(CommandEncoder& encoder, models::Model& student, const DwqTeacher& teacher,
              const Batches& train, const std::vector<Batch>& valid, const DwqOptions& options = {},
              const FitHooks& hooks = {});

}  // namespace mlxtape::jobs
