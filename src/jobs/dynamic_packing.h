// Which weights dynamic_quant decides about, and how each is packed.
#pragma once

#include "mlxtape/jobs/dynamic_quant.h"

namespace mlxtape::jobs {

// Throws kArgument for packings that there are not, and for a high that is no larger than low.
// dtype: of scales and biases.
void check_packings(const DynamicQuantOptions& options, DType dtype);

// Is it for the sensitivity to say how it is packed?
bool is_measured(const models::Part& part, const DynamicQuantOptions& options);

models::Packing packing_of(const models::Part& part, const DynamicQuantOptions& options, bool high);

}  // namespace mlxtape::jobs
