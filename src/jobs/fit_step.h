// FitStep: one step of a training run on the device: the gradients of its batches, their norm, the optimiser. Waits for nothing.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "gradient_sum.h"
#include "mlxtape/jobs/fit.h"
#include "step_graphs.h"

namespace mlxtape::jobs {

class FitStep {
 public:
  // All of these must outlive it.
  FitStep(CommandEncoder& encoder, const Objective& objective, const FitOptions& options,
          std::vector<OptimiserSlot>& slots);

  void begin(std::int64_t steps_done);
  // Queues the step after so many; returns how many tokens it learns from.
  std::int64_t queue(std::int64_t steps_done);
  // Of the step queued last, on the device: the sum over its batches, and the norm before clipping.
  const Tensor& loss_sum() const { return loss_sum_; }
  const Tensor& norm() const { return norm_; }

  // Drops graphs and memory until the next step.
  void release();
  std::size_t replays() const { return graphs_.replays(); }

 private:
  void queue_batch(bool is_first, const std::string& shape);
  void add_batch(std::vector<GradientSum>& sums);
  std::vector<GradientSum> batch_gradients();
  bool has_row_gradients();
  void check_recorded(const Recorded& recorded) const;
  void clear_loss();
  void update(const std::vector<GradientSum>& sums);
  Tensor guarded(const Tensor& scale);

  CommandEncoder& encoder_;
  const Objective& objective_;
  const FitOptions& options_;
  std::vector<OptimiserSlot>& slots_;
  StepGraphs graphs_;
  std::vector<GradientSum> totals_;  // of captured batches: dense, in place
  std::optional<bool> by_rows_;      // whether some gradients are; known from the first batch on
  // The step's numbers, on the device; they stay in place, for replays.
  Tensor t_, rate_, loss_sum_, norm_;
  Tensor fault_;  // 0; NaN from the first step on whose loss or norm is not finite
};

}  // namespace mlxtape::jobs
