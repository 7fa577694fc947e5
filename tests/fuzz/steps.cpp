// Stands in for what an optimiser's step multiplies matrices with: a state knows which optimiser it is of, and no step is made here.
#include "mlxtape/base/error.h"
#include "mlxtape/ops/elementwise.h"
#include "mlxtape/ops/optimiser.h"

namespace mlxtape::ops {

namespace {

[[noreturn]] void refuse() { throw Error(Errc::kNoKernel, "fuzz: readers compute nothing"); }

}  // namespace

void muon_step(CommandEncoder& /*encoder*/, const std::vector<MuonSlot>& /*slots*/,
               const StepNumbers& /*numbers*/, const MuonOptions& /*options*/) {
  refuse();
}
Tensor multiply(CommandEncoder& /*encoder*/, Tensor /*a*/, double /*b*/) { refuse(); }

}  // namespace mlxtape::ops
