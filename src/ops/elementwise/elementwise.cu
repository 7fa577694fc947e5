// CUDA kernels of the elementwise family (formulas: formulas.h, kernels: elementwise_map.cuh), in as many
// files as it takes to compile each within a minute.
#include "mlxtape/core/registry.h"

namespace mlxtape::ops {

void register_elementwise_unary_cuda(KernelRegistry& registry);
void register_elementwise_unary_bwd_cuda(KernelRegistry& registry);
void register_elementwise_binary_cuda(KernelRegistry& registry);
void register_elementwise_whole_cuda(KernelRegistry& registry);
void register_elementwise_cast_cuda(KernelRegistry& registry);

void register_elementwise_cuda(KernelRegistry& registry) {
  register_elementwise_unary_cuda(registry);
  register_elementwise_unary_bwd_cuda(registry);
  register_elementwise_binary_cuda(registry);
  register_elementwise_whole_cuda(registry);
  register_elementwise_cast_cuda(registry);
}

}  // namespace mlxtape::ops
