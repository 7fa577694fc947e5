// Which weights dynamic_quant decides about, and how each is quantised.
#pragma once

#include "mlxtape/jobs/dynamic_quant.h"

namespace mlxtape::jobs {

// Throws kArgument for formats that there are not, and for a high that is no larger than low.
// dtype: of scales and biases.
void check_formats(const DynamicQuantOptions& options, DType dtype);

// Is it for the sensitivity to say how it is quantised?
bool is_measured(const models::Part& part, const DynamicQuantOptions& options);

models::WeightFormat format_of(const models::Part& part, const DynamicQuantOptions& options,
                               bool high);

}  // namespace mlxtape::jobs
