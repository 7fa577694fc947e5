// Which GPUs the kernels can use, and what to say of the others. Plain facts in, words out: no driver is asked.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

namespace mlxtape::cuda {

// What the kernels need: bulk copies and clusters, and the shared memory that a block of compute capability 9.0 may have.
inline constexpr int kOldestMajor = 9;
inline constexpr std::size_t kSharedBytes = 227 * 1024;

struct GpuFacts {
  std::string name;
  std::string failure;  // why it does not answer; empty: it does
  int major = 0, minor = 0;
  std::size_t shared_bytes = 0;  // that a block may ask for
};

struct GpuChoice {
  std::vector<int> usable;  // by their numbers
  std::string others;       // each that is not, and why; empty: there is none
};

// Why no GPU can be asked for: cuda is the newest version that the driver supports, 0 where there is no driver, and built the
// version of the runtime, as CUDA writes them: 13000 is 13.0.
inline std::string driver_reason(int cuda, int built) {
  if (cuda == 0) return "no NVIDIA driver";
  return "the NVIDIA driver supports CUDA " + std::to_string(cuda / 1000) + "." +
         std::to_string(cuda % 1000 / 10) + ", and this build needs CUDA " +
         std::to_string(built / 1000) + ": a newer driver is needed";
}

inline GpuChoice choose_gpus(const std::vector<GpuFacts>& all) {
  GpuChoice choice;
  for (std::size_t i = 0; i < all.size(); ++i) {
    const GpuFacts& gpu = all[i];
    const bool fits = gpu.major >= kOldestMajor && gpu.shared_bytes >= kSharedBytes;
    if (gpu.failure.empty() && fits) {
      choice.usable.push_back(static_cast<int>(i));
      continue;
    }
    choice.others +=
        (choice.others.empty() ? "" : "; ") + ("cuda:" + std::to_string(i)) +
        (gpu.failure.empty()
             ? ": " + gpu.name + " has compute capability " + std::to_string(gpu.major) + "." +
                   std::to_string(gpu.minor) + " and " + std::to_string(gpu.shared_bytes / 1024) +
                   " KiB of shared memory for a block; the kernels need " +
                   std::to_string(kOldestMajor) + ".0 and " + std::to_string(kSharedBytes / 1024) +
                   " KiB"
             : " does not answer: " + gpu.failure);
  }
  return choice;
}

}  // namespace mlxtape::cuda
