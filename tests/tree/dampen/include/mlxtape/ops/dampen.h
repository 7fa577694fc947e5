// dampen: each row divided by one plus its gain times its mean square, and its gradient.
//
// Formula    m[r]     = 1/C · Σ_c x[r,c]²
//            u[r]     = 1 / (1 + gain[r]·m[r])
//            y[r,c]   = u[r]·x[r,c]
// Gradient   s[r]     = Σ_c dy[r,c]·x[r,c]
//            dx[r,c]  = u[r]·dy[r,c] − (2/C)·gain[r]·u[r]²·s[r]·x[r,c]
//            dgain[r] = −m[r]·u[r]²·s[r]
// Layout     x, y, dy, dx: [R, C]; gain, m, dgain: [R]. Strided inputs are copied first. Saved for
//            backward: x, gain, m.
// Types      x, y: f32, f16 or bf16. gain, m: f32. All sums are f32.
// Cost       forward: reads 1·RC, writes 1·RC elements; backward: reads 2·RC, writes 1·RC.
// Limits     C ≥ 1; R = 0 is legal and does nothing. gain ≥ 0 is the caller's promise (u has a pole
//            at gain·m = −1); it is not checked.
#pragma once

#include "mlxtape/base/error.h"
#include "mlxtape/core/encoder.h"

namespace mlxtape::ops {

// The contract as code: the first rule broken, or nothing.
Check dampen_check(const Tensor& x, const Tensor& gain);
Check dampen_backward_check(const Tensor& x, const Tensor& gain, const Tensor& m, const Tensor& dy);

struct Dampened {
  Tensor y;  // [R, C]
  Tensor m;  // [R]
};
Dampened dampen(CommandEncoder& encoder, const Tensor& x, const Tensor& gain);

// From the inputs and m of dampen, and dy, the gradient that reaches y.
struct DampenGradients {
  Tensor dx;     // [R, C]
  Tensor dgain;  // [R]
};
DampenGradients dampen_backward(CommandEncoder& encoder, const Tensor& x, const Tensor& gain,
                                const Tensor& m, const Tensor& dy);

}  // namespace mlxtape::ops
