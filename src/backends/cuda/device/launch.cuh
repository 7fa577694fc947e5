// How kernels are launched: overlapping, in clusters, with more shared memory than a block has by default.
#pragma once

#include <cuda_runtime.h>

#include <array>
#include <cstdint>
#include <limits>
#include <utility>

#include "backends/cuda/device/ring.cuh"
#include "backends/cuda/error.h"
#include "backends/cuda/overlap.h"

namespace mlxtape::cuda {

// Of an H100 or H200. Grids and scratch memory follow from the shape alone, so that the order of
// sums, and with it every bit, does not depend on the device.
constexpr int kMultiprocessors = 132;
constexpr int kSharedBytes = 227 * 1024;  // most that one block may have

// A kernel may start while the one before it on the stream still runs, which hides most of what a launch
// costs the device, about 1 us: its blocks take the room that ending blocks leave, and wait here. So
// this comes first in every kernel, before any memory is read or written, in every thread: then a kernel
// is done only after all before it are, and the order of the stream holds for memory as ever.
__device__ __forceinline__ void wait_turn() {
  asm volatile("griddepcontrol.launch_dependents;");
  asm volatile("griddepcontrol.wait;" ::: "memory");
}

// Whether this thread's device has compute capability 9.0, which alone runs <op>_hopper*.cu.
inline bool on_hopper() {
  thread_local int known_device = -1;
  thread_local bool known = false;
  int device = 0, major = 0, minor = 0;
  check(cudaGetDevice(&device), "asking for the device");
  if (device != known_device) {
    check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device),
          "asking for the device's kind");
    check(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device),
          "asking for the device's kind");
    known_device = device;
    known = major == 9 && minor == 0;
  }
  return known;
}

// Blocks of a launch, in one or two dimensions.
struct Blocks {
  dim3 count;
  Blocks(std::int64_t x, std::int64_t y = 1)  // NOLINT: a number is meant
      : count(static_cast<unsigned>(x), static_cast<unsigned>(y)) {
    if (x > std::numeric_limits<std::int32_t>::max() || y > 65535) {
      throw Error(Errc::kShape, "at most 2^31 - 1 blocks of work, got " + std::to_string(x) +
                                    " x " + std::to_string(y));
    }
  }
};

struct Launch {
  cudaLaunchConfig_t config{};
  cudaLaunchAttribute attributes[2]{};

  Launch(Blocks blocks, int threads, int shared, cudaStream_t stream) {
    config.gridDim = blocks.count;
    config.blockDim = dim3(static_cast<unsigned>(threads));
    config.dynamicSmemBytes = static_cast<std::size_t>(shared);
    config.stream = stream;
    config.attrs = attributes;
    if (overlap()) {
      cudaLaunchAttribute& early = attributes[config.numAttrs++];
      early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
      early.val.programmaticStreamSerializationAllowed = 1;
    }
  }
  void in_clusters_of(int blocks) {
    cudaLaunchAttribute& size = attributes[config.numAttrs++];
    size.id = cudaLaunchAttributeClusterDimension;
    size.val.clusterDim.x = static_cast<unsigned>(blocks);
    size.val.clusterDim.y = 1;
    size.val.clusterDim.z = 1;
  }
  Launch(const Launch&) = delete;  // config points into it
  Launch& operator=(const Launch&) = delete;
};

// Lets kernel have as much shared memory as there is. That holds for one device, so each thread remembers
// what it asked for where: asking takes longer than a launch.
inline void allow_shared(const void* kernel, int shared) {
  if (shared <= 32 * 1024) return;  // 48 KiB, less what the kernel has of its own, needs no asking
  struct Asked {
    const void* kernel;
    int device;
  };
  constexpr std::size_t kRemembered = 256;
  thread_local std::array<Asked, kRemembered> asked{};
  int device = 0;
  check(cudaGetDevice(&device), "asking for the device");
  Asked& slot = asked[reinterpret_cast<std::uintptr_t>(kernel) / 16 % kRemembered];
  if (slot.kernel == kernel && slot.device == device) return;
  cudaFuncAttributes has{};
  check(cudaFuncGetAttributes(&has, kernel), "asking for shared memory");
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                             kSharedBytes - static_cast<int>(has.sharedSizeBytes)),
        "asking for shared memory");
  slot = {kernel, device};
}

// The kernel begins with wait_turn. cluster: consecutive blocks that may reach each other's shared
// memory; 1: none.
template <class... Params, class... Args>
void launch(void (*kernel)(Params...), Blocks blocks, int threads, int shared, int cluster,
            cudaStream_t stream, Args&&... args) {
  allow_shared(reinterpret_cast<const void*>(kernel), shared);
  Launch how(blocks, threads, shared, stream);
  if (cluster > 1) how.in_clusters_of(cluster);
  check(cudaLaunchKernelEx(&how.config, kernel, std::forward<Args>(args)...), "the launch");
}

// How many clusters of this kernel run side by side on the device; to be asked once, it takes a while.
template <class... Params>
int clusters_at_once(void (*kernel)(Params...), int cluster, int threads, int shared) {
  allow_shared(reinterpret_cast<const void*>(kernel), shared);
  Launch how(cluster, threads, shared, nullptr);
  how.in_clusters_of(cluster);
  int count = 0;
  check(cudaOccupancyMaxActiveClusters(&count, kernel, &how.config), "counting clusters");
  return count;
}

}  // namespace mlxtape::cuda
