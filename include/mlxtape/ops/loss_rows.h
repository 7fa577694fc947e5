// loss_rows: the weight of each row of a loss, and the sum or mean over rows. Shared by the losses over
// rows (cross_entropy, kl_divergence); use it to write another.
//
// Formula    w[r]   = 0 where target[r] = ignore_index, else mask[r], 1 without a mask;
//            weight = w[r], but NaN where w[r] ≠ 0 and target[r] is outside [0, V)
//            scale  = 1 for none and sum; for mean 1/Σ_r w[r], and 0 if that sum is 0
//            loss   = l[r] for none, else scale·Σ_r l[r], of row losses l that include their weight
// Gradient   none is recorded: a loss includes weight and scale in its own.
// Layout     mask, targets: any shape of R elements. weight: [R]; index: [R], the target, or −1 if
//            it is outside; scale: []. loss: [R] or [].
// Types      mask: bool (1 or 0), f32, f16, bf16. targets: i32, u32, i64. weight, scale, l, loss: f32;
//            index: i64. Sums are f64 on a CPU, f32 on a GPU, in a fixed order.
// Cost       reads and writes a few numbers per row; one small kernel each.
// Limits     R = 0: a sum and a mean of nothing are 0. The host does not wait: a target outside [0, V)
//            cannot be rejected, its row's loss and gradient are NaN.
#pragma once

#include <optional>

#include "mlxtape/base/error.h"
#include "mlxtape/core/encoder.h"

namespace mlxtape::ops {

enum class Reduction : std::int32_t { kNone, kSum, kMean };

struct LossRows {
  Tensor weight;  // [R] f32
  Tensor index;   // [R] i64; undefined without targets
  Tensor scale;   // [] f32

  LossRows slice(std::int64_t start, std::int64_t stop) const;  // some of the rows; the same scale
};

// What decides how rows count: targets, with classes = V, and a mask; either may be left out.
struct LossRowsOptions {
  Tensor mask = {};
  Tensor targets = {};
  std::int64_t classes = 0;  // V
  std::optional<std::int64_t> ignore_index = {};
  Reduction reduction = Reduction::kNone;
};

// The contract as code: the first rule violated, or nothing. rows: R, on the device of the loss.
Check loss_rows_check(std::int64_t rows, Backend backend, const LossRowsOptions& options);
Check loss_rows_reduce_check(const Tensor& losses, const LossRows& rows);

LossRows loss_rows(CommandEncoder& encoder, std::int64_t rows, const LossRowsOptions& options);

// losses: [R] f32.
Tensor loss_rows_reduce(CommandEncoder& encoder, const Tensor& losses, const LossRows& rows,
                        Reduction reduction);

}  // namespace mlxtape::ops
