// Which op each kernel belongs to, as built: the registry itself knows names only.
#pragma once

#include <span>

#include "mlxtape/core/registry.h"

namespace mlxtape {

struct OpKernels {
  const char* op;  // as in ops.list; "core" for those of the encoder
  Backend backend;
  void (*add)(KernelRegistry& registry);
};

// Generated from src/ops/ops.list: one entry per op and backend in the build.
std::span<const OpKernels> op_kernels();

}  // namespace mlxtape
