// Muon, made of other ops but for its momentum.
#include "optimiser_muon.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "mlxtape/ops/elementwise.h"
#include "mlxtape/ops/layout.h"
#include "mlxtape/ops/matmul.h"
#include "mlxtape/ops/reduce.h"

namespace mlxtape::ops {

namespace {

constexpr double kA = 3.4445, kB = -4.7750, kC = 2.0315;  // of mlx.optimizers.Muon
constexpr double kLeast = 1e-7;                           // added to a norm

Tensor transposed(CommandEncoder& encoder, const Tensor& x) {
  return transpose(encoder, x, {0, 2, 1});
}

// X of [N, R, C], in the type that it is used in; u f32.
Tensor of_norm_one(CommandEncoder& encoder, const Tensor& u, DType dtype) {
  const Tensor squares = sum(encoder, square(encoder, u), {-2, -1}, true);
  const Tensor norm = add(encoder, sqrt(encoder, squares), kLeast);
  return cast(encoder, divide(encoder, u, norm), dtype);
}

// One step of Newton and Schulz: towards a matrix whose singular values are all about 1. The side that is multiplied from
// is the shorter one.
Tensor nearer(CommandEncoder& encoder, const Tensor& x) {
  const bool tall = x.dim(1) > x.dim(2);
  const Tensor xt = transposed(encoder, x);
  const Tensor a = tall ? matmul(encoder, xt, x) : matmul(encoder, x, xt);
  Tensor aa = matmul(encoder, a, a);
  const Tensor b = add(encoder, multiply(encoder, std::move(aa), kC), multiply(encoder, a, kB));
  const Tensor ax = multiply(encoder, x, kA);
  return tall ? matmul(encoder, x, b, {.residual = ax}) : matmul(encoder, b, x, {.residual = ax});
}

}  // namespace

void muon_step(CommandEncoder& encoder, const std::vector<MuonSlot>& slots,
               const StepNumbers& numbers, const MuonOptions& options) {
  require(muon_step_check(slots, numbers, options));
  for (const MuonSlot& slot : slots) {
    if (slot.w.size() == 0) continue;
    const std::int64_t rank = slot.w.rank(), rows = slot.w.dim(rank - 2),
                       columns = slot.w.dim(rank - 1);
    const Tensor u = encoder.empty(slot.w.shape(), DType::kF32);
    optimiser::muon_momentum(encoder, slot, u, numbers, options);
    Tensor x = of_norm_one(encoder, reshape(encoder, u, {-1, rows, columns}), slot.w.dtype());
    for (int i = 0; i < options.ns_steps; ++i) x = nearer(encoder, x);
    const double factor =
        std::sqrt(std::max(1.0, static_cast<double>(rows) / static_cast<double>(columns)));
    const Tensor lr = multiply(encoder, numbers.lr, factor);
    // 1, or NaN: the momentum has the scale in it, and no step is made where there is none.
    Tensor is_step;
    if (numbers.scale.defined()) {
      is_step = add(encoder, multiply(encoder, numbers.scale, 0.0), 1.0);
    }
    sgd_step(encoder, {{slot.w, reshape(encoder, x, slot.w.shape()), {}, slot.master}},
             {lr, {}, is_step});
  }
}

}  // namespace mlxtape::ops
