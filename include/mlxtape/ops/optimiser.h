// optimiser: updates by AdamW, Adam, SGD, Lion and Muon for many parameters, and the norm of their gradients.
//
// Formula    t       counts steps from 1; lr is the learning rate; s the factor of the gradients (1 without)
//            adamw   g = s·grad; m ← β₁·m + (1−β₁)·g; v ← β₂·v + (1−β₂)·g²
//                    w ← w·(1 − lr·decay) − lr·m·c₁ / (√v·c₂ + eps)
//                    c₁ = 1 / (1−β₁ᵗ), c₂ = 1 / √(1−β₂ᵗ) with bias correction, else both 1
//            sgd     g = s·grad + decay·w; without momentum w ← w − lr·g
//                    v ← momentum·v + (1−dampening)·g; w ← w − lr·(nesterov ? g + momentum·v : v)
//            lion    g = s·grad; c = β₁·m + (1−β₁)·g; m ← β₂·m + (1−β₂)·g
//                    w ← w·(1 − lr·decay) − lr·sign(c), sign(0) = 0
//            muon    g = s·grad + decay·w; v ← μ·v + (1−μ)·g; u = nesterov ? (1−μ)·g + μ·v : v, μ = momentum;
//                    for each matrix u [R, C]: X = u/(‖u‖ + 1e-7), ns_steps times X ← a·X + (b·A + c·A·A)·X with
//                    A = X·Xᵀ, if R > C on uᵀ; a = 3.4445, b = −4.7750, c = 2.0315; w ← w − lr·√max(1, R/C)·X
//            by rows only the rows of w, m, v and master that ids name are updated, with the rows of grad: in others neither
//                    moments nor weights decay (lazy Adam). c₁ and c₂ count all steps.
//            norm    √(Σ grad²) over all elements of all tensors; scale = min(1, most / (norm + 1e-6))
// Gradient   none
// Layout     parameters, gradients and states of one shape each, contiguous; by rows (mlxtape/tape/rows.h): grad [n, …] of
//            w [V, …], ids [n]; ids outside [0, V) are skipped, the others must be distinct; norm takes such rows as they are.
//            lr, t, s, norm, scale: one number. muon: w [R, C], or […, R, C], a stack of matrices, each orthogonalised
//            separately (MLX: all as one). Parameters and states are updated in place.
// Types      w: f32, f16, bf16. grad: as w, or f32. m, v, master: f32. lr, s, norm, scale: f32; t, ids: i32. With a master
//            copy the update is applied to it, and w is its rounded value; otherwise w itself is rounded each time. X is
//            multiplied in the type of w.
// Cost       adamw: reads w or master, grad, m, v; writes all except grad; by rows n rows of each; lion has no v. norm: reads
//            grad. muon: one parameter at a time, 4·ns_steps·n²·(m + n/2) flop, n ≤ m its sides; all others: one launch for
//            up to 64.
// Limits     lr, t and s are read on the device, so a step can be captured once and replayed with a new rate.
//            A scale of NaN skips the step: nothing is changed, so that the host may check the norm later.
//            Call advance, which adds 1 to t, before each step. A gradient that is not finite makes w so: check the norm.
//            A norm above 1.8e19 is inf. The w of a step's slots must not overlap.
#pragma once

#include <vector>

#include "mlxtape/base/error.h"
#include "mlxtape/core/encoder.h"

namespace mlxtape::ops {

struct AdamWOptions {
  double beta1 = 0.9, beta2 = 0.999;  // 1 − beta is computed before rounding to f32, as in MLX
  float eps = 1e-8F;
  float weight_decay = 0.01F;    // 0: Adam
  bool bias_correction = false;  // as in MLX
};

struct AdamWSlot {
  Tensor w, grad, m, v;
  Tensor master = {};  // f32, for a 16-bit w; undefined: none
  Tensor ids = {};     // of a RowGrad whose rows grad holds; undefined: grad is dense
};

struct SgdOptions {
  float momentum = 0, weight_decay = 0, dampening = 0;
  bool nesterov = false;
};

struct SgdSlot {
  Tensor w, grad;
  Tensor v = {};  // undefined without momentum
  Tensor master = {};
  Tensor ids = {};
};

struct LionOptions {
  double beta1 = 0.9, beta2 = 0.99;
  float weight_decay = 0;
};

struct LionSlot {
  Tensor w, grad, m;
  Tensor master = {};
  Tensor ids = {};
};

struct MuonOptions {
  double momentum = 0.95;
  float weight_decay = 0.01F;
  bool nesterov = true;
  int ns_steps = 5;
};

struct MuonSlot {
  Tensor w, grad, v;
  Tensor master = {};
};

// Shared by all slots of a step; only adamw uses t; scale undefined: 1.
struct StepNumbers {
  Tensor lr, t;
  Tensor scale = {};
};

Check adamw_step_check(const std::vector<AdamWSlot>& slots, const StepNumbers& numbers,
                       const AdamWOptions& options);
Check sgd_step_check(const std::vector<SgdSlot>& slots, const StepNumbers& numbers,
                     const SgdOptions& options);
Check lion_step_check(const std::vector<LionSlot>& slots, const StepNumbers& numbers,
                      const LionOptions& options);
Check muon_step_check(const std::vector<MuonSlot>& slots, const StepNumbers& numbers,
                      const MuonOptions& options);
Check grad_norm_check(const std::vector<Tensor>& grads);

void adamw_step(CommandEncoder& encoder, const std::vector<AdamWSlot>& slots,
                const StepNumbers& numbers, const AdamWOptions& options = {});
void sgd_step(CommandEncoder& encoder, const std::vector<SgdSlot>& slots,
              const StepNumbers& numbers, const SgdOptions& options = {});
void lion_step(CommandEncoder& encoder, const std::vector<LionSlot>& slots,
               const StepNumbers& numbers, const LionOptions& options = {});
void muon_step(CommandEncoder& encoder, const std::vector<MuonSlot>& slots,
               const StepNumbers& numbers, const MuonOptions& options = {});
void advance(CommandEncoder& encoder, const Tensor& t);

struct GradNorm {
  Tensor norm, scale;  // one f32 each
};
GradNorm grad_norm(CommandEncoder& encoder, const std::vector<Tensor>& grads, float most);

}  // namespace mlxtape::ops
