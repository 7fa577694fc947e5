#include "mlxtape/core/registry.h"
namespace mlxtape::ops {
void register_matmul_cuda(KernelRegistry&) {}
}  // namespace mlxtape::ops
