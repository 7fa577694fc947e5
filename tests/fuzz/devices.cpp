// Stands in for what the build generates from ops.list: readers need the encoder's own kernels and no op, and the ops would take
// minutes to compile.
#include "core/op_kernels.h"
#include "mlxtape/core/device.h"

namespace mlxtape {

namespace cpu {
void register_cpu_devices(std::vector<Device*>& devices, std::vector<AbsentDevice>& absent);
void register_memory_kernels(KernelRegistry& registry);
}  // namespace cpu

std::span<const OpKernels> op_kernels() {
  static constexpr OpKernels kCore[] = {{"core", Backend::kCpu, cpu::register_memory_kernels}};
  return kCore;
}

void register_all_devices(std::vector<Device*>& devices, std::vector<AbsentDevice>& absent) {
  cpu::register_cpu_devices(devices, absent);
}

}  // namespace mlxtape
