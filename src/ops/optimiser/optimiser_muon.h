// What Muon does to a parameter before its matrices are made orthogonal.
#pragma once

#include "mlxtape/ops/optimiser.h"

namespace mlxtape::ops::optimiser {

// A slot of the kernel: u is written, and what it held does not matter.
struct MomentumSlot {
  Tensor w, grad, v, u;
  Tensor master = {};
  Tensor ids = {};  // never defined
};

// v moves, and u f32 of w's shape is what is to be made orthogonal.
void muon_momentum(CommandEncoder& encoder, const MuonSlot& slot, const Tensor& u,
                   const StepNumbers& numbers, const MuonOptions& options);

}  // namespace mlxtape::ops::optimiser
