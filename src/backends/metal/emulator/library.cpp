#include "backends/metal/emulator/library.h"

#include "backends/metal/emulator/text_hash.h"

namespace mlxtape::emulator {

const KernelFile* find_file(std::string_view text) {
  const std::uint64_t hash = text_hash(text);
  for (const KernelFile* file : kernel_files()) {
    if (file->text == hash) return file;
  }
  return nullptr;
}

const KernelInfo* find_kernel(const KernelFile& file, std::string_view name) {
  for (unsigned i = 0; i < file.kernel_count; ++i) {
    if (name == file.kernels[i].name) return &file.kernels[i];
  }
  return nullptr;
}

const KernelInfo* find_kernel(std::string_view name) {
  for (const KernelFile* file : kernel_files()) {
    if (const KernelInfo* kernel = find_kernel(*file, name)) return kernel;
  }
  return nullptr;
}

}  // namespace mlxtape::emulator
