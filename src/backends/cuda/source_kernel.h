// Kernels from source text (mlxtape/core/source_kernel.h): NVRTC makes machine code of them, which is
// kept on disk under a hash of all that went into it.
#pragma once

#include <string>
#include <vector>

#include "mlxtape/core/source_kernel.h"

namespace mlxtape::cuda {

// Machine code of source for compute capability 9.0 = 90. From the folder where it is kept if it is
// there, whole and of the same text; else compiled, and kept if the folder can be written. Throws kBackend
// without NVRTC and kArgument with the compiler's own words when the source is wrong.
struct Compiled {
  std::string code;
  bool was_kept;
};
Compiled compile(const SourceKernel& kernel, int capability);

const Kernel& add_source_kernel(const SourceKernel& kernel);

}  // namespace mlxtape::cuda
