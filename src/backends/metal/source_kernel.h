// Kernels from a user's text in MSL (mlxtape/core/source_kernel.h).
#pragma once

#include "mlxtape/core/source_kernel.h"

namespace mlxtape::metal {

const Kernel& add_source_kernel(const SourceKernel& kernel);

}  // namespace mlxtape::metal
